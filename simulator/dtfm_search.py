"""DT-FM's scheduler: assigns devices to stage groups and orders the groups to minimize DP + PP.

Yuan et al. (NeurIPS 2022, arXiv 2206.01288), section 3. With groups C_1..C_P of R devices each,
c_DP and c_PP bytes, alpha seconds of latency and beta bytes/s between two devices (mean of both
directions):

    DP(C)    = max over d in C of  sum over d' != d in C of  2 (alpha + c_DP / (R beta))
    DP       = max over groups of DP(C)
    w(j, j') = min over perfect matchings of C_j and C_j' of
               max over its pairs of  2 (alpha + c_PP / beta)
    PP       = least Hamiltonian path over the groups with weights w

The search is evolutionary, as in the paper: it keeps a population of partitions and makes children
by a local move on a group's fastest link. If every downlink is as fast as every uplink, beta is the
mean of two uplinks. The best matching then pairs the fastest device with the slowest, which one
sort finds. Other fleets use the same matching, which is valid but not always optimal.

The best partition's path is exact up to 16 stages (Held and Karp's program over subsets). Longer
paths come from 2-opt, with the minimum spanning tree as a lower bound. The estimated cost of a
child is

    1.2 us P^2 (2-opt) + 0.4 us P R (hops) + 15 ns R^2 (gradients)

The number of trials follows from a time limit and this estimate, not from the clock, so that two
runs find the same schedule.
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
_EXACT_PATH: Final = 16  # stages; a dynamic program of 2^P P states


@dataclass(frozen=True, slots=True)
class DtfmSchedule:
    """Device groups in pipeline order, and their cost.

    Attributes:
        groups: device numbers, (stages, replicas).
        path_bound_s: lower bound on the path's seconds over all orders of these groups.
        trials: number of children tried.
    """

    groups: Indices
    dp_s: float
    pp_s: float
    path_bound_s: float
    trials: int = 0

    @property
    def cost_s(self) -> float:
        return self.dp_s + self.pp_s


@dataclass(frozen=True, slots=True)
class Problem:
    """The traffic that a schedule must carry between devices.

    Attributes:
        rates: rates of the participating devices, one per place.
        c_dp_bytes: bytes of a stage's gradient.
        c_pp_bytes: bytes of activations between two stages.
    """

    rates: RateArrays
    stages: int
    replicas: int
    c_dp_bytes: float
    c_pp_bytes: float

    def trials_in(self, seconds: float) -> int:
        """Return the number of children that fit into `seconds`, by the module's estimate."""
        p, r = self.stages, self.replicas
        return min(TRIALS, int(seconds / (1.2e-6 * p * p + 4e-7 * p * r + 1.5e-8 * r * r)))

    def dp_s(self, groups: Indices) -> Floats:
        """Return DP(C) of each group in seconds, (groups,)."""
        if self.replicas == 1:
            return np.zeros(len(groups))
        a, b = groups[:, :, None], groups[:, None, :]
        seconds = self._there_and_back_s(a, b, self.c_dp_bytes, self.replicas)
        own = np.arange(self.replicas)
        seconds[:, own, own] = 0.0
        total: Floats = seconds.sum(axis=2).max(axis=1)
        return total

    def hops_s(self, some: Indices, others: Indices) -> Floats:
        """Return w in seconds for each pair of groups from `some` and `others`, (some, others)."""
        return self.matched_s(self.slowest_first(some), self.fastest_first(others))

    def slowest_first(self, groups: Indices) -> Indices:
        """Return the groups, each sorted by ascending uplink."""
        return _sorted_by(self.rates.uplink[groups], groups)

    def fastest_first(self, groups: Indices) -> Indices:
        """Return the groups, each sorted by descending uplink."""
        return _sorted_by(-self.rates.uplink[groups], groups)

    def matched_s(self, slowest_first: Indices, fastest_first: Indices) -> Floats:
        """Return w as `hops_s` does, for groups that are already sorted."""
        a, b = slowest_first[:, None, :], fastest_first[None, :, :]
        worst: Floats = self._there_and_back_s(a, b, self.c_pp_bytes).max(axis=2)
        return worst

    def beta(self, a: Indices, b: Indices) -> Floats:
        """Return the bytes/s between devices, the mean of both directions."""
        up, down = self.rates.uplink, self.rates.downlink
        mean: Floats = np.minimum(up[a], down[b])
        mean += np.minimum(up[b], down[a])
        mean /= 2
        return mean

    def _there_and_back_s(self, a: Indices, b: Indices, nbytes: float, parts: int = 1) -> Floats:
        """Return the seconds that one of `parts` equal parts of `nbytes` takes there and back."""
        latency = self.rates.latency_s
        beta = self.beta(a, b)  # changed in place from here on because the arrays may be large
        beta *= parts
        seconds: Floats = np.divide(nbytes, beta, out=beta)
        # A fleet's latency_s is a round trip to the PS; half is one way.
        seconds += (latency[a] + latency[b]) / 2
        seconds *= 2
        return seconds


def _sorted_by(keys: Floats, groups: Indices) -> Indices:
    """Return the groups, each sorted by its devices' keys."""
    return groups[np.arange(len(groups))[:, None], keys.argsort(axis=1)]


@dataclass
class _Individual:
    """A partition.

    Attributes:
        groups: devices of each group.
        slowest_first, fastest_first: the same groups, each sorted by uplink.
        dp_s: DP(C) of each group.
        hops_s: w between all groups.
        path: order of the groups.
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
    """Return the best schedule found; the same seed gives the same schedule.

    Args:
        trials: number of children to try.
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
    tried = trials if problem.stages > 1 and problem.replicas > 1 else 0
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
    """Return a schedule with groups of similar uplinks, without a search."""
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
    """Return a child with a device swapped between two groups; one keeps its fastest link."""
    changed = rng.choice(problem.stages, 2, replace=False)
    one, other = changed.tolist()
    groups = parent.groups.copy()
    uplink = problem.rates.uplink[groups[one]]
    kept = min(2, problem.replicas - 1)
    free = np.sort(np.argsort(-uplink, kind="stable")[kept:])
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
    """Improves paths over a fixed number of groups by 2-opt.

    Args:
        size: number of groups.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        # Excludes reversals that would end before they begin.
        self._none = np.where(np.tri(size, k=-1), -np.inf, 0.0)
        # Zero hops before the first group and after the last.
        self._padded = np.zeros((size + 2, size + 2))
        self._gain = np.empty((size, size))

    def improved(self, hops: Floats, path: Indices) -> Indices:
        """Return the path after reversing the most profitable part until no reversal helps."""
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
    """Return the shortest Hamiltonian path, by Held and Karp's dynamic program.

    It processes all subsets of one size at once. best[S, j] is the length of the shortest path
    through subset S ending in j: the minimum over i in S of best[S without j, i] + hops[i, j].
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
    """Return the length of the minimum spanning tree (Prim), a lower bound for every path."""
    size, total = len(hops), 0.0
    nearest, out = hops[0].copy(), np.ones(size, np.bool_)
    out[0] = False
    for _ in range(size - 1):
        joined = int(np.where(out, nearest, np.inf).argmin())
        total += float(nearest[joined])
        out[joined] = False
        nearest = np.minimum(nearest, hops[joined])
    return total
