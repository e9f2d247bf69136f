"""DT-FM's scheduler, which assigns devices to stages to minimize the communication time DP + PP.

Source: Yuan et al. (NeurIPS 2022, arXiv 2206.01288), section 3. The R devices of a stage form a
group C. c_DP is the number of gradient bytes per group, and c_PP the number of activation bytes
between groups. alpha is the latency in seconds between two devices, and beta the rate in bytes/s
between them (mean of both directions). Then

    DP(C)    = max over d in C of  sum over d' != d in C of  2 (alpha + c_DP / (R beta))
    DP       = max over groups of DP(C)
    w(j, j') = min over perfect matchings of C_j and C_j' of
               max over its pairs of  2 (alpha + c_PP / beta)
    PP       = length of the shortest Hamiltonian path over the groups with weights w

As in the paper, an evolutionary search maintains a population of partitions into groups, and
creates a child by swapping two devices between groups. A matching pairs the fastest device of one
group with the slowest device of the other group, and so on. The matching is optimal if the fleet's
slowest downlink is at least as fast as its fastest uplink. Otherwise, a better one may exist.

For up to 16 stages, Held and Karp's dynamic program finds the optimal order of the groups. For more
stages, the 2-opt heuristic finds an order, and the minimum spanning tree gives a lower bound. The
number of trials depends on estimated, not measured, time, so two runs find the same schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cleave.planner.tiles.shape import Floats, RateArrays

Indices = npt.NDArray[np.intp]

POPULATION: Final = 100
TRIALS: Final = 4900
_EXACT_PATH: Final = 16  # maximum number of stages for the dynamic program, which has 2^P P states


@dataclass(frozen=True, slots=True)
class DtfmSchedule:
    """Device groups in pipeline order, and the communication time of a step.

    Attributes:
        groups: device indices, shape (stages, replicas).
        dp_s: time of the gradient all-reduce (DP) in seconds.
        pp_s: time of the communication between stages (PP) in seconds.
        path_bound_s: lower bound on `pp_s` for any order of the groups; `pp_s` if not computed.
        trials: number of children that the search created.
    """

    groups: Indices
    dp_s: float
    pp_s: float
    path_bound_s: float
    trials: int = 0


@dataclass(frozen=True, slots=True)
class Problem:
    """A scheduling problem: the devices of a grid of stages and replicas, and their traffic.

    Attributes:
        rates: rates of `stages` times `replicas` devices.
        c_dp_bytes: size of one stage's gradients.
        c_pp_bytes: size of the activations that a replica sends to the next stage per step.
    """

    rates: RateArrays
    stages: int
    replicas: int
    c_dp_bytes: float
    c_pp_bytes: float

    def trials_in(self, seconds: float) -> int:
        """Estimate how many trials a search can run in `seconds`; return at most `TRIALS`.

        With P stages of R devices, a trial takes 1.2 us P^2 (2-opt) + 0.4 us P R (hops) + 15 ns R^2
        (gradients).
        """
        p, r = self.stages, self.replicas
        return min(TRIALS, int(seconds / (1.2e-6 * p * p + 4e-7 * p * r + 1.5e-8 * r * r)))

    def dp_s(self, groups: Indices) -> Floats:
        """Return the gradient all-reduce time DP(C) of each group in seconds, shape (groups,)."""
        if self.replicas == 1:
            return np.zeros(len(groups))
        a, b = groups[:, :, None], groups[:, None, :]
        seconds = self._there_and_back_s(a, b, self.c_dp_bytes, self.replicas)
        own = np.arange(self.replicas)
        seconds[:, own, own] = 0.0
        total: Floats = seconds.sum(axis=2).max(axis=1)
        return total

    def hops_s(self, some: Indices, others: Indices) -> Floats:
        """Return the cost w in seconds of each pair of groups, shape (len(some), len(others))."""
        return self.matched_s(self.slowest_first(some), self.fastest_first(others))

    def slowest_first(self, groups: Indices) -> Indices:
        """Return `groups` with each group's devices sorted by ascending uplink rate."""
        return np.take_along_axis(groups, self.rates.uplink[groups].argsort(axis=1), axis=1)

    def fastest_first(self, groups: Indices) -> Indices:
        """Return `groups` with each group's devices sorted by descending uplink rate."""
        order = (-self.rates.uplink[groups]).argsort(axis=1)
        return np.take_along_axis(groups, order, axis=1)

    def matched_s(self, slowest_first: Indices, fastest_first: Indices) -> Floats:
        """Return the costs of `hops_s` for groups with devices that are sorted by uplink rate."""
        a, b = slowest_first[:, None, :], fastest_first[None, :, :]
        worst: Floats = self._there_and_back_s(a, b, self.c_pp_bytes).max(axis=2)
        return worst

    def beta(self, a: Indices, b: Indices) -> Floats:
        """Return the rate in bytes/s between devices `a` and `b`, the mean of both directions."""
        up, down = self.rates.uplink, self.rates.downlink
        mean: Floats = np.minimum(up[a], down[b])
        mean += np.minimum(up[b], down[a])
        mean /= 2
        return mean

    def _there_and_back_s(self, a: Indices, b: Indices, nbytes: float, parts: int = 1) -> Floats:
        """Return the time in seconds to send `nbytes / parts` bytes from `a` to `b` and back."""
        latency = self.rates.latency_s
        beta = self.beta(a, b)  # reused in place below, because the arrays may be large
        beta *= parts
        seconds: Floats = np.divide(nbytes, beta, out=beta)
        # `latency_s` is the round-trip time between a device and the PS.
        seconds += (latency[a] + latency[b]) / 2
        seconds *= 2
        return seconds


