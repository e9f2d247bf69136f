"""One stage's state in a step: its micro-batches and their gradient sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cleave.planner.stages.model import PlannedStage
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.device import Generation
from cleave.scheduler.stages.outcomes import StageRecord, SumsRecord
from cleave.scheduler.stages.work import KeptLayer, SumName


@dataclass(slots=True, eq=False)
class StageState:
    """The state of one stage in a step.

    A stage that lost its devices may be divided into several that each return a part of its sums.

    Attributes:
        plan: the stage's layers.
        batches: number of micro-batches in the step.
        sums: the sums that the stage returns.
        passes: whether it returns activations and their gradients too; one part of a stage does.
        devices: devices that may run micro-batches through it now.
        x, dy: by micro-batch, its input and its output's gradient, once available.
        forward: micro-batches whose output is at the PS or in flight.
        backward: micro-batches whose gradients are in a generation or in flight.
        kept: by micro-batch, the device that keeps arrays of it, and their wire ids.
        generations: the generations, oldest first.
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
    generations: list[Generation] = field(default_factory=list)
    y: dict[int, Any] = field(default_factory=dict)
    dx: dict[int, Any] = field(default_factory=dict)
    forward_by: dict[int, int] = field(default_factory=dict)
    backward_by: dict[int, int] = field(default_factory=dict)

    @property
    def record(self) -> StageRecord:
        """Return the stage's inputs and results."""
        sums = [
            SumsRecord(g.device, frozenset(g.batches), g.found)
            for g in self.generations
            if g.landed
        ]
        by = self.forward_by, self.backward_by
        return StageRecord(self.plan, self.x, self.dy, self.y, self.dx, *by, sums)

    def generation_on(self, device: int) -> Generation:
        """Return a device's open generation of sums, or a new one."""
        for generation in self.generations:
            if generation.device == device and not generation.taken:
                return generation
        self.generations.append(Generation(device))
        return self.generations[-1]

    @property
    def left(self) -> int:
        """Return the number of micro-batches that have not passed in both directions."""
        return self.batches - sum(len(g.batches) for g in self.generations)

    @property
    def has_landed(self) -> bool:
        """Return whether the sums over all micro-batches are at the PS."""
        return sum(len(g.batches) for g in self.generations if g.landed) == self.batches

    @property
    def returned(self) -> float:
        """Return the average activations devices return per remaining micro-batch, 0 to 2."""
        if not self.passes:
            return 0.0
        done = len(self.y) + len(self.dx)
        return max(0.0, 2 * self.batches - done) / max(1, self.left)

    def tasks(self) -> tuple[int, int]:
        """Return the number of completed tasks and of all tasks. Any thread may call this."""
        generations = tuple(self.generations)
        done = sum(len(each.batches) for each in generations)
        done += sum(len(each.batches) for each in generations if each.landed) == self.batches
        if self.passes and not self.plan.loss:
            return done + len(self.y), 2 * self.batches + 1
        return done, self.batches + 1

    def next_backward(self, device: int) -> int | None:
        """Return the next micro-batch for a device's backward pass, preferring one that it kept."""
        given = self.x if self.plan.loss else self.dy
        # First the micro-batches whose gradients other stages wait for.
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
        """Return a part of the stage that returns only these sums, for the same micro-batches."""
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
        """Discard a lost device's arrays; return the number of backward passes in its lost sums."""
        self.kept = {batch: kept for batch, kept in self.kept.items() if kept[0] != device}
        lost = [g for g in self.generations if g.device == device and not g.landed]
        for generation in lost:
            self.generations.remove(generation)
            self.backward -= generation.batches | generation.asked
        return sum(len(generation.batches) for generation in lost)

    def validate(self) -> None:
        """Check that the generations contain exactly the micro-batches of `backward`, each once.

        Raises:
            AssertionError: the state is inconsistent.
        """
        held = [b for g in self.generations for b in (*g.batches, *g.asked)]
        if len(held) != len(set(held)):
            raise AssertionError(f"a micro-batch is in two sums of {self.plan.named}")
        if set(held) != self.backward:
            raise AssertionError(f"{self.plan.named} has sums of other micro-batches than it says")
