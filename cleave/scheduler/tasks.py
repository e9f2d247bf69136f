"""What the scheduler moves: stored arrays, tasks, and the work that consists of tasks.

The scheduler knows nothing of matrix multiplication. A `Job` turns itself into tasks with named
inputs, says which arrived results may be assembled when, and knows when it is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cleave.gemm import Span
from cleave.planner.plan import DeviceRates


@dataclass(frozen=True, slots=True)
class ArrayRef:
    """A named array in a device's memory: a region of an operand.

    Attributes:
        id: its name on the wire; never reused.
        operand: which operand (one version of one matrix) it is cut from.
        rows, columns: which part, in the operand's own orientation.
        nbytes: its size.
    """

    id: int
    operand: int
    rows: Span
    columns: Span
    nbytes: int


@dataclass(slots=True, eq=False)
class Task:
    """One computation on one device and the block that it yields.

    Attributes:
        job: id of the job it belongs to.
        inputs: the arrays it needs, in the order of the operation's arguments.
        flops: its cost.
        output_bytes: the size of its result.
        detail: what the runtimes need to send and assemble it; opaque to the scheduler.
        failures: how often a device could not do it.
        failed_on: those devices.
        held: how often it was kept back because every device had failed it.
    """

    job: int
    inputs: tuple[ArrayRef, ...]
    flops: int
    output_bytes: int
    detail: Any
    failures: int = 0
    failed_on: set[int] = field(default_factory=set)
    held: int = 0


@dataclass(slots=True)
class Repartition:
    """Undone tasks cut anew.

    Attributes:
        assigned: the new tasks, with the device of each, in order.
        finish_s: when the last is done, predicted, seconds from now.
    """

    assigned: list[tuple[int, Task]]
    finish_s: float


class HeldArrays(Protocol):
    """Which arrays devices hold, or will hold when what is queued has been sent."""

    def stored(self, operand: int, rows: Span, columns: Span, itemsize: int) -> ArrayRef:
        """The array of this name, new or known."""
        ...

    def holders(self, operand: int) -> Mapping[int, Sequence[ArrayRef]]:
        """By device, the arrays of an operand that it holds."""
        ...


class Job(Protocol):
    """Something that a fleet can do in tasks."""

    @property
    def id(self) -> int: ...

    @property
    def title(self) -> str:
        """What people call it."""
        ...

    def runs_on(self, device: DeviceRates) -> bool:
        """Whether a device can do any of it at all."""
        ...

    def assign(
        self, devices: Sequence[DeviceRates], device_memory: HeldArrays
    ) -> Iterable[tuple[int, Task]]:
        """Tasks with the device of each, a device's tasks in the order it should get them.

        Raises:
            PlanError: when it cannot be done on these devices.
        """
        ...

    def arrived(self, task: Task, payload: Any) -> Iterable[tuple[Task, Any]]:
        """A result came: those that are to be put in place now, in order, it or others."""
        ...

    @property
    def expected_s(self) -> float | None:
        """How long it was predicted to take when it was assigned; None before."""
        ...

    def repartition(
        self,
        tasks: Sequence[Task],
        devices: Sequence[DeviceRates],
        busy_s: Mapping[int, float],
        device_memory: HeldArrays,
    ) -> Repartition | None:
        """The same results from other, smaller tasks: a proposal, for `replace`.

        Args:
            tasks: of this work, answered by nobody.
            devices: that may do it.
            busy_s: by device, what it has to do already.
            device_memory: as for `assign`.

        Returns:
            None where that cannot be done.
        """
        ...

    def replace(self, tasks: Sequence[Task], others: Sequence[Task]) -> None:
        """Tasks are given up for those that `repartition` made of them."""
        ...

    @property
    def complete(self) -> bool:
        """Whether every result is to be put in place, or is there."""
        ...