@dataclass
class _Individual:
    """A member of the search's population: a partition of the devices into groups, and its cost.

    Attributes:
        groups: device indices of each group, shape (stages, replicas).
        slowest_first, fastest_first: `groups` with each group's devices sorted by uplink rate.
        dp_s: gradient all-reduce time DP(C) of each group in seconds, shape (stages,).
        hops_s: cost w in seconds between all pairs of groups, shape (stages, stages).
        path: indices of the groups in pipeline order.
    """

    groups: Indices
    slowest_first: Indices
    fastest_first: Indices
    dp_s: Floats
    hops_s: Floats
    path: Indices

    @property
    def cost_s(self) -> float:
        return float(self.dp_s.max() + _length(self.hops_s, self.path))


def search(problem: Problem, seed: int, trials: int = TRIALS) -> DtfmSchedule:
    """Search for the schedule with the least communication time and return the best one found.

    Equal seeds give equal results.
    """
    rng = np.random.default_rng(seed)
    places = problem.stages * problem.replicas
    by_uplink = np.argsort(-problem.rates.uplink, kind="stable")
    shape = (problem.stages, problem.replicas)
    starts = [by_uplink.reshape(shape), by_uplink.reshape(shape[::-1]).T]
    starts += [rng.permutation(places).reshape(shape) for _ in range(POPULATION - len(starts))]
    two_opt = TwoOpt(problem.stages)
    population = [_individual(problem, two_opt, np.ascontiguousarray(start)) for start in starts]
    costs = np.array([each.cost_s for each in population])
    tried = trials if min(shape) > 1 else 0
    for _ in range(tried):
        child = _child(problem, two_opt, population[int(rng.integers(POPULATION))], rng)
        worst = int(costs.argmax())
        if child.cost_s < costs[worst]:
            population[worst], costs[worst] = child, child.cost_s
    best = population[int(costs.argmin())]
    path = best.path
    if problem.stages <= _EXACT_PATH:
        path = _shortest_path(best.hops_s)
        bound_s = _length(best.hops_s, path)
    else:
        bound_s = _spanning_tree(best.hops_s)
    dp_s, pp_s = float(best.dp_s.max()), _length(best.hops_s, path)
    return DtfmSchedule(best.groups[path], dp_s, pp_s, bound_s, tried)


def first_guess(problem: Problem) -> DtfmSchedule:
    """Return a schedule without a search, by grouping devices with similar uplink rates."""
    by_uplink = np.argsort(-problem.rates.uplink, kind="stable")
    groups = by_uplink.reshape(problem.stages, problem.replicas)
    each = _individual(problem, TwoOpt(problem.stages), groups)
    pp_s = _length(each.hops_s, each.path)
    return DtfmSchedule(each.groups[each.path], float(each.dp_s.max()), pp_s, pp_s)


def _individual(problem: Problem, two_opt: TwoOpt, groups: Indices) -> _Individual:
    slowest, fastest = problem.slowest_first(groups), problem.fastest_first(groups)
    hops = problem.matched_s(slowest, fastest)
    path = two_opt.improved(hops, np.arange(problem.stages))
    return _Individual(groups, slowest, fastest, problem.dp_s(groups), hops, path)


