"""The state of one stage in a step: which micro-batches are where, and in whose sums."""

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
    """Holds the state of one stage in a step.

    A stage whose devices are lost may be divided: others like it each return a part of its sums.

    Attributes:
        plan: its layers.
        batches: how many micro-batches the step has.
        sums: which it returns.
        passes: whether it returns activations and their gradients too: one part of a stage does.
        devices: that may take micro-batches through it now.
        x, dy: by micro-batch, its input and its output's gradient, once they are here.
        forward: micro-batches whose output is here, or under way.
        backward: micro-batches whose gradients are in a generation, or on their way into one.
        kept: by micro-batch, the device that keeps something of it, and what.
        generations: in the order in which they began.
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
        """Return what was given and returned."""
        sums = [
            SumsRecord(g.device, frozenset(g.batches), g.found)
            for g in self.generations
            if g.landed
        ]
        by = self.forward_by, self.backward_by
        return StageRecord(self.plan, self.x, self.dy, self.y, self.dx, *by, sums)

    def generation_on(self, device: int) -> Generation:
        """Return the sums on a device to which more may be added, or new ones."""
        for generation in self.generations:
            if generation.device == device and not generation.taken:
                return generation
        self.generations.append(Generation(device))
        return self.generations[-1]

    @property
    def left(self) -> int:
        """Return how many micro-batches have not passed it in both directions."""
        return self.batches - sum(len(g.batches) for g in self.generations)

    @property
    def has_landed(self) -> bool:
        """Say whether its sums over all micro-batches are here."""
        return sum(len(g.batches) for g in self.generations if g.landed) == self.batches

    @property
    def returned(self) -> float:
        """Return how many activations devices return for a micro-batch that is left, 0 to 2."""
        if not self.passes:
            return 0.0
        done = len(self.y) + len(self.dx)
        return max(0.0, 2 * self.batches - done) / max(1, self.left)

    def tasks(self) -> tuple[int, int]:
        """Return how many of its tasks are done, and of how many. Any thread may call this."""
        generations = tuple(self.generations)
        done = sum(len(each.batches) for each in generations)
        done += sum(len(each.batches) for each in generations if each.landed) == self.batches
        if self.passes and not self.plan.loss:
            return done + len(self.y), 2 * self.batches + 1
        return done, self.batches + 1

    def next_backward(self, device: int) -> int | None:
        """Return the micro-batch whose backward pass a device is to do: one that it kept, first."""
        given = self.x if self.plan.loss else self.dy
        # Those first whose gradient others wait for.
        ready = sorted(given.keys() - self.backward, key=lambda b: (b in self.dx, b))
        for batch in ready:
            if batch in self.kept and self.kept[batch][0] == device:
                return batch
        return next((batch for batch in ready if batch not in self.kept), None)

    def next_forward(self) -> int | None:
        """Return the first micro-batch whose forward pass can begin; None when there is none."""
        ready = self.x.keys() - self.forward
        return min(ready) if ready and self.passes and not self.plan.loss else None

    def part(self, sums: frozenset[SumName], devices: list[int]) -> StageState:
        """Return a part of it that returns these sums alone, for the same micro-batches."""
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
        """Forget what a lost device held, so that it is done again.

        Returns:
            How many backward passes were in sums that are lost.
        """
        self.kept = {batch: kept for batch, kept in self.kept.items() if kept[0] != device}
        lost = [g for g in self.generations if g.device == device and not g.landed]
        for generation in lost:
            self.generations.remove(generation)
            self.backward -= generation.batches | generation.asked
        return sum(len(generation.batches) for generation in lost)

    def validate(self) -> None:
        """Check that each micro-batch is in one of its sums, and in none that it does not say.

        Raises:
            AssertionError: with what is inconsistent.
        """
        held = [b for g in self.generations for b in (*g.batches, *g.asked)]
        if len(held) != len(set(held)):
            raise AssertionError(f"a micro-batch is in two sums of {self.plan.named}")
        if set(held) != self.backward:
            raise AssertionError(f"{self.plan.named} has sums of other micro-batches than it says")
