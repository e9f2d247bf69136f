"""Tasks and arrays: the units of computation and data that the scheduler handles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cleave.gemm import Span


@dataclass(frozen=True, slots=True)
class ArrayRef:
    """A reference to an array: a region of an operand that can be sent to devices.

    Attributes:
        rows, columns: the region, in the operand's own orientation.
    """

    id: int  # the array's ID in protocol messages. IDs are never reused.
    operand: int  # ID of the operand, which is one version of one matrix
    rows: Span
    columns: Span
    nbytes: int


@dataclass(slots=True, eq=False)
class Task:
    """One computation on one device, which produces one output block.

    In a step by stages, a task is one order (`StageOrder`) with `job` 0 and no inputs.

    Attributes:
        input_ratio, output_ratio: compressed size divided by uncompressed size.
    """

    job: int
    inputs: tuple[ArrayRef, ...]  # the input arrays, in the order of the operation's arguments
    flops: int
    output_bytes: int
    detail: Any  # the `GemmTask` or `StageOrder`. The scheduler does not read it.
    input_ratio: float = 1.0
    output_ratio: float = 1.0
    failures: int = 0  # number of times the task failed on a device
    failed_on: set[int] = field(default_factory=set)
    held: int = 0  # number of times the task was held back because it failed on every device
