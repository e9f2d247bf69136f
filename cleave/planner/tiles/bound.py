"""Lower bounds on the time of one GEMM on a fleet (docs/planner.md).

A bound is the shortest time in which the devices together can compute all multiply-adds of the
GEMM. No plan is faster than the *overlap* bound, which follows from the Loomis-Whitney inequality:
a device that receives x elements and returns z elements computes at most ``(x / 2) sqrt(z)``
multiply-adds. No plan with one tile per device is faster than the *isolated* bound, which includes
waiting for operands in wavefront streaming.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from cleave.gemm import Gemm
from cleave.planner.plan import ElementBytes, PsRates
from cleave.planner.tiles.shape import SEARCH_ERROR, Floats, RateArrays, best_tile

_TOLERANCE = 1e-7


def overlap_bound_s(gemm: Gemm, element: ElementBytes, rates: RateArrays, ps: PsRates) -> float:
    """Return a lower bound on any plan's time in seconds, for any number and shape of tiles.

    Only the network card's rates in `ps` are used.
    """
    least = min(element.finished, element.partial)

    def volume(time_s: float) -> float:
        available = np.maximum(0.0, time_s - rates.latency_s)
        received = rates.downlink * available / element.sent
        returned = rates.uplink * available / least
        each = np.minimum.reduce(
            [
                received / 2 * np.sqrt(returned),
                gemm.k * returned,
                received * gemm.m * gemm.n / (gemm.m + gemm.n),
                rates.flops * available / 2,
                np.full(len(rates), float(gemm.volume)),
            ]
        )
        return _through_card(gemm, element, ps, time_s, each, returned)

    return _time_for(gemm, volume, float(rates.latency_s.min()))


def isolated_bound_s(
    gemm: Gemm,
    element: ElementBytes,
    rates: RateArrays,
    ps: PsRates,
    *,
    two_dimensional: bool = False,
) -> float:
    """Return a lower bound on the time in seconds of any plan with one tile per device.

    The bound ignores memory limits. A device with little memory gets several tiles, which take
    longer than one tile. If `two_dimensional`, only tiles of full depth are allowed.
    """
    least = min(element.finished, element.partial)

    def volume(time_s: float) -> float:
        best = best_tile(gemm, element, rates, time_s, two_dimensional=two_dimensional)
        returned = rates.uplink * np.maximum(0.0, time_s - rates.latency_s) / least
        each = np.minimum(best.volume * (1 + SEARCH_ERROR), gemm.volume)
        return _through_card(gemm, element, ps, time_s, each, returned)

    return _time_for(gemm, volume, float(rates.latency_s.min()))


def _through_card(
    gemm: Gemm, element: ElementBytes, ps: PsRates, time_s: float, each: Floats, returned: Floats
) -> float:
    """Return the maximum number of multiply-adds in `time_s` that the PS's network card allows.

    A device computes at most ``sqrt(returned) / 2`` multiply-adds per element that it receives, so
    the best use of the network card's egress is a fractional knapsack problem. Each element that
    the PS receives allows at most k multiply-adds.
    """
    total = float(each.sum())
    if np.isfinite(ps.egress_bytes_per_s):
        budget = ps.egress_bytes_per_s * time_s / element.sent
        worth = np.sqrt(returned) / 2
        order = np.argsort(-worth)
        worth, wanted = worth[order], each[order]
        needs = np.divide(wanted, worth, out=np.zeros_like(wanted), where=worth > 0)
        if needs.sum() > budget:
            sent = np.diff(np.minimum(np.cumsum(needs), budget), prepend=0.0)
            total = min(total, float((sent * worth).sum()))
    if np.isfinite(ps.ingress_bytes_per_s):
        least = min(element.finished, element.partial)
        total = min(total, gemm.k * ps.ingress_bytes_per_s * time_s / least)
    return total


def _time_for(gemm: Gemm, volume: Callable[[float], float], least_s: float) -> float:
    """Return the time in seconds that the devices need for the GEMM, rounded down slightly.

    The search uses secant steps, because the logarithm of `volume` is nearly linear in the
    logarithm of the time after `least_s`. Every third step bisects.
    """
    wanted = float(gemm.volume)
    low, at_low, high, at_high = 0.0, 0.0, math.inf, math.inf
    tried, slope = max(least_s, 1e-3), 1.5
    for step in range(1, 200):
        done = volume(least_s + tried)
        if done < wanted:
            low, at_low = tried, done
        else:
            high, at_high = tried, done
        if high < math.inf and high - low <= _TOLERANCE * high:
            break
        if at_low > 0 and high < math.inf:
            slope = max(0.1, math.log(at_high / at_low) / math.log(high / low))
        guess = tried * (wanted / done) ** (1 / slope) if done > 0 else tried * 64
        # Shift the guess a little, so that the bracket closes from both sides.
        guess *= 1 + (_TOLERANCE / 4 if done < wanted else -_TOLERANCE / 4)
        if step % 3 == 0 or not low < guess < high:
            if low == 0:
                guess = min(guess, high / 4)
            elif high < math.inf:
                guess = math.sqrt(low * high)
        tried = guess
    return least_s + low
