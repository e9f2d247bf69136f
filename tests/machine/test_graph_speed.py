"""The speed of a layer's graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from cleave.machine import graph_speed
from cleave.machine.graph_choice import open_on_cpu
from cleave.machine.graph_session import GraphError, GraphSession
from cleave.machine.graph_speed import layer, layer_flops, measured_graphs


class Steady(GraphSession):
    """Takes the same time for every sequence of a run, on a made-up clock."""

    def __init__(self, row_s: float) -> None:
        super().__init__(layer(), 1)
        self.row_s = row_s
        self.now_s = 0.0
        self.given: Mapping[str, Any] = {}

    def clock(self) -> float:
        return self.now_s

    def run_into(
        self, given: Mapping[str, Any], into: Mapping[str, Any], wanted: Any = None
    ) -> dict[str, Any]:
        self.given = given
        self.now_s += self.row_s * len(given["x"])
        return {}


@pytest.mark.slow
@pytest.mark.parametrize("row_s", [1e-5, 1e-4, 0.1, 20.0])
def test_the_speed_is_what_a_run_shows(row_s: float) -> None:
    steady = Steady(row_s)
    found = measured_graphs(lambda *_: steady, clock=steady.clock)
    assert found == pytest.approx(layer_flops(1) / row_s, rel=1e-3)
    assert (len(steady.given["x"]) > 2) == (row_s < 1e-2)
    assert len(steady.given["x"]) <= 128


def test_the_layer_is_one() -> None:
    """Its attention mixes tokens, and leaves sequences apart."""
    steady = Steady(1.0)
    session = GraphSession(layer(), 1)
    measured_graphs(lambda *_: steady, clock=steady.clock)
    (y,) = session.run(steady.given).values()
    x = steady.given["x"].copy()
    assert y.shape == x.shape
    x[0, 0] += 1
    (changed,) = session.run({**steady.given, "x": x}).values()
    assert np.abs(changed[0] - y[0]).max(-1).all()
    assert np.array_equal(changed[1], y[1])


def test_no_speed_where_no_graph_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(model: bytes, given: Any, products: Any) -> Steady:
        raise GraphError("none here")

    assert measured_graphs(refused) == 0
    monkeypatch.setattr(graph_speed, "available", lambda: False)
    assert measured_graphs(open_on_cpu) == 0
