"""The rules of a step by stages, which the scheduler follows and forecasts simulate.

The parameter server gives each device up to `UNITS_AT_ONCE` units. A unit is the forward or the
backward pass of one micro-batch through one stage. `cleave.scheduler.stages.step` and
`cleave.planner.stages.simulation` call these functions, so a changed rule changes both.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from cleave.planner.stages.model import Keep, KeptBatches

UNITS_AT_ONCE: Final = 2
"""Units in flight for each device: it computes one while the other is in transfer."""


class Pass(Enum):
    """The direction of a unit."""

    FORWARD = "forward"
    BACKWARD = "backward"


def turn(in_flight: int, unit_s: float, device: int) -> tuple[int, float, int]:
    """Return the sort key of devices that may get a unit.

    Idle devices come first, fastest first. Otherwise a slow device would get a second unit while
    other devices of its stage wait.

    Args:
        in_flight: units that the device has.
        unit_s: seconds that the device needs for one unit.
        device: its number.
    """
    return in_flight, unit_s, device


def may_have_another(in_flight: int) -> bool:
    """Return whether a device with this number of units in flight may get another."""
    return in_flight < UNITS_AT_ONCE


def next_pass(*, forward: bool, backward: bool, last_was_backward: bool) -> Pass | None:
    """Return the direction of a device's next unit; None when no unit is ready.

    Directions alternate when both are possible. Backward passes alone would leave later stages
    without work, and forward passes alone the earlier stages.

    Args:
        forward, backward: whether a unit of this direction is ready.
        last_was_backward: whether the device's previous unit was a backward pass.
    """
    if forward and (last_was_backward or not backward):
        return Pass.FORWARD
    return Pass.BACKWARD if backward else None


def next_kept(allowed: KeptBatches, inputs: int, activations: int, *, planned: bool = True) -> Keep:
    """Return what a device keeps of its next micro-batch until the backward pass.

    Args:
        allowed: the number of micro-batches that the device may keep.
        inputs, activations: the number of micro-batches whose inputs or activations it keeps now.
        planned: whether the plan gave the stage to this device. Memory for activations is planned
            only for these stages, not for a stage that the device has taken over.
    """
    if not planned:
        allowed = KeptBatches(allowed.inputs)
    return allowed.next(inputs, activations)


def may_take_sums(batches_left: int, *, gradients_awaited: bool = False) -> bool:
    """Return whether a device's gradient sums may be fetched.

    Args:
        batches_left: micro-batches that have not passed the stage in both directions.
        gradients_awaited: whether an earlier stage still waits for gradients from this device.
            Sums would delay them, because sums occupy the uplink much longer.
    """
    return batches_left == 0 and not gradients_awaited
