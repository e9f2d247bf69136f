"""Snapshots of a step by stages, for people and programs that watch.

Micro-batches go through the stages forward, then backward. Backward passes add gradients to sums on
the devices. When all micro-batches have passed, the PS requests the stage's sums.
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
    """A device that holds a stage's layers, with counts of micro-batches.

    Attributes:
        device: the device's session id.
        forward, backward: micro-batches in flight, by pass.
        summed: micro-batches in sums on the device.
        coming: micro-batches in sums that the PS has requested.
    """

    device: int
    forward: int
    backward: int
    summed: int
    coming: int


@dataclass(frozen=True, slots=True)
class StageView:
    """A stage, with counts of micro-batches.

    Attributes:
        first, stop: range of layers, counted from 0, without `stop`.
        loss: whether the stage computes the loss as well.
        slice: the slice of the loss, if the stage is only that.
        forward: micro-batches that have passed forward.
        backward: micro-batches that have passed backward and whose gradients are not lost.
        landed: micro-batches in sums that the PS has.
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
        batches: number of micro-batches.
        ended: whether the step has ended and the next one has not begun.
        repeated: passes repeated because a device was lost or failed.
        stages: the stages, in layer order.
    """

    batches: int
    ended: bool
    repeated: int
    stages: tuple[StageView, ...]


class UnitCount:
    """Counts of requests in flight.

    Args:
        units: all units in flight.
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
        """Return a stage's progress.

        Args:
            devices: the devices that hold the layers.
            outputs: number of micro-batches whose output has arrived.
            generations: the stage's generations of sums.
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
        # A stage with the loss does forward and backward in one pass.
        forward = backward if plan.loss else outputs
        return StageView(
            plan.first, plan.stop, plan.loss, forward, backward, landed, holders, plan.slice
        )
