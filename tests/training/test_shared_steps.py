"""What happens on one server happens on all; a server without devices gives its part away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from cleave.errors import CleaveError, FleetError
from cleave.fleet.local_fallback import AbandonedError
from cleave.scheduler.counters import FleetCounters, TrafficKind
from cleave.training.data.batches import Batch
from cleave.training.servers.ranks import Alone, LostServerError
from cleave.training.servers.shared_steps import GIVES_BACK_S, SharedSteps


class Others(Alone):
    """The first of several servers; what the others say is written down before."""

    def __init__(self, *others: Callable[[Any], Any]) -> None:
        self.count = 1 + len(others)
        self._others = others

    def agree(self, value: Any) -> list[Any]:
        return [value, *(other(value) for other in self._others)]


class Fleet:
    """Devices that come and go."""

    clock = "wall"

    def __init__(self, capacity: float = 1.0, predicted_s: float = 4.0) -> None:
        self._capacity, self._predicted_s = capacity, predicted_s
        self.there = True

    def capacity(self) -> float:
        return self._capacity if self.there else 0.0

    def predicted_s(self, batches: Any) -> float:
        return self._predicted_s


def shared(ranks: Any, fleet: Any = None, clock: Any = lambda: 0.0) -> SharedSteps:
    return SharedSteps(ranks, fleet, clock)


def fails(error: Exception) -> Callable[[], float]:
    def work() -> float:
        raise error

    return work


def batches(rows: int) -> list[Batch]:
    ids = torch.arange(rows * 3).reshape(rows, 3)
    return [Batch(ids, ids)]


def test_what_all_did_is_what_each_gets_and_a_failure_is_raised_everywhere() -> None:
    steps = shared(Others(lambda said: {"done": 2.5}, lambda said: {"done": 1.0}))
    assert steps.together(lambda: 0.5) == [0.5, 2.5, 1.0]
    failed = {"failed": "its disk broke", "deserted": False}
    with pytest.raises(CleaveError, match="server 3 of 3 failed: its disk broke"):
        shared(Others(lambda said: {"done": 1}, lambda said: failed)).together(lambda: 0)
    with pytest.raises(CleaveError, match=r"^mine$"):
        shared(Others(lambda said: {"done": 1})).together(fails(CleaveError("mine")))


def test_what_one_gives_up_all_give_up() -> None:
    with pytest.raises(AbandonedError):
        shared(Others(lambda said: {"abandoned": "no device"})).together(lambda: 0)
    with pytest.raises(AbandonedError):
        shared(Others(lambda said: {"done": 1})).together(fails(AbandonedError("stop")))


def test_a_fleet_that_is_gone_for_good_ends_training_only_where_all_are() -> None:
    fleet = Fleet()
    fleet.there = False
    lost = fails(FleetError("nothing will happen"))
    with pytest.raises(AbandonedError):
        shared(Others(lambda said: {"done": 1}), fleet).together(lost)
    with pytest.raises(FleetError, match="nothing will happen"):
        shared(Others(lambda said: said), fleet).together(lost)
    fleet.there = True
    with pytest.raises(FleetError, match="nothing will happen"):
        shared(Others(lambda said: {"done": 1}), fleet).together(lost)


def test_rows_go_by_what_is_predicted_then_by_what_was_shown() -> None:
    now_s, said = 0.0, list[str]()
    ranks: Any = Others(lambda speed: 1.0)  # a row a second
    steps = SharedSteps(ranks, Fleet(predicted_s=4.0), lambda: now_s, said.append)  # type: ignore[arg-type]
    part = steps.part(batches(12))
    assert [len(batch.ids) for batch in part] == [9]  # three rows a second, as predicted

    def slow() -> float:
        nonlocal now_s
        now_s += 90.0
        return 1.0

    ranks._others = (lambda said: {"done": 0.0},)
    steps.do(part, slow, Mock(waited_s=0.0))
    ranks._others = (lambda speed: 1.0,)
    assert [len(batch.ids) for batch in steps.part(batches(12))] == [7]
    assert said == [
        "the servers compute 9 + 3 sequences of each step",
        "the servers compute 7 + 5 sequences of each step",
    ]


def test_waiting_for_slower_servers_does_not_make_a_server_slow() -> None:
    now_s = 0.0
    ranks: Any = Others(lambda speed: 1.0)
    steps = SharedSteps(ranks, Fleet(predicted_s=12.0), lambda: now_s)  # type: ignore[arg-type]
    part = steps.part(batches(12))
    assert [len(batch.ids) for batch in part] == [6]

    def ahead() -> float:
        nonlocal now_s
        now_s += 6.0  # of them 4 until the others came
        return 1.0

    ranks._others = (lambda said: {"done": 0.0},)
    steps.do(part, ahead, Mock(waited_s=4.0))
    ranks._others = (lambda speed: 1.0,)
    assert [len(batch.ids) for batch in steps.part(batches(12))] == [8]


@pytest.mark.parametrize(
    ("error", "times"),
    [
        (CleaveError("disk"), 1),
        (LostServerError("gone"), 0),
        (RuntimeError("a defect"), 0),  # the process ends, which others notice at once
    ],
)
def test_gradients_are_added_up_where_a_part_failed_too_but_not_after_a_loss(
    error: Exception, times: int
) -> None:
    sums = Mock(waited_s=0.0)
    with pytest.raises(type(error)):
        shared(Others(lambda said: {"done": 1.0})).do(batches(1), fails(error), sums)
    assert sums.add_up.call_count == times


def test_a_server_without_devices_has_no_part_and_gives_up_one_after_a_while() -> None:
    now_s = 0.0
    fleet = Fleet()
    steps = shared(Others(lambda speed: 1.0), fleet, lambda: now_s)
    assert steps.part(batches(4))
    assert not steps.deserted()
    fleet.there = False
    assert not steps.deserted()
    now_s = GIVES_BACK_S
    assert steps.deserted()
    assert steps.part(batches(4)) == []
    assert not steps.deserted()  # it waits anew
    assert not shared(Alone(), fleet, lambda: now_s).deserted()  # there is nobody else


def test_counters_of_all_servers_are_added_and_seconds_are_those_of_the_slowest() -> None:
    mine = FleetCounters(fleet_s=2.0, waited_s=1.0, tiles=3)
    mine.traffic.down.count(TrafficKind.WEIGHTS, 10)

    def other(values: dict[str, Any]) -> dict[str, Any]:
        return {**values, "fleet_s": 5.0, "tiles": 4}

    total = shared(Others(other)).counted(mine)
    assert (total.fleet_s, total.waited_s, total.tiles) == (5.0, 1.0, 7)
    assert total.traffic.down.weights == 20
    assert total.downlink_bytes == 20
