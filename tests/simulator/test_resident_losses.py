"""Losses over resident sub-layers and tiles: by hand, and the closed form against events."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest

from cleave.planner.shape import RateArrays
from cleave.workload.registry import find_model
from simulator.method import Conditions
from simulator.resident import best_resident
from simulator.resident_events import Assignment, Losses, Step, simulate
from simulator.resident_losses import ResidentLosses
from simulator.sublayers import Kind, Load, Residence
from simulator.tiles import TileLosses
from tests.simulator.conditions import alike

pytestmark = pytest.mark.slow


def test_a_step_with_losses_by_hand() -> None:
    losses = ResidentLosses(100.0, devices=10, groups=4, weights_s=6.0, again_s=8.0)
    assert losses.away_s(2.0) == 10
    assert losses.with_losses_s(0.0, 2.0) == 100
    # One loss in ten seconds, each away for ten: somebody is with probability 1 - 1 / e.
    share = 1 - math.exp(-1)
    assert losses.with_losses_s(0.01, 2.0) == pytest.approx(100 / (1 - share / 4))


def test_losses_of_tiles_delay_a_gemm_once() -> None:
    losses = TileLosses(((2.0, 3), (50.0, 1)), devices=10, again_s=1.0)
    assert losses.with_losses_s(0.0, 4.0) == 56
    rare = losses.with_losses_s(1e-6, 4.0)
    assert rare == pytest.approx(56 + 56 * 1e-5 * 5, rel=1e-6)
    # However many are lost: four GEMMs, five seconds each.
    assert losses.with_losses_s(10.0, 4.0) == pytest.approx(56 + 4 * 5)


def test_one_loss_by_hand() -> None:
    # Ten samples of 3 s a pass on one device: it is away for 5 s to notice, 2 s for the weights,
    # and does again what it had: 1 s for each sample.
    load = Load(10, 10, 10)
    stage = Residence((Kind.FFN,), load, load, weights_bytes=20, gradient_bytes=10, memory_bytes=1)
    rates = RateArrays.of(alike(1, down=10, up=10, flops=10))
    go = partial(simulate, [stage], Assignment((np.array([[0]]),)), rates)
    bare = go(Step(10)).step_s
    for seed in range(20):
        run = go(Step(10, losses=Losses(1 / 60, 5.0, seed)))
        # A sample that was under way waits, too, and begins anew.
        assert bare + 7 * run.losses - 3 <= run.step_s or not run.losses
        assert run.step_s <= bare + (7 + 10 + 3) * run.losses
    assert go(Step(10, losses=Losses(0.0, 5.0))).step_s == bare


def test_losses_are_the_same_twice() -> None:
    conditions = Conditions(find_model("opt-125m"), 8, 128, alike(48, down=55e6))
    found = best_resident(conditions)
    assert found is not None
    stages = found.stretch.layout.stages
    step = Step(8, losses=Losses(0.01, 1.0, seed=3))
    one, two = (simulate(stages, found.assignment, conditions.rates, step) for _ in range(2))
    assert one == two
    assert one.losses


@pytest.mark.parametrize("per_hour", [0.3, 1.0])
def test_the_closed_form_says_what_events_take(per_hour: float) -> None:
    conditions = Conditions(find_model("opt-1.3b"), 128, 512, alike(100, down=55e6))
    found = best_resident(conditions)
    assert found is not None
    layout = found.stretch.layout
    runs = [
        simulate(
            layout.stages,
            found.assignment,
            conditions.rates,
            Step(128, losses=Losses(per_hour / 3600, 1.0, seed)),
        )
        for seed in range(16)
    ]
    simulated_s = float(np.mean([run.step_s for run in runs]))
    said_s = found.losses(conditions).with_losses_s(per_hour / 3600, 1.0)
    assert said_s > found.time_s
    assert said_s == pytest.approx(simulated_s, rel=0.15)
