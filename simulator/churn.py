"""Losing devices: what a step takes on average while devices leave at random.

A device is lost at a constant rate lambda, so n devices lose one every 1 / (n lambda) seconds. Each
loss costs its detection and the method's recovery, during which devices are lost, too:

    T = step / (1 - n lambda (detection + recovery))

Where that is not positive a step is never done. Exact while losses do not overlap. A method whose
devices recover independently of each other knows better (`Outcome.under_losses`).
"""

from __future__ import annotations

import math

from simulator.method import Outcome


def with_losses_s(outcome: Outcome, losses_per_s: float, detection_s: float) -> float | None:
    """Seconds for a step with losses; infinite where it never ends, None where not modelled.

    Args:
        losses_per_s: of each device.
        detection_s: until a loss is noticed.
    """
    if outcome.recovery_s is None:
        return None
    if outcome.under_losses is not None:
        return outcome.under_losses.with_losses_s(losses_per_s, detection_s)
    lost = outcome.devices_used * losses_per_s * (detection_s + outcome.recovery_s)
    return outcome.step_s / (1 - lost) if lost < 1 else math.inf
