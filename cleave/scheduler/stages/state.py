"""The state of one stage in a step, and snapshots of the progress of stages and steps.

Micro-batches pass through the stages forward, then backward. Backward passes add gradients to sums
on the devices. After all backward passes, the PS requests the stage's sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cleave.planner.stages.model import HeadSlice, PlannedStage
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.outcomes import StageRecord, SumsRecord
from cleave.scheduler.stages.passes import GradientAccumulator
from cleave.scheduler.stages.resident import Holding
from cleave.scheduler.stages.work import KeptLayer, SumName

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class HolderView:
    """The progress of one device that runs a stage, counted in micro-batches.

    Attributes:
        forward, backward: number of forward passes and of backward passes in flight.
    """

    device: int
    forward: int
    backward: int
    summed: int  # micro-batches in gradient sums that the PS has not requested
    coming: int  # micro-batches in gradient sums that the PS has requested but not received


@dataclass(frozen=True, slots=True)
class StageView:
    """The progress of one stage, counted in micro-batches.

    Attributes:
        first, stop: the stage's layers, from `first` to `stop`, excluding `stop`.
    """

    first: int
    stop: int
    loss: bool  # whether the stage also computes the loss
    forward: int  # completed forward passes
    backward: int  # completed backward passes whose gradients are not lost
    landed: int  # micro-batches in gradient sums that have arrived at the PS
    holders: tuple[HolderView, ...]
    slice: HeadSlice | None = None  # the loss slice of the stage; None if the stage has layers


@dataclass(frozen=True, slots=True)
class StepView:
    """The progress of a step by stages."""

    batches: int  # number of micro-batches
    ended: bool
    repeated: int  # number of passes that must be repeated because a device was lost or failed
    stages: tuple[StageView, ...]  # the stages, in layer order
    # with trained state on devices, the number of steps since the snapshot; None without
    logged: int | None = None


@dataclass(slots=True, eq=False)
class StageState:
    """The state of one stage in a step.

    A stage that lost all its devices may be divided into several `StageState` objects. Each
    processes every micro-batch, but returns a different subset of the gradient sums.

    With `embeds`, the stage has passes of two kinds; see `StepWork.embedding`.

    Attributes:
        batches: number of passes that add gradients to sums, normally one for each micro-batch.
        embeds: number of the first pass that computes the embedding; None if the stage does not.
        passes: whether this object also returns activations and their gradients. In a divided
            stage, exactly one object does.
        x, dy: the stage's input and the gradient of its output, by micro-batch, once available.
        kept: maps a micro-batch to the device that retains arrays for the backward pass, and to
            the wire IDs of those arrays.
        y, dx: the stage's output and the gradient of its input, by micro-batch, once received.
        forward_by, backward_by: the device that returned `y` or `dx`, by micro-batch.
        squares: with trained state on devices, the sum of the stage's squared gradients, once
            received.
        owes_state: whether the device must still return the stage's trained state.
        state: the returned trained state, by array and first row.
        held_by: the device that returned the trained state.
    """

    plan: PlannedStage
    batches: int
    sums: frozenset[SumName]  # names of the gradient sums that this object returns
    devices: list[int]  # devices that may run the stage's micro-batches now
    passes: bool = True
    embeds: int | None = None
    x: dict[int, StageArray] = field(default_factory=dict)
    dy: dict[int, StageArray] = field(default_factory=dict)
    # micro-batches whose forward pass is completed or in flight
    forward: set[int] = field(default_factory=set)
    # micro-batches whose gradients are in an accumulator or whose backward pass is in flight
    backward: set[int] = field(default_factory=set)
    kept: dict[int, tuple[int, Sequence[KeptLayer]]] = field(default_factory=dict)
    # the accumulators of gradient sums, oldest first
    accumulators: list[GradientAccumulator] = field(default_factory=list)
    y: dict[int, Any] = field(default_factory=dict)
    dx: dict[int, Any] = field(default_factory=dict)
    forward_by: dict[int, int] = field(default_factory=dict)
    backward_by: dict[int, int] = field(default_factory=dict)
    told: bool = False  # the training thread knows that the stage has finished
    squares: float | None = None
    owes_state: bool = False
    state: Mapping[tuple[StageArray, int], Any] = field(default_factory=dict)
    held_by: Holding | None = None

    @property
    def gradients(self) -> dict[SumName, list[list[Any]]]:
        """Return the gradient sums that have arrived, in the form of `StepResult.gradients`."""
        found: dict[SumName, list[list[Any]]] = {}
        # A fixed order makes the result independent of which device answers first.
        landed = (g for g in self.accumulators if g.landed)
        for accumulator in sorted(landed, key=lambda g: (g.device, min(g.batches))):
            parts: dict[SumName, list[Any]] = {}
            for layer, name, first in sorted(accumulator.found):
                rows = accumulator.found[layer, name, first]
                parts.setdefault((layer, name), []).append(rows)
            for key, part in parts.items():
                found.setdefault(key, []).append(part)
        return found

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

    def record_of(self, batch: int) -> StageRecord:
        """Return the inputs and results of one micro-batch, for auditing."""

        def only(held: dict[int, _Value]) -> dict[int, _Value]:
            return {batch: held[batch]} if batch in held else {}

        return StageRecord(
            self.plan,
            only(self.x),
            only(self.dy),
            only(self.y),
            only(self.dx),
            only(self.forward_by),
            only(self.backward_by),
            [],
        )

    def view(self, number: int, flying: Counter[tuple[bool, int, int]]) -> StageView:
        """Return the progress of this stage.

        Args:
            number: the stage's number.
            flying: number of passes in flight, by (is forward, stage number, device).
        """
        summed: Counter[int] = Counter()
        coming: Counter[int] = Counter()
        landed = 0
        for sums in self.accumulators:
            passed = sum(not self.is_embedding(number) for number in sums.batches)
            if sums.landed:
                landed += passed
            else:
                (coming if sums.taken else summed)[sums.device] += passed
        backward = landed + summed.total() + coming.total()
        holders = tuple(
            HolderView(
                device,
                flying[True, number, device],
                flying[False, number, device],
                summed[device],
                coming[device],
            )
            for device in self.devices
        )
        plan = self.plan
        # A stage with the loss runs forward and backward in one pass.
        forward = backward if plan.loss else len(self.y)
        return StageView(
            plan.first, plan.stop, plan.loss, forward, backward, landed, holders, plan.slice
        )

    def accumulator_on(self, device: int) -> GradientAccumulator:
        """Return the device's accumulator that still accepts gradients, created if necessary."""
        for accumulator in self.accumulators:
            if accumulator.device == device and not accumulator.taken:
                return accumulator
        self.accumulators.append(GradientAccumulator(device))
        return self.accumulators[-1]

    def is_embedding(self, number: int) -> bool:
        """Return whether a pass computes the embedding."""
        return self.embeds is not None and number >= self.embeds

    @property
    def owes_dx(self) -> bool:
        """Return whether the gradient of the stage's input is missing for any micro-batch."""
        count = self.batches if self.embeds is None else min(self.batches, self.embeds)
        return len(self.dx) < count

    @property
    def left(self) -> int:
        """Return the number of micro-batches whose backward pass is not completed."""
        return self.batches - sum(len(g.batches) for g in self.accumulators)

    @property
    def has_landed(self) -> bool:
        """Return whether the gradient sums over all micro-batches have arrived at the PS.

        With trained state on devices, return whether the device has used the sums, and returned
        its state if the PS fetches it.
        """
        landed = sum(len(g.batches) for g in self.accumulators if g.landed)
        return landed == self.batches and not self.owes_state

    @property
    def returned(self) -> float:
        """Return the average number of activations still to be returned per remaining micro-batch.

        The stage's output and the gradient of its input both count as activations.
        """
        if not self.passes:
            return 0.0
        done = len(self.y) + len(self.dx)
        return max(0.0, 2 * self.batches - done) / max(1, self.left)

    def tasks(self) -> tuple[int, int]:
        """Return the number of completed tasks and the total number of tasks. Thread-safe."""
        accumulators = tuple(self.accumulators)
        done = sum(len(each.batches) for each in accumulators)
        landed = sum(len(each.batches) for each in accumulators if each.landed)
        done += landed == self.batches and not self.owes_state
        if self.passes and not self.plan.loss:
            return done + len(self.y), 2 * self.batches + 1
        return done, self.batches + 1

    def next_backward(self, device: int) -> int | None:
        """Return the next micro-batch for a device's backward pass; None if none is ready.

        Micro-batches whose arrays the device retains come first. Micro-batches whose arrays another
        device retains are excluded.
        """
        given = {*self.dy}
        if self.plan.loss:
            given |= {number for number in self.x if not self.is_embedding(number)}
        # Micro-batches without an input gradient come first because other stages wait for it.
        ready = sorted(given - self.backward, key=lambda b: (b in self.dx, b))
        for batch in ready:
            if batch in self.kept and self.kept[batch][0] == device:
                return batch
        return next((batch for batch in ready if batch not in self.kept), None)

    def next_forward(self) -> int | None:
        """Return the first micro-batch that can start its forward pass; None if none can."""
        ready = self.x.keys() - self.forward
        if self.plan.loss:  # the layers run together with the loss
            ready = {number for number in ready if self.is_embedding(number)}
        return min(ready) if ready and self.passes else None

    def part(self, sums: frozenset[SumName], devices: list[int]) -> StageState:
        """Create a part of this stage that returns the gradient sums `sums`."""
        return StageState(
            self.plan, self.batches, sums, devices, passes=False, x=self.x, dy=self.dy, y=self.y
        )

    def forget(self, device: int) -> int:
        """Discard a lost device's arrays and sums. Return how many completed passes are lost."""
        self.kept = {batch: kept for batch, kept in self.kept.items() if kept[0] != device}
        lost = [g for g in self.accumulators if g.device == device and not g.landed]
        for accumulator in lost:
            self.accumulators.remove(accumulator)
            self.backward -= accumulator.batches | accumulator.asked
        return sum(len(accumulator.batches) for accumulator in lost)

    def validate(self) -> None:
        """Check that the accumulators contain the micro-batches of `backward`, each exactly once.

        Raises:
            AssertionError: if the state is inconsistent.
        """
        held = [b for g in self.accumulators for b in (*g.batches, *g.asked)]
        if len(held) != len(set(held)):
            raise AssertionError(f"a micro-batch is in two sums of {self.plan.named}")
        if set(held) != self.backward:
            raise AssertionError(
                f"{self.plan.named} has sums of different micro-batches than it reports"
            )
