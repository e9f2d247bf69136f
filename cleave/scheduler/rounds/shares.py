"""Decides how the differences of a round are weighted, and which devices are too late."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from statistics import median_low
from typing import Final

_MOST: Final = 4.0  # times the usual norm, above which a difference is scaled down and named
_LATE: Final = 1.25  # times the others' time for their steps, after which a device does no more
_GIVEN_UP: Final = 4.0  # times the others' time for their whole part, after which a device is left


def bounded_shares(tokens: Mapping[int, int], norms: Mapping[int, float]) -> dict[int, float]:
    """Return the factor with which each device's difference enters the average.

    A difference counts by its tokens. If its norm is far above the usual one, it is scaled down, so
    that no single device moves the average further than a large usual difference. A difference
    that is not finite does not count. The factors of usual differences add up to 1.

    Args:
        tokens: the number of tokens that each device has trained on.
        norms: the norm of each device's difference.
    """
    total = sum(tokens[device] for device, norm in norms.items() if math.isfinite(norm))
    usual = _usual(tokens, norms)
    return {
        device: tokens[device] / total * min(1.0, _MOST * usual[device] / norm if norm else 1.0)
        for device, norm in norms.items()
        if math.isfinite(norm) and total
    }


def outliers(tokens: Mapping[int, int], norms: Mapping[int, float]) -> set[int]:
    """Return the devices whose difference is not finite, or far above the usual norm."""
    usual = _usual(tokens, norms)
    return {d for d, norm in norms.items() if not norm <= _MOST * usual[d] or math.isinf(norm)}


def _usual(tokens: Mapping[int, int], norms: Mapping[int, float]) -> dict[int, float]:
    """Return the norm that is usual for each device's number of tokens.

    Independent steps move weights by about the square root of their number. Of two devices, the
    smaller norm is the usual one.
    """
    relative = [
        norm / math.sqrt(tokens[device])
        for device, norm in norms.items()
        if math.isfinite(norm) and tokens[device]
    ]
    usual = median_low(relative) if relative else 0.0
    return {device: usual * math.sqrt(tokens[device]) for device in norms}


def is_late(taken_s: float, others_s: Mapping[int, float], present: Set[int]) -> bool:
    """Return whether a device should return its difference without doing its other steps.

    Args:
        taken_s: time since the round began.
        others_s: the time that each finished device took for its steps.
        present: the other devices that take part in the round.
    """
    finished = [others_s[device] for device in present if device in others_s]
    return bool(present) and len(finished) == len(present) and taken_s > _LATE * max(finished)


def is_given_up(taken_s: float, others_s: Mapping[int, float], present: Set[int]) -> bool:
    """Return whether the round should end without a device, whose difference is still missing.

    `others_s` has the time after which each other device's difference was there.
    """
    finished = [others_s[device] for device in present if device in others_s]
    return bool(present) and len(finished) == len(present) and taken_s > _GIVEN_UP * max(finished)
