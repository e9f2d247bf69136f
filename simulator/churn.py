"""The average duration of a training step while devices are lost at random.

Each of n devices is lost at a constant rate lambda, so a loss occurs every 1 / (n lambda) seconds
on average. Each loss delays the step by the time to detect the loss and the method's recovery time.
More devices may be lost during this delay, so the average duration is

    T = step / (1 - n lambda (detection + recovery))

If the denominator is not positive, the step never ends. The formula is exact as long as recoveries
do not overlap. Methods that can recover from several losses at once supply a formula of their own
(`Outcome.under_losses`).
"""

from __future__ import annotations

import math

from simulator.method import Outcome


def with_losses_s(outcome: Outcome, losses_per_s: float, detection_s: float) -> float | None:
    """Return the average seconds of a step while devices are lost at random.

    Args:
        outcome: simulated step without losses.
        losses_per_s: rate at which each single device is lost.
        detection_s: seconds from the loss of a device until the loss is detected.

    Returns:
        Average seconds; infinite if the step never ends, None if the method has no recovery model.
    """
    if outcome.recovery_s is None:
        return None
    if outcome.under_losses is not None:
        return outcome.under_losses.with_losses_s(losses_per_s, detection_s)
    lost = outcome.devices_used * losses_per_s * (detection_s + outcome.recovery_s)
    return outcome.step_s / (1 - lost) if lost < 1 else math.inf
