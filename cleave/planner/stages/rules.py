"""The rules by which the PS assigns requests to devices in a step by stages.

A request is the forward or the backward pass of one micro-batch through one stage. The scheduler
(`cleave.scheduler.stages.step`) and the simulation for forecasts both call these functions.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from cleave.planner.stages.model import Keep, KeptBatches

# Maximum number of requests in flight on a device: it computes one while the other
# is being transferred.
REQUESTS_AT_ONCE: Final = 2


class Pass(Enum):
    """The direction of a micro-batch pass."""

    FORWARD = "forward"
    BACKWARD = "backward"


def turn(in_flight: int, request_s: float, device: int) -> tuple[int, float, int]:
    """Return an eligible device's sort key. The device with the lowest key gets the next request.

    Devices with fewer requests in flight come first, so no device gets a second request while
    another device of the stage is idle. Among equally busy devices, the fastest comes first.
    """
    return in_flight, request_s, device


def may_have_another(in_flight: int) -> bool:
    """Return True if a device with `in_flight` requests in flight may get another request."""
    return in_flight < REQUESTS_AT_ONCE


def next_pass(
    *, forward: bool, backward: bool, last_was_backward: bool, forward_first: bool = False
) -> Pass | None:
    """Return the direction of a device's next request; None if no request is ready.

    If both directions are ready, the device alternates, unless `forward_first` is set. If backward
    passes always came first, later stages would run out of micro-batches. If forward passes always
    come first, earlier stages may run out of gradients.
    """
    if forward and (forward_first or last_was_backward or not backward):
        return Pass.FORWARD
    return Pass.BACKWARD if backward else None


def next_kept(allowed: KeptBatches, inputs: int, activations: int, *, planned: bool = True) -> Keep:
    """Return what a device retains of its next micro-batch until the backward pass.

    Args:
        inputs: number of micro-batches for which the device retains only the layer inputs.
        activations: number of micro-batches for which the device also retains activations.
        planned: False if the device has taken over the stage from another device. If so, the plan
            has reserved no memory on the device for the stage's activations.
    """
    if not planned:
        allowed = KeptBatches(allowed.inputs)
    return allowed.next(inputs, activations)


def may_take_sums(batches_left: int, *, gradients_awaited: bool = False) -> bool:
    """Return True if the PS may fetch a device's accumulated weight gradients.

    Args:
        batches_left: number of micro-batches that the stage has not finished.
        gradients_awaited: whether an earlier stage still waits for input gradients from this
            device. Weight gradients occupy the uplink much longer, and would delay these gradients.
    """
    return batches_left == 0 and not gradients_awaited
