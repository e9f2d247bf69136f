"""What the scheduler handles: arrays, tasks, and the jobs that consist of tasks.

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


class HeldArrays(Protocol):
    """Tells which arrays devices hold, or will hold when queued tasks have been sent."""

    def array_of(self, operand: int, rows: Span, columns: Span, itemsize: int) -> ArrayRef:
        """Return the array that stands for a region; the first time, give it an id.

        No device need have it yet.
        """
        ...

    def holders(self, operand: int) -> Mapping[int, Sequence[ArrayRef]]:
        """Return, by device, the arrays of an operand that it holds."""
        ...


class Job(Protocol):
    """Does something on a fleet in tasks; the scheduler knows no more of it than this."""

    @property
    def id(self) -> int:
        """Return its number, never used for another job."""
        ...

    @property
    def title(self) -> str:
        """Return the name that people read."""
        ...

    def runs_on(self, device: DeviceRates) -> bool:
        """Say whether a device can do any task of the job."""
        ...

    def assign(
        self, devices: Sequence[DeviceRates], device_memory: HeldArrays
    ) -> Iterable[tuple[int, Task]]:
        """Return (device, task) pairs, each device's tasks in the order it should get them.

        Raises:
            PlanError: when the job cannot be done on these devices.
        """
        ...

    def arrived(self, task: Task, payload: Any) -> Iterable[tuple[Task, Any]]:
        """Take a result; return the results, this one or others, to put in place now, in order."""
        ...

    @property
    def expected_s(self) -> float | None:
        """Return the seconds that were predicted when the job was assigned; None before."""
        ...

    def repartition(
        self,
        tasks: Sequence[Task],
        devices: Sequence[DeviceRates],
        busy_s: Mapping[int, float],
        device_memory: HeldArrays,
    ) -> Repartition | None:
        """Propose other, smaller tasks with the same results, for `replace`.

        Args:
            tasks: tasks of this job that no device has answered.
            devices: devices that may do them.
            busy_s: by device, the seconds of work that it already has.
            device_memory: as for `assign`.

        Returns:
            None where that cannot be done.
        """
        ...

    def replace(self, tasks: Sequence[Task], others: Sequence[Task]) -> None:
        """Replace tasks by those that `repartition` made of them."""
        ...

    @property
    def complete(self) -> bool:
        """Say whether every result has been put in place, or may be now."""
        ...
