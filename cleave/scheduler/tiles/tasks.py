"""Arrays and tasks, the scheduler's units of data and work."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cleave.gemm import Span


@dataclass(frozen=True, slots=True)
class ArrayRef:
    """A reference to an array that devices can be sent: a region of an operand.

    Attributes:
        id: the array's name on the wire, never reused.
        operand: the operand (one version of one matrix) that contains the array.
        rows, columns: the array's region, in the operand's own orientation.
        nbytes: size in bytes.
    """

    id: int
    operand: int
    rows: Span
    columns: Span
    nbytes: int


@dataclass(slots=True, eq=False)
class Task:
    """One computation for one device, and the block that it yields.

    In a step by stages, a task is one order (`StageOrder`), with `job` 0 and no inputs.

    Attributes:
        job: id of the task's job.
        inputs: the input arrays, in the order of the operation's arguments.
        flops: number of floating-point operations.
        output_bytes: size of the result.
        detail: how to request the task (for the session manager) and where its block goes (for the
            runtime). The scheduler never reads it.
        input_ratio, output_ratio: compressed size over plain size, where links are compressed.
        failures: number of times a device failed the task.
        failed_on: the devices that failed the task.
        held: number of times the task was kept back because every device had failed it.
    """

    job: int
    inputs: tuple[ArrayRef, ...]
    flops: int
    output_bytes: int
    detail: Any
    input_ratio: float = 1.0
    output_ratio: float = 1.0
    failures: int = 0
    failed_on: set[int] = field(default_factory=set)
    held: int = 0


@dataclass(slots=True)
class Repartition:
    """A proposal of tasks to replace undone ones.

    Attributes:
        assigned: (device, task) pairs of the new tasks, in order.
        finish_s: predicted finish time of the last task, in seconds from now.
    """

    assigned: list[tuple[int, Task]]
    finish_s: float
