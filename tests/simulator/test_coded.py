"""Coded payloads in simulations: every method may have them, and none has to."""

from __future__ import annotations

import pytest

from cleave.planner.coding import CodingPolicy
from cleave.planner.plan import ElementBytes, PsRates
from cleave.workload.registry import find_model
from simulator.sweep import cells, methods

KNOWN = methods()


def _step_s(name: str, coding: CodingPolicy) -> float:
    (cell,) = cells(
        find_model("opt-125m"),
        8,
        256,
        "paper",
        [4],
        [KNOWN[name]],
        element=ElementBytes(2, 2),
        ps=PsRates(),
        coding=coding,
    )
    return min(row.outcome.step_s for row in cell.rows())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "cleave",
        pytest.param("cleave-stages", marks=pytest.mark.nightly),
        "alpa",
        "asteroid",
        "confidant",
        "data-parallel",
        "dtfm",
    ],
)
def test_no_method_is_slower_coded_nor_gains_more_than_the_ratio(name: str) -> None:
    plain_s = _step_s(name, CodingPolicy.OFF)
    assert 0.67 * plain_s <= _step_s(name, CodingPolicy.ON) <= plain_s * 1.02


def test_a_peer_gains_what_its_links_gain() -> None:
    assert _step_s("data-parallel", CodingPolicy.ON) < 0.8 * _step_s(
        "data-parallel", CodingPolicy.OFF
    )
