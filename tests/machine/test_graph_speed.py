"""The speed of a layer's graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from cleave.machine import graph_speed
from cleave.machine.graph_session import GraphError, GraphSession
from cleave.machine.graph_speed import layer, layer_flops, measured_graphs


class Steady:
    """Takes the same time at every run, on a made-up clock."""

    def __init__(self, run_s: float) -> None:
        self.run_s = run_s
        self.now_s = 0.0
        self.given: Mapping[str, Any] = {}

    def __call__(self) -> float:
        return self.now_s

    def run(self, given: Mapping[str, Any]) -> None:
        self.given = given
        self.now_s += self.run_s


@pytest.mark.parametrize("run_s", [1e-4, 0.1, 20.0])
def test_the_speed_is_what_a_run_shows(run_s: float) -> None:
    steady = Steady(run_s)
    found = measured_graphs(lambda _: steady, steady)
    assert found == pytest.approx(layer_flops() / run_s, rel=1e-3)


def test_the_layer_is_one() -> None:
    """Its attention mixes tokens, and leaves sequences apart."""
    steady = Steady(1.0)
    session = GraphSession(layer(), 1)
    measured_graphs(lambda _: steady, steady)
    (y,) = session.run(steady.given).values()
    x = steady.given["x"].copy()
    assert y.shape == x.shape
    x[0, 0] += 1
    (changed,) = session.run({**steady.given, "x": x}).values()
    assert np.abs(changed[0] - y[0]).max(-1).all()
    assert np.array_equal(changed[1], y[1])


def test_no_speed_where_no_graph_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(model: bytes) -> Steady:
        raise GraphError("none here")

    assert measured_graphs(refused) == 0
    monkeypatch.setattr(graph_speed, "available", lambda: False)
    assert measured_graphs(GraphSession) == 0
