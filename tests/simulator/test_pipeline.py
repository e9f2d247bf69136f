"""The time of a pipeline, sum t + (m - 1) max t, against 1F1B itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.side_by_side.torch_pipeline import TorchPipeline
from cleave.planner.plan import DeviceRates, ElementBytes
from cleave.workload.registry import find_model
from simulator.alpa import Confidant
from simulator.method import Conditions
from simulator.pipeline import Cut, best_partition, one_f_one_b


def formula(times: np.ndarray, micro_batches: int) -> float:
    return float(times.sum() + (micro_batches - 1) * times.max())


def schedule(stages: int, stage: int, micro_batches: int) -> Iterator[tuple[bool, int]]:
    """What a stage does in turn: (backward, micro-batch)."""
    ahead = one_f_one_b(stages, micro_batches)[stage]
    yield from ((False, i) for i in range(ahead))
    for i in range(micro_batches):
        yield True, i
        if ahead + i < micro_batches:
            yield False, ahead + i


def exact(times: np.ndarray, micro_batches: int) -> float:
    """1F1B, event by event: a third of a stage's time is forward; hand-overs take no time."""
    stages = len(times)
    todo = [list(schedule(stages, p, micro_batches)) for p in range(stages)]
    done: dict[tuple[bool, int, int], float] = {}
    free = [0.0] * stages
    while any(todo):
        for p in range(stages):
            while todo[p]:
                backward, i = todo[p][0]
                waits_for = (
                    (backward, i, p + 1 if backward else p - 1)
                    if (p < stages - 1 if backward else p > 0)
                    else (False, i, p) if backward else None
                )  # fmt: skip
                if waits_for is not None and waits_for not in done:
                    break
                begin = max(free[p], done[waits_for] if waits_for else 0.0)
                free[p] = begin + times[p] * (2 / 3 if backward else 1 / 3)
                done[backward, i, p] = free[p]
                todo[p].pop(0)
    return max(free)


def test_unequal_stages_take_less_by_no_more_than_what_follows_the_slowest() -> None:
    rng = np.random.default_rng(7)
    for _ in range(150):
        times = rng.uniform(0.2, 1.8, int(rng.integers(2, 10)))
        micro_batches = int(rng.integers(1, 30))
        said, is_ = formula(times, micro_batches), exact(times, micro_batches)
        following = times[int(times.argmax()) + 1 :].sum()
        assert said - following - 1e-9 <= is_ <= said + 1e-9


def every(layers: int, start: int, units: int) -> Iterator[list[Cut]]:
    """All stages that hold so many layers, on units from start on, idle ones allowed."""
    if not layers:
        yield []
        return
    for first in range(start, units):
        for stop in range(first + 1, units + 1):
            for held in range(1, layers + 1):
                for rest in every(layers - held, stop, units):
                    yield [Cut(held, first, stop), *rest]


@pytest.mark.parametrize("seed", range(6))
def test_it_finds_the_best_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cost = rng.uniform(1, 10, (5, 5, 5))
    cost[rng.uniform(size=cost.shape) < 0.2] = np.inf

    def time_s(cuts: list[Cut], micro_batches: int) -> float:
        times = [cost[cut] for cut in cuts]
        longest = float(max(times))
        return np.inf if np.isinf(longest) else float(sum(times)) + (micro_batches - 1) * longest

    for micro_batches in (1, 3, 20):
        found = best_partition(cost, micro_batches)
        least = min(time_s(cuts, micro_batches) for cuts in every(4, 0, 4))
        if np.isinf(least):
            assert found is None
            continue
        assert found is not None
        assert sum(cut.layers for cut in found) == 4
        assert all(a.stop <= b.start for a, b in pairwise(found))
        assert least <= time_s(found, micro_batches) <= 1.05 * least


def test_one_stage_where_only_that_is_possible() -> None:
    cost = np.full((4, 3, 3), np.inf)
    cost[3, 0, 2] = 7.0
    assert best_partition(cost, 5) == [Cut(3, 0, 2)]
    assert best_partition(np.full((4, 3, 3), np.inf), 5) is None


SPEC = find_model("opt-125m")
UNTIED = replace(SPEC, tied_head=False)
BATCH, SEQ = 16, 512
ELEMENT = ElementBytes(4, 4)


def conditions(
    devices: int, *, up: float, latency_s: float = 0.0, flops: float = 35e9
) -> Conditions:
    """Four equal devices that train OPT-125M with a weight of the head's own."""
    rates = DeviceRates(0, 5 * up, up, flops, latency_s=latency_s, memory_bytes=1 << 36)
    fleet = [replace(rates, device=number) for number in range(devices)]
    return Conditions(UNTIED, BATCH, SEQ, fleet, ELEMENT)


def test_it_is_what_was_measured() -> None:
    """OPT-125M on four devices of 35 GFLOP/s behind 100/20: 150 and 146 s, docs/side-by-side.md."""
    given_ = replace(conditions(4, up=2.5e6, latency_s=0.01), spec=SPEC)
    (outcome,) = TorchPipeline([4, 4, 4, 0]).outcomes(given_)
    assert outcome.step_s == pytest.approx(148, rel=0.15)
    (published,) = Confidant().outcomes(given_)
    assert published.step_s < 0.5 * outcome.step_s


@given(cut=st.integers(1, 11), up=st.floats(1e5, 1e9), latency_s=st.floats(0, 1))
def test_each_micro_batch_waits_for_its_transfers(cut: int, up: float, latency_s: float) -> None:
    two = conditions(2, up=up, latency_s=latency_s)
    (outcome,) = TorchPipeline([cut, 12 - cut]).outcomes(two)
    (fast,) = TorchPipeline([cut, 12 - cut]).outcomes(conditions(2, up=1e18))
    hop_s = SEQ * SPEC.width * 4 / up + 2 * latency_s
    assert outcome.step_s == pytest.approx(fast.step_s + (BATCH + 1) * hop_s, rel=1e-6)


def test_ends_that_share_a_weight_add_up_its_gradients() -> None:
    own = conditions(4, up=2.5e6)
    stages = TorchPipeline([4, 4, 4, 0])
    (apart,), (shared,) = (stages.outcomes(replace(own, spec=s)) for s in (UNTIED, SPEC))
    embedding = SPEC.vocabulary * SPEC.embedding_width * 4
    assert shared.step_s - apart.step_s == pytest.approx(embedding / 2.5e6)
    assert shared.upload_bytes - apart.upload_bytes == pytest.approx(embedding / 2)
