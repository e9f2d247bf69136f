"""The state of one stage in a step: its micro-batches and gradient sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cleave.planner.stages.model import HeadSlice, PlannedStage
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.device import GradientAccumulator
from cleave.scheduler.stages.outcomes import StageRecord, SumsRecord
from cleave.scheduler.stages.work import KeptLayer, RequestKind, StageRequest, SumName


@dataclass(frozen=True, slots=True)
class HolderView:
    """The progress of one device that holds a stage's layers.

    Attributes:
        device: the device's session ID.
        forward: number of forward passes in flight.
        backward: number of backward passes in flight.
        summed: number of micro-batches in gradient sums that the PS has not requested yet.
        coming: number of micro-batches in gradient sums that the PS has requested but not received.
    """

    device: int
    forward: int
    backward: int
    summed: int
    coming: int


@dataclass(frozen=True, slots=True)
class StageView:
    """The progress of one stage, in numbers of micro-batches.

    Attributes:
        first, stop: the stage's layers, from `first` to `stop`, excluding `stop`; layer 0 is the
            first.
        loss: whether the stage also computes the loss.
        slice: the loss slice, if the stage consists of a loss slice; None otherwise.
        forward: number of micro-batches with a completed forward pass.
        backward: number of micro-batches with a completed backward pass whose gradients are not
            lost.
        landed: number of micro-batches in gradient sums that have arrived at the PS.
        holders: progress of each device that holds the layers.
    """

    first: int
    stop: int
    loss: bool
    forward: int
    backward: int
    landed: int
    holders: tuple[HolderView, ...]
    slice: HeadSlice | None = None


@dataclass(frozen=True, slots=True)
class StepView:
    """The progress of a stage-wise step.

    Attributes:
        batches: number of micro-batches.
        ended: whether the step has ended.
        repeated: number of passes that must be repeated because a device was lost or failed.
        stages: the stages, in layer order.
    """

    batches: int
    ended: bool
    repeated: int
    stages: tuple[StageView, ...]


class RequestCount:
    """Counts the requests in flight for each stage and device.

    Args:
        requests: all requests in flight.
    """

    def __init__(self, requests: Iterable[StageRequest]) -> None:
        self._forward: Counter[tuple[int, int]] = Counter()
        self._backward: Counter[tuple[int, int]] = Counter()
        for request in requests:
            match request.kind:
                case RequestKind.FORWARD:
                    self._forward[request.stage, request.device] += 1
                case RequestKind.BACKWARD | RequestKind.LAST:
                    self._backward[request.stage, request.device] += 1

    def stage(
        self,
        number: int,
        plan: PlannedStage,
        devices: Sequence[int],
        outputs: int,
        accumulators: Sequence[GradientAccumulator],
    ) -> StageView:
        """Return the progress of one stage.

        Args:
            number: the stage's number.
            plan: the stage's layers.
            devices: the devices that hold the layers.
            outputs: number of micro-batches whose output has arrived at the PS.
            accumulators: the stage's accumulators of gradient sums.
        """
        summed: Counter[int] = Counter()
        coming: Counter[int] = Counter()
        landed = 0
        for sums in accumulators:
            if sums.landed:
                landed += len(sums.batches)
            else:
                (coming if sums.taken else summed)[sums.device] += len(sums.batches)
        backward = landed + summed.total() + coming.total()
        holders = tuple(
            HolderView(
                device,
                self._forward[number, device],
                self._backward[number, device],
                summed[device],
                coming[device],
            )
            for device in devices
        )
        # A stage with the loss runs forward and backward in one pass.
        forward = backward if plan.loss else outputs
        return StageView(
            plan.first, plan.stop, plan.loss, forward, backward, landed, holders, plan.slice
        )


@dataclass(slots=True, eq=False)
class StageState:
    """The state of one stage in a step.

    A stage that lost all its devices may be divided into several `StageState` objects. Each object
    processes every micro-batch, but returns a different subset of the gradient sums.

    Attributes:
        plan: the stage's layers.
        batches: number of micro-batches in the step.
        sums: names of the gradient sums that this object returns.
        passes: whether this object also returns activations and their gradients. In a divided
            stage, exactly one object has this flag.
        devices: devices that may run the stage's micro-batches now.
        x: maps a micro-batch to the stage's input, once available.
        dy: maps a micro-batch to the gradient of the stage's output, once available.
        forward: micro-batches whose forward pass is completed or in flight.
        backward: micro-batches whose gradients are in an accumulator or whose backward pass is in
            flight.
        kept: maps a micro-batch to (device, wire IDs): the device that retains arrays for the
            backward pass, and the wire IDs of these arrays.
        accumulators: the accumulators of gradient sums, oldest first.
        y, dx, forward_by, backward_by: see `StageRecord`.
    """

    plan: PlannedStage
    batches: int
    sums: frozenset[SumName]
    devices: list[int]
    passes: bool = True
    x: dict[int, StageArray] = field(default_factory=dict)
    dy: dict[int, StageArray] = field(default_factory=dict)
    forward: set[int] = field(default_factory=set)
    backward: set[int] = field(default_factory=set)
    kept: dict[int, tuple[int, Sequence[KeptLayer]]] = field(default_factory=dict)
    accumulators: list[GradientAccumulator] = field(default_factory=list)
    y: dict[int, Any] = field(default_factory=dict)
    dx: dict[int, Any] = field(default_factory=dict)
    forward_by: dict[int, int] = field(default_factory=dict)
    backward_by: dict[int, int] = field(default_factory=dict)

    @property
    def record(self) -> StageRecord:
        """Return the stage's inputs and results, for auditing."""
        sums = [
            SumsRecord(g.device, frozenset(g.batches), g.found)
            for g in self.accumulators
            if g.landed
        ]
        by = self.forward_by, self.backward_by
        return StageRecord(self.plan, self.x, self.dy, self.y, self.dx, *by, sums)

    def accumulator_on(self, device: int) -> GradientAccumulator:
        """Return the device's accumulator that still accepts gradients.

        Create an accumulator if none exists.
        """
        for accumulator in self.accumulators:
            if accumulator.device == device and not accumulator.taken:
                return accumulator
        self.accumulators.append(GradientAccumulator(device))
        return self.accumulators[-1]

    @property
    def left(self) -> int:
        """Return the number of micro-batches whose backward pass is not completed."""
        return self.batches - sum(len(g.batches) for g in self.accumulators)

    @property
    def has_landed(self) -> bool:
        """Return whether the gradient sums over all micro-batches have arrived at the PS."""
        return sum(len(g.batches) for g in self.accumulators if g.landed) == self.batches

    @property
    def returned(self) -> float:
        """Return the average number of activations still to be returned per remaining micro-batch.

        Activations are the stage's output and the gradient of its input.
        """
        if not self.passes:
            return 0.0
        done = len(self.y) + len(self.dx)
        return max(0.0, 2 * self.batches - done) / max(1, self.left)

    def tasks(self) -> tuple[int, int]:
        """Return the number of completed tasks and the total number of tasks. Thread-safe."""
        accumulators = tuple(self.accumulators)
        done = sum(len(each.batches) for each in accumulators)
        done += sum(len(each.batches) for each in accumulators if each.landed) == self.batches
        if self.passes and not self.plan.loss:
            return done + len(self.y), 2 * self.batches + 1
        return done, self.batches + 1

    def next_backward(self, device: int) -> int | None:
        """Return the next micro-batch for a device's backward pass; None if none is ready.

        A micro-batch comes first if the device retained arrays of its forward pass. A micro-batch
        is excluded if another device retained such arrays.
        """
        given = self.x if self.plan.loss else self.dy
        # Micro-batches without an input gradient come first because other stages wait for it.
        ready = sorted(given.keys() - self.backward, key=lambda b: (b in self.dx, b))
        for batch in ready:
            if batch in self.kept and self.kept[batch][0] == device:
                return batch
        return next((batch for batch in ready if batch not in self.kept), None)

    def next_forward(self) -> int | None:
        """Return the first micro-batch that can start its forward pass; None if none can."""
        ready = self.x.keys() - self.forward
        return min(ready) if ready and self.passes and not self.plan.loss else None

    def part(self, sums: frozenset[SumName], devices: list[int]) -> StageState:
        """Return a part of this stage that processes the same micro-batches.

        Args:
            sums: names of the gradient sums that the new part returns.
            devices: devices that run the new part.
        """
        return StageState(
            self.plan,
            self.batches,
            sums,
            devices,
            passes=False,
            x=self.x,
            dy=self.dy,
            y=self.y,
        )

    def forget(self, device: int) -> int:
        """Discard everything that was lost with a device: retained arrays and gradient sums.

        Returns:
            The number of backward passes whose gradients were in the lost sums.
        """
        self.kept = {batch: kept for batch, kept in self.kept.items() if kept[0] != device}
        lost = [g for g in self.accumulators if g.device == device and not g.landed]
        for accumulator in lost:
            self.accumulators.remove(accumulator)
            self.backward -= accumulator.batches | accumulator.asked
        return sum(len(accumulator.batches) for accumulator in lost)

    def validate(self) -> None:
        """Check that the accumulators contain each micro-batch of `backward` once, and no others.

        Raises:
            AssertionError: the state is inconsistent.
        """
        held = [b for g in self.accumulators for b in (*g.batches, *g.asked)]
        if len(held) != len(set(held)):
            raise AssertionError(f"a micro-batch is in two sums of {self.plan.named}")
        if set(held) != self.backward:
            raise AssertionError(f"{self.plan.named} has sums of other micro-batches than it says")
