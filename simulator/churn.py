"""The average time of a step while devices leave at random.

Each device is lost at a constant rate lambda, so a loss occurs every 1 / (n lambda) seconds. Each
loss costs its detection and the method's recovery, during which more devices may be lost:

    T = step / (1 - n lambda (detection + recovery))

If the denominator is not positive, a step never ends. The formula is exact while losses do not
overlap. A method whose devices recover independently supplies its own (`Outcome.under_losses`).
"""

from __future__ import annotations

import math

from simulator.method import Outcome


def with_losses_s(outcome: Outcome, losses_per_s: float, detection_s: float) -> float | None:
    """Return the seconds of a step with losses; infinite if it never ends, None if not modelled.

    Args:
        losses_per_s: loss rate of each device.
        detection_s: seconds until a loss is detected.
    """
    if outcome.recovery_s is None:
        return None
    if outcome.under_losses is not None:
        return outcome.under_losses.with_losses_s(losses_per_s, detection_s)
    lost = outcome.devices_used * losses_per_s * (detection_s + outcome.recovery_s)
    return outcome.step_s / (1 - lost) if lost < 1 else math.inf
