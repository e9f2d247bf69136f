"""Alpa's dynamic program, which divides layers and devices into the stages of a pipeline.

Zheng et al. (OSDI 2022, arXiv 2201.12023), section 5. A step with m micro-batches and stage times
t_i takes

    T = sum t_i + (m - 1) max t_i

The program tries several limits on max t_i. For each limit, the program computes F(k, d), the
minimum sum of stage times for the first k layers on the first d devices:

    F(k, d) = min over l, d' of  F(k - l, d') + t(l, d', d)     with t(l, d', d) <= limit

Limits are tried in ascending order. Alpa tries every stage time t as a limit. Here, the limits form
a geometric series with a ratio of 1.05, so (m - 1) max t_i may be 5 % above the optimum.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from cleave.planner.tiles.shape import Floats

_STEP: Final = 1.05


class Cut(NamedTuple):
    """A stage of a pipeline.

    Attributes:
        layers: number of layers.
        start, stop: range of the stage's device units; `stop` is exclusive.
    """

    layers: int
    start: int
    stop: int


def best_partition(cost: Floats, micro_batches: int) -> list[Cut] | None:
    """Return the stages that minimize T, in pipeline order; None if no partition is possible.

    Args:
        cost: seconds t of each possible stage, indexed [layers, start, stop], (layers + 1,
            units + 1, units + 1). Impossible stages are infinite. Entries with 0 layers or with
            start >= stop are ignored.
        micro_batches: number m of micro-batches per step.
    """
    if not np.isfinite(cost[1:]).any():
        return None
    best: tuple[float, list[Cut]] | None = None
    finite = cost[1:][np.isfinite(cost[1:])]
    # There are at most as many stages as units, so one stage has at least this many layers.
    least_layers = -(-(cost.shape[0] - 1) // (cost.shape[1] - 1))
    limit, most = float(cost[least_layers:].min()), float(finite.max())
    while True:
        found = _least_sum(np.where(cost <= limit, cost, np.inf))
        if found is not None:
            total_s, cuts = found
            longest = max(float(cost[cut]) for cut in cuts)
            time_s = total_s + (micro_batches - 1) * longest
            if best is None or time_s < best[0]:
                best = time_s, cuts
        if limit >= most or (best is not None and (micro_batches - 1) * limit > best[0]):
            break
        limit = most if micro_batches == 1 else min(limit * _STEP, most)
    return None if best is None else best[1]


def _least_sum(cost: Floats) -> tuple[float, list[Cut]] | None:
    """Return the minimum sum of stage times, and the stages that have this sum.

    Return None if no partition is possible.
    """
    layers, units = cost.shape[0] - 1, cost.shape[1] - 1
    least = np.full((layers + 2, units + 1), np.inf)  # the last row is index -1: impossible
    least[0, :] = 0.0  # devices before the first stage may stay idle
    choice = np.zeros((layers + 1, units + 1, 2), np.intp)
    numbers = np.arange(1, layers + 1)
    for stop in range(1, units + 1):
        ends = cost[1:, :stop, stop]  # seconds, indexed [layers - 1, start]
        lengths = numbers[np.isfinite(ends).any(axis=1)]
        best_s, idle_s = np.full(layers, np.inf), least[1:-1, stop - 1]
        if len(lengths):
            before = np.maximum(numbers[:, None] - lengths, -1)
            sums = (ends[lengths - 1] + least[before, :stop]).reshape(layers, -1)
            at = sums.argmin(axis=1)
            best_s = sums[numbers - 1, at]
            choice[1:, stop] = np.stack([lengths[at // stop], at % stop], axis=1)
        choice[1:, stop][idle_s <= best_s] = 0, stop - 1  # unit `stop - 1` stays idle
        least[1:-1, stop] = np.minimum(idle_s, best_s)
    if not np.isfinite(least[layers, units]):
        return None
    cuts: list[Cut] = []
    k, stop = layers, units
    while k:
        held, start = (int(x) for x in choice[k, stop])
        if held:
            cuts.append(Cut(held, start, stop))
        k, stop = k - held, start
    return float(least[layers, units]), cuts[::-1]
