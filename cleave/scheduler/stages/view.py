"""Snapshots of a stage-wise step for people and programs that monitor training.

Micro-batches pass through the stages forward, then backward. Backward passes add gradients to sums
on the devices. After all micro-batches have passed backward, the PS requests the stage's sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cleave.planner.stages.model import HeadSlice, PlannedStage
from cleave.scheduler.stages.device import GradientAccumulator
from cleave.scheduler.stages.work import RequestKind, StageRequest


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
