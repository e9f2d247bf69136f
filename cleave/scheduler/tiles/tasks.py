"""What the scheduler handles: arrays, and the tasks of jobs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cleave.gemm import Span


@dataclass(frozen=True, slots=True)
class ArrayRef:
    """Names an array that devices can be sent: a region of an operand.

    Attributes:
        id: its name on the wire; never used for another.
        operand: which operand (one version of one matrix) it is cut from.
        rows, columns: which part of it, in the operand's own orientation.
        nbytes: its size.
    """

    id: int
    operand: int
    rows: Span
    columns: Span
    nbytes: int


@dataclass(slots=True, eq=False)
class Task:
    """Asks one device for one computation, and names the block that it yields.

    For a step by stages it is one order instead (`StageOrder`), with `job` 0 and no inputs.

    Attributes:
        job: id of its job.
        inputs: the arrays it needs, in the order of the operation's arguments.
        flops: floating-point operations that it takes.
        output_bytes: size of its result.
        detail: how to ask for it, which the session manager reads, and where its block goes, which
            the runtime reads. The scheduler does not look at it.
        input_ratio, output_ratio: coded over plain bytes of inputs and result, where they travel
            coded.
        failures: how often a device could not do it.
        failed_on: the devices that could not.
        held: how often it was kept back because every device had failed it.
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
    """Proposes tasks that replace undone ones.

    Attributes:
        assigned: (device, task) pairs of the new tasks, in order.
        finish_s: when the last one is predicted to be done, in seconds from now.
    """

    assigned: list[tuple[int, Task]]
    finish_s: float
