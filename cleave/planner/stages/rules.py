"""The rules by which the PS assigns requests to devices in a step by stages.

A request is the forward or the backward pass of one micro-batch through one stage. Each device has
at most `REQUESTS_AT_ONCE` requests in flight. Both the scheduler (`cleave.scheduler.stages.step`)
and the simulation for forecasts (`cleave.planner.stages.simulation`) call these functions. So a
change of a rule applies to training and to forecasts.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from cleave.planner.stages.model import Keep, KeptBatches

REQUESTS_AT_ONCE: Final = 2
"""Maximum number of requests in flight on a device.

With two requests, a device computes one request while the other request is in transfer.
"""


class Pass(Enum):
    """The direction of a micro-batch pass."""

    FORWARD = "forward"
    BACKWARD = "backward"


def turn(in_flight: int, request_s: float, device: int) -> tuple[int, float, int]:
    """Return the key by which eligible devices are sorted. The first device gets the next request.

    Devices with fewer requests in flight come first, so that no device gets a second request while
    another device of the stage is idle. Among equally busy devices, the fastest device comes first.

    Args:
        in_flight: number of requests in flight on the device.
        request_s: seconds that the device needs for one request.
        device: ID of the device.
    """
    return in_flight, request_s, device


def may_have_another(in_flight: int) -> bool:
    """Return True if a device with `in_flight` requests in flight may get another request."""
    return in_flight < REQUESTS_AT_ONCE


def next_pass(*, forward: bool, backward: bool, last_was_backward: bool) -> Pass | None:
    """Return the direction of a device's next request; None if no request is ready.

    If both directions are possible, the device alternates between them. If backward passes always
    came first, later stages would run out of micro-batches. If forward passes always came first,
    earlier stages would run out of gradients.

    Args:
        forward, backward: whether a request in this direction is ready.
        last_was_backward: whether the device's previous request was a backward pass.
    """
    if forward and (last_was_backward or not backward):
        return Pass.FORWARD
    return Pass.BACKWARD if backward else None


def next_kept(allowed: KeptBatches, inputs: int, activations: int, *, planned: bool = True) -> Keep:
    """Return what a device retains of its next micro-batch until the backward pass.

    Args:
        allowed: how many micro-batches the device may retain.
        inputs, activations: number of micro-batches of which the device currently retains only the
            layer inputs, or all activations.
        planned: whether the plan assigned the stage to this device. If the device has taken over
            the stage from another device, its memory was not planned for activations of the stage.
    """
    if not planned:
        allowed = KeptBatches(allowed.inputs)
    return allowed.next(inputs, activations)


def may_take_sums(batches_left: int, *, gradients_awaited: bool = False) -> bool:
    """Return True if the PS may fetch a device's accumulated weight gradients.

    Args:
        batches_left: number of micro-batches whose forward or backward pass through the stage is
            not finished.
        gradients_awaited: whether an earlier stage still waits for input gradients from this
            device. Accumulated weight gradients would delay the input gradients, because they
            occupy the uplink much longer.
    """
    return batches_left == 0 and not gradients_awaited
