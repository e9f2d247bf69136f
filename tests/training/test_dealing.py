"""Several servers: how sequences are divided, and in which order gradients are summed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from cleave.training.data.batches import Batch
from cleave.training.servers import gradient_sums
from cleave.training.servers.gradient_sums import GradientSums
from cleave.training.servers.ranks import Alone, Exchange
from cleave.training.servers.shared_steps import deal, deal_again, part_of, speed_after

SPEEDS = st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1e6)), min_size=1, max_size=6)


@given(st.integers(0, 500), SPEEDS)
def test_all_rows_are_dealt_and_none_is_better_off_elsewhere(
    rows: int, speeds: list[float]
) -> None:
    dealt = deal(rows, speeds)
    assert sum(dealt) == rows
    assert all(count >= 0 for count in dealt)
    if rows and any(speeds):
        pairs = list(zip(dealt, speeds, strict=True))
        assert not any(count for count, speed in pairs if not speed)
        last_s = max(count / speed for count, speed in pairs if speed)
        assert all((n + 1) / speed >= last_s * (1 - 1e-9) for n, speed in pairs if speed)


def test_dealing_by_shown_speeds_makes_parts_equally_long_where_most_of_a_step_is_fixed() -> None:
    fixed_s, row_s = [1.0, 2.0, 4.0], [0.05, 0.01, 0.02]
    speeds = [1.0 for _ in fixed_s]
    dealt: list[int] = []
    for _ in range(60):
        dealt = deal_again(400, speeds, dealt)
        times = [f + r * n for f, r, n in zip(fixed_s, row_s, dealt, strict=True)]
        shown = zip(speeds, dealt, times, strict=True)
        speeds = [speed_after(speed, rows, took_s, 1.0) for speed, rows, took_s in shown]
    assert max(times) < 1.15 * min(times)


def test_a_small_gain_deals_nothing_anew() -> None:
    assert deal_again(100, [1.0, 1.0], []) == [50, 50]
    assert deal_again(100, [1.0, 1.05], [50, 50]) == [50, 50]
    assert deal_again(100, [1.0, 3.0], [50, 50]) == [25, 75]
    assert deal_again(100, [1.0, 0.0], [25, 75]) == [100, 0]
    assert deal_again(60, [1.0, 0.0], [100, 0]) == [60, 0]


def test_a_fleet_that_grows_is_faster_before_it_has_shown_it() -> None:
    rows_per_s = speed_after(0.0, 10, 2.0, capacity=5.0)
    assert rows_per_s * 10.0 == 10.0
    rows_per_s = speed_after(rows_per_s, 10, 1.0, capacity=0.0)
    assert speed_after(rows_per_s, 0, 1.0, capacity=0.0) == 1.0


def test_a_server_that_was_slow_for_a_while_is_tried_again() -> None:
    speeds, dealt = [1.0, 1.0], list[int]()
    done = []
    for step in range(80):
        dealt = deal_again(8, speeds, dealt)
        done.append(dealt[1])
        for number, rows in enumerate(dealt):
            slow = 50.0 if number == 1 and 3 <= step < 12 else 1.0
            speeds[number] = speed_after(speeds[number], rows, rows * slow, 1.0)
    assert 0 in done
    assert done[-1] > 1


@given(st.integers(1, 4), st.integers(1, 5), SPEEDS)
def test_parts_are_the_whole_in_its_order(batches: int, rows: int, speeds: list[float]) -> None:
    ids = torch.arange(batches * rows * 2).reshape(batches, rows, 2)
    step = [Batch(each, each + 1, each + 2) for each in ids]
    dealt = deal(batches * rows, speeds)
    parts = [part_of(step, dealt, rank) for rank in range(len(speeds))]
    assert [sum(len(batch.ids) for batch in part) for part in parts] == dealt
    found = [batch for part in parts for batch in part]
    assert torch.equal(torch.cat([batch.ids for batch in found]), ids.flatten(0, 1))
    assert torch.equal(torch.cat([batch.labels for batch in found]), ids.flatten(0, 1) + 1)
    assert all(torch.equal(batch.positions, batch.ids + 2) for batch in found)  # type: ignore[arg-type]


class First(Alone):
    """The first of two servers; the other one has ones for every gradient, or none at all."""

    count = 2

    def __init__(self, other: str) -> None:
        self.sent: list[tuple[int, int]] = []
        self._other = other

    def agree(self, value: Any) -> list[Any]:
        return [value, self._other]

    def sum_at(self, owner: int, tensor: Tensor) -> Exchange:
        self.sent.append((owner, len(tensor)))
        tensor += torch.ones_like(tensor) if "1" in self._other else 0
        return super().sum_at(owner, tensor)


def parameters(sizes: Sequence[int]) -> dict[str, nn.Parameter]:
    return {f"p{n}": nn.Parameter(torch.zeros(size)) for n, size in enumerate(sizes)}


SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=12)


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_sums, "BUCKET_BYTES", 160)


@given(SIZES, st.data())
def test_all_servers_send_the_same_in_the_same_order(sizes: list[int], data: st.DataObject) -> None:
    owners = {f"p{n}": data.draw(st.integers(0, 1)) for n in range(len(sizes))}
    sent = []
    for _ in range(2):
        ranks, known = First("0" * len(sizes)), parameters(sizes)
        sums = GradientSums(ranks, known, owners)
        computed = data.draw(st.lists(st.sampled_from(sorted(known)), unique=True))
        for name in computed:
            known[name].grad = torch.full_like(known[name], 2.0)
            sums.complete(name)
        assert sorted(sums.finish()) == sorted(computed)
        sent.append(ranks.sent)
        for name, parameter in known.items():
            there = owners[name] == 0 and name in computed
            assert (parameter.grad is not None) == there
            if parameter.grad is not None:
                assert parameter.grad.shape == parameter.shape
                assert set(parameter.grad.tolist()) == {2.0}
    assert sent[0] == sent[1]
    assert sum(count for _, count in sent[0]) == sum(sizes)


def test_gradients_are_freed_while_the_pass_runs() -> None:
    known = parameters([40, 10, 40, 40])
    sums = GradientSums(First("1111"), known, {"p0": 0, "p1": 1, "p2": 1, "p3": 0})
    for name in ("p3", "p2", "p1"):
        known[name].grad = torch.ones_like(known[name])
        sums.complete(name)
    assert known["p2"].grad is None  # another server's
    assert known["p3"].grad is not None
    assert set(known["p3"].grad.tolist()) == {2.0}
    assert sums.finish() == ["p0", "p1", "p2", "p3"]
    assert known["p1"].grad is None
    assert known["p0"].grad is not None  # it came from the other server alone
    assert set(known["p0"].grad.tolist()) == {1.0}