def _child(
    problem: Problem, two_opt: TwoOpt, parent: _Individual, rng: np.random.Generator
) -> _Individual:
    """Return a copy of `parent` in which two random groups have exchanged one device each."""
    changed = rng.choice(problem.stages, 2, replace=False)
    one, other = changed.tolist()
    groups = parent.groups.copy()
    uplink = problem.rates.uplink[groups[one]]
    kept = min(2, problem.replicas - 1)
    free = np.sort(np.argsort(-uplink, kind="stable")[kept:])
    # The first group keeps its two fastest uplinks, or one of two.
    given, taken = int(free[rng.integers(len(free))]), int(rng.integers(problem.replicas))
    groups[one, given], groups[other, taken] = groups[other, taken], groups[one, given]
    slowest, fastest = parent.slowest_first.copy(), parent.fastest_first.copy()
    dp, hops = parent.dp_s.copy(), parent.hops_s.copy()
    slowest[changed] = problem.slowest_first(groups[changed])
    fastest[changed] = problem.fastest_first(groups[changed])
    dp[changed] = problem.dp_s(groups[changed])
    hops[changed] = problem.matched_s(slowest[changed], fastest)
    hops[:, changed] = hops[changed].T
    path = two_opt.improved(hops, parent.path)
    return _Individual(groups, slowest, fastest, dp, hops, path)


# --- paths over groups ---


def _length(hops: Floats, path: Indices) -> float:
    return float(hops[path[:-1], path[1:]].sum())


class TwoOpt:
    """Shortens paths over `size` groups with the 2-opt heuristic."""

    def __init__(self, size: int) -> None:
        self._size = size
        # Excludes reversals of i..j with j < i.
        self._none = np.where(np.tri(size, k=-1), -np.inf, 0.0)
        # Adds hops of length zero before the first group and after the last group of a path.
        self._padded = np.zeros((size + 2, size + 2))
        self._gain = np.empty((size, size))

    def improved(self, hops: Floats, path: Indices) -> Indices:
        """Return `path` after up to `4 * size` reversals, each chosen to shorten the path most.

        `hops` is the cost in seconds between all pairs of groups, shape (size, size).
        """
        size, gain = self._size, self._gain
        if size < 3:
            return path
        least_gain = 1e-12 * float(hops.max())
        path = path.copy()
        along = self._padded[1:-1, 1:-1]  # hops between groups in path order
        along[...] = hops.take(path, axis=0).take(path, axis=1)
        links = self._padded.diagonal(1)
        come, go = links[:-1, None], links[1:]
        before, after = self._padded[:-2, 1:-1], self._padded[1:-1, 2:]
        for _ in range(4 * size):
            # Reversing i..j replaces the hops (i-1, i) and (j, j+1) by (i-1, j) and (i, j+1).
            np.add(come, go, out=gain)
            gain -= before
            gain -= after
            gain += self._none
            i, j = divmod(int(gain.argmax()), size)
            if gain[i, j] <= least_gain:
                break
            for part in (path[i : j + 1], along[i : j + 1], along[:, i : j + 1].T):
                part[...] = part[::-1]
        return path


def _shortest_path(hops: Floats) -> Indices:
    """Return the shortest Hamiltonian path by Held and Karp's dynamic program.

    best[S, j] is the length of the shortest path that visits the subset S and ends at j. It is the
    minimum over i in S of best[S without j, i] + hops[i, j].
    """
    size = len(hops)
    subsets = np.arange(1 << size)
    members = (subsets[:, None] >> np.arange(size) & 1).astype(np.bool_)
    counts = members.sum(axis=1)
    best = np.full((1 << size, size), np.inf)
    best[1 << np.arange(size), np.arange(size)] = 0.0
    for count in range(1, size):
        smaller = subsets[counts == count]
        for last in range(size):
            before = smaller[~members[smaller, last]]
            best[before | 1 << last, last] = (best[before] + hops[:, last]).min(axis=1)
    subset = (1 << size) - 1
    path = [int(best[subset].argmin())]
    while len(path) < size:
        subset ^= 1 << path[-1]
        path.append(int((best[subset] + hops[:, path[-1]]).argmin()))
    return np.array(path[::-1], np.intp)


def _spanning_tree(hops: Floats) -> float:
    """Return the length of the minimum spanning tree, a lower bound on the length of any path."""
    size, total = len(hops), 0.0
    nearest, out = hops[0].copy(), np.ones(size, np.bool_)
    out[0] = False
    for _ in range(size - 1):
        joined = int(np.where(out, nearest, np.inf).argmin())
        total += float(nearest[joined])
        out[joined] = False
        nearest = np.minimum(nearest, hops[joined])
    return total
