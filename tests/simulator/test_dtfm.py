"""DT-FM's cost and search against cases worked by hand, and against all there is."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from cleave.planner.plan import DeviceRates
from cleave.planner.tiles.shape import RateArrays
from cleave.workload.registry import find_model
from simulator.dtfm import Dtfm
from simulator.dtfm_search import (
    TRIALS,
    Problem,
    TwoOpt,
    _shortest_path,
    _spanning_tree,
    search,
)
from simulator.method import Conditions
from tests.simulator.conditions import alike, paper

pytestmark = pytest.mark.slow


def rates(*uplinks: float, latency_s: float = 0.0) -> RateArrays:
    return RateArrays.of([DeviceRates(i, 1e9, u, 1e12, latency_s) for i, u in enumerate(uplinks)])


def test_gradients_by_hand() -> None:
    # Three replicas of 6, 3 and 3 bytes/s exchange thirds of 9 bytes: a third at (6 + 3) / 2 takes
    # 2/3 s, at 3 it takes 1 s; the slowest has one of each, doubled, and four latencies both ways.
    problem = Problem(rates(6, 3, 3, latency_s=0.25), 1, 3, 9.0, 0.0)
    groups = np.arange(3)[None, :]
    assert problem.dp_s(groups)[0] == pytest.approx(2 * (2 / 3 + 1) + 2 * 2 * 0.5)


def test_the_matching_is_the_bottleneck_matching_of_all() -> None:
    rng = np.random.default_rng(3)
    problem = Problem(rates(*rng.uniform(5, 10, 8)), 2, 4, 0.0, 7.0)
    some, others = np.arange(4), np.arange(4, 8)
    links = problem.beta(some[:, None], others[None, :])
    matchings = permutations(range(4))
    best = min(2 * 7.0 / links[np.arange(4), list(matching)].min() for matching in matchings)
    assert problem.hops_s(some[None], others[None])[0, 0] == pytest.approx(best)


def test_paths_are_between_their_bounds() -> None:
    rng = np.random.default_rng(1)
    for size in (3, 5, 7):
        hops = rng.uniform(1, 2, (size, size))
        hops = hops + hops.T

        def length(path: object, hops: np.ndarray = hops) -> float:
            steps = np.array(path)
            return float(hops[steps[:-1], steps[1:]].sum())

        best = min(length(p) for p in permutations(range(size)))
        assert length(_shortest_path(hops)) == pytest.approx(best)
        assert _spanning_tree(hops) <= best + 1e-12
        assert (
            best - 1e-12
            <= length(TwoOpt(size).improved(hops, np.arange(size)))
            <= length(range(size))
        )


@pytest.mark.nightly
def test_trials_are_as_many_as_fit_and_all_when_thorough() -> None:
    small, large = (
        Problem(paper(4).rates, 2, 2, 1.0, 1.0),
        Problem(paper(4).rates, 96, 128, 1.0, 1.0),
    )
    assert small.trials_in(20) == TRIALS
    assert large.trials_in(20) < TRIALS
    conditions = paper(8, "opt-125m", batch=8, seq=128)
    for thorough in (False, True):
        rows = Dtfm(every_device=True, thorough=thorough).outcomes(conditions)
        assert any(f"{TRIALS} trials" in row.setting for row in rows)


def test_search_is_never_worse_than_its_start_and_repeats() -> None:
    problem = Problem(paper(24).rates, 6, 4, 1e9, 3e8)
    none, some = search(problem, seed=5, trials=0), search(problem, seed=5, trials=500)
    assert some.dp_s + some.pp_s <= none.dp_s + none.pp_s
    assert sorted(some.groups.ravel()) == list(range(24))
    assert (search(problem, seed=5, trials=500).groups == some.groups).all()


def test_variants_by_hand() -> None:
    spec = find_model("opt-125m")
    fleet = alike(12, up=1e6, down=1e8, memory=1e12)
    rows = {o.method: o for o in Dtfm().outcomes(Conditions(spec, 1, 512, fleet))}
    # One sample: no replicas, and nothing to overlap, so all three can only hop and compute.
    for row in rows.values():
        assert row.fits
        assert row.devices_used == 1  # any hop takes longer than computing everything
    assert rows["dtfm (serial)"].step_s == pytest.approx(rows["dtfm (pipelined)"].step_s)
