"""What losing a device costs."""

from __future__ import annotations

import math

import pytest

from cleave.planner.tiles.shape import RateArrays
from simulator.method import Outcome, Part, TileLosses, with_losses_s
from simulator.pipeline import PipelineJob, Stage, restart
from simulator.sweep import methods
from simulator.work import LayerWork, stage_need
from tests.simulator.conditions import alike, paper


def outcome(recovery_s: float | None, devices: int = 10) -> Outcome:
    recovery = () if recovery_s is None else (Part("again", recovery_s),)
    parts = (Part("all", 100.0),)
    return Outcome("some", "", devices, parts, 0, 0, 1, 1, recovery=recovery)


def test_a_step_with_losses_by_hand() -> None:
    # Ten devices, each lost every 1000 s: one loss in 100 s, which costs 2 + 8 s.
    assert with_losses_s(outcome(8.0), 1e-3, 2.0) == pytest.approx(100 / 0.9)
    assert with_losses_s(outcome(8.0), 0.0, 2.0) == 100
    assert with_losses_s(outcome(98.0), 1e-3, 2.0) == math.inf
    assert with_losses_s(outcome(None), 1e-3, 2.0) is None


def test_losses_of_tiles_delay_a_gemm_once() -> None:
    losses = TileLosses(((2.0, 3), (50.0, 1)), devices=10, again_s=1.0)
    assert losses.with_losses_s(0.0, 4.0) == 56
    rare = losses.with_losses_s(1e-6, 4.0)
    assert rare == pytest.approx(56 + 56 * 1e-5 * 5, rel=1e-6)
    # However many are lost: four GEMMs, five seconds each.
    assert losses.with_losses_s(10.0, 4.0) == pytest.approx(56 + 4 * 5)


def test_a_restart_by_hand() -> None:
    job = PipelineJob(4, LayerWork(1e6, 1.0, 1.0, 1.0), 0.0, 8, 2)
    stages = [Stage(n, RateArrays.of(alike(1, down=1e6))) for n in (1, 3)]
    states, again = restart(job, stages, step_s=50.0)
    assert states.seconds == 3 * 16
    assert again.seconds == 25
    assert stage_need(job.layer, 3, 0, 1e9).memory_bytes == 3 * 16e6


@pytest.mark.slow
def test_a_tile_is_lost_alone() -> None:
    known = methods()
    conditions = paper(24, "opt-1.3b", batch=16, seq=256)
    (tiles,) = known["cleave"].outcomes(conditions)
    assert tiles.recovery_s is not None
    assert 0 < tiles.recovery_s < tiles.step_s / 100
    for row in known["dtfm"].outcomes(conditions):
        assert row.recovery_s is not None
        assert row.recovery_s > row.step_s / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["cleave", "cleave-stages", "asteroid", "alpa", "confidant", "data-parallel"]
)
def test_every_fleet_method_says_what_a_loss_costs(name: str) -> None:
    for row in methods()[name].outcomes(paper(16, "opt-125m", batch=8, seq=128)):
        assert row.recovery_s is not None
        assert math.isfinite(row.recovery_s)
