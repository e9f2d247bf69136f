"""Tasks and arrays: the units of computation and data that the scheduler handles."""

from __future__ import annotations

from dataclasses import dataclass, field

from cleave.gemm import Block, Span
from cleave.scheduler.stages.work import StageOrder


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


@dataclass(frozen=True, slots=True)
class GemmTask:
    """Details of a GEMM task. The scheduler does not read them.

    Attributes:
        transpose_a, transpose_b: whether the device transposes the arrays before multiplying.
    """

    block: Block
    tile: int  # number of the block's tile, a key of `GemmJob.tiles`
    transpose_a: bool
    transpose_b: bool
    partial: bool  # whether the block is a partial sum along k
    out: str  # dtype of the result, by its name in the protocol

    @property
    def rows(self) -> int:
        """Return the number of rows of the result."""
        return self.block.m.size

    @property
    def columns(self) -> int:
        """Return the number of columns of the result."""
        return self.block.n.size


@dataclass(slots=True, eq=False)
class Task:
    """One computation on one device, which produces one output block.

    In a step by stages, `detail` is a `StageOrder`, `job` is 0, and the task has no inputs.

    Attributes:
        input_ratio, output_ratio: compressed size divided by uncompressed size.
    """

    job: int
    inputs: tuple[ArrayRef, ...]  # the input arrays, in the order of the operation's arguments
    flops: int
    output_bytes: int
    detail: GemmTask | StageOrder  # the scheduler does not read it
    input_ratio: float = 1.0
    output_ratio: float = 1.0
    failures: int = 0  # number of times the task failed on a device
    failed_on: set[int] = field(default_factory=set)
    held: int = 0  # number of times the task was held back because it failed on every device

    @property
    def gemm(self) -> GemmTask:
        """Return the details of a task of a GEMM job."""
        assert isinstance(self.detail, GemmTask)
        return self.detail
