"""How far a step by stages is, for people and programs that watch: a snapshot that stays as it is.

Micro-batches go through the stages forward, then backward. Backward passes add gradients to sums on
the devices; when all micro-batches have passed, the PS asks for the sums of the stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cleave.planner.stages.model import HeadSlice, PlannedStage
from cleave.scheduler.stages.device import Generation
from cleave.scheduler.stages.work import Unit, UnitKind


@dataclass(frozen=True, slots=True)
class HolderView:
    """A device that holds the layers of a stage, in numbers of micro-batches.

    Attributes:
        device: its session.
        forward, backward: that it was asked for and has not answered, by pass.
        summed: whose gradients are in sums on it.
        coming: whose gradients are in sums that the PS asked it for.
    """

    device: int
    forward: int
    backward: int
    summed: int
    coming: int


@dataclass(frozen=True, slots=True)
class StageView:
    """A stage, in numbers of micro-batches.

    Attributes:
        first, stop: its layers, counted from 0; `stop` is not among them.
        loss: whether it computes the loss as well.
        slice: which slice of the loss it is, where it has no layers but that.
        forward: that have passed it forward.
        backward: that have passed it backward, and whose gradients are not lost with a device.
        landed: whose gradients are in sums that the PS has.
        holders: the devices that hold the layers.
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
    """A step by stages.

    Attributes:
        batches: micro-batches.
        ended: whether it is over; the next one has not begun.
        repeated: passes that were done again, because a device was lost.
        stages: in the order of their layers.
    """

    batches: int
    ended: bool
    repeated: int
    stages: tuple[StageView, ...]


class UnitCount:
    """Counts what devices were asked for and have not answered.

    Args:
        units: all of it.
    """

    def __init__(self, units: Iterable[Unit]) -> None:
        self._forward: Counter[tuple[int, int]] = Counter()
        self._backward: Counter[tuple[int, int]] = Counter()
        for unit in units:
            match unit.kind:
                case UnitKind.FORWARD:
                    self._forward[unit.stage, unit.device] += 1
                case UnitKind.BACKWARD | UnitKind.LAST:
                    self._backward[unit.stage, unit.device] += 1

    def stage(
        self,
        number: int,
        plan: PlannedStage,
        devices: Sequence[int],
        outputs: int,
        generations: Sequence[Generation],
    ) -> StageView:
        """Return how far a stage is.

        Args:
            number: its place.
            plan: its layers.
            devices: that hold them.
            outputs: micro-batches whose output has come.
            generations: its sums.
        """
        summed: Counter[int] = Counter()
        coming: Counter[int] = Counter()
        landed = 0
        for sums in generations:
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
        # The output of a stage with the loss stays where it is: forward and backward are one.
        forward = backward if plan.loss else outputs
        return StageView(
            plan.first, plan.stop, plan.loss, forward, backward, landed, holders, plan.slice
        )
