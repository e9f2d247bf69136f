"""Decide how much each device's difference counts in a round, and which devices are too late."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from statistics import median_low
from typing import Final

_MOST: Final = 4.0  # a difference above this multiple of the usual norm is scaled down and reported
_SETTLED: Final = 20  # rounds after which norms are usual, even if the exchange is sparse
_LATE: Final = 1.25  # multiple of the others' time after which a device begins no more steps
_GIVEN_UP: Final = 4.0  # multiple of the others' time after which the round ends without a device


def bounded_shares(
    tokens: Mapping[int, int], norms: Mapping[int, float], ages: Mapping[int, float]
) -> dict[int, float]:
    """Return the weight of each device's difference in the average.

    A weight is proportional to the device's number of tokens. A difference whose norm is far above
    the usual one is scaled down, so a single device cannot move the average far. A difference that
    is not finite has no weight. Without such differences, the weights add up to 1.

    Args:
        tokens: the number of tokens that each device has trained on.
        norms: the norm of each device's difference.
        ages: number of rounds since each device's moments were new.
    """
    total = sum(tokens[device] for device, norm in norms.items() if math.isfinite(norm))
    usual = _usual(tokens, norms, ages)
    return {
        device: tokens[device] / total * min(1.0, _MOST * usual[device] / norm if norm else 1.0)
        for device, norm in norms.items()
        if math.isfinite(norm) and total
    }


def outliers(
    tokens: Mapping[int, int], norms: Mapping[int, float], ages: Mapping[int, float]
) -> set[int]:
    """Return the devices whose difference is not finite, or far above the usual norm."""
    usual = _usual(tokens, norms, ages)
    return {d for d, norm in norms.items() if not norm <= _MOST * usual[d] or math.isinf(norm)}


def _usual(
    tokens: Mapping[int, int], norms: Mapping[int, float], ages: Mapping[int, float]
) -> dict[int, float]:
    """Return the usual norm for each device's number of tokens.

    Independent steps move weights by about the square root of their number, so the usual norm is
    the median of norms divided by the square root of tokens. With two devices, the smaller value is
    used.

    A device with new moments returns smaller differences, above all if the exchange is sparse. If
    most devices are new, the older ones must not count as unusual. So the median of the older ones
    is used if it is larger, up to `_MOST` times the median of all.
    """
    relative = {
        device: norm / math.sqrt(tokens[device])
        for device, norm in norms.items()
        if math.isfinite(norm) and tokens[device]
    }
    usual = median_low(relative.values()) if relative else 0.0
    settled = min(_SETTLED, max(ages.values(), default=0) / 2)
    if older := [each for device, each in relative.items() if ages[device] >= settled]:
        usual = max(usual, min(median_low(older), _MOST * usual))
    return {device: usual * math.sqrt(tokens[device]) for device in norms}


def is_late(taken_s: float, stepped_s: Mapping[int, float], others: Set[int]) -> bool:
    """Return whether a device should return its difference without doing its remaining steps.

    Args:
        taken_s: time since the round began, in seconds.
        stepped_s: maps each device that has finished its steps to the time they took, in seconds.
        others: the other devices in the round.
    """
    return taken_s > _LATE * _slowest_s(stepped_s, others)


def is_given_up(taken_s: float, finished_s: Mapping[int, float], others: Set[int]) -> bool:
    """Return whether the round should end without a device whose difference is missing.

    `taken_s` is the time since the round began. `finished_s` maps each device that has finished to
    the time until its difference arrived, in seconds.
    """
    return taken_s > _GIVEN_UP * _slowest_s(finished_s, others)


def _slowest_s(times_s: Mapping[int, float], devices: Set[int]) -> float:
    """Return the devices' longest time; infinite if a time is unknown or there are no devices."""
    return max((times_s.get(device, math.inf) for device in devices), default=math.inf)
