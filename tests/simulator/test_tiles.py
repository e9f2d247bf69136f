"""`cleave` and `cleave-2d` are what the planner says, and attention."""

from __future__ import annotations

import dataclasses
import math

import pytest

from cleave.planner.plan import ElementBytes, PsRates
from cleave.planner.tiles.planner import PlanMethod as TileShape
from cleave.planner.tiles.planner import TilePlanner
from cleave.planner.tiles.report import plan_step
from cleave.workload.registry import find_model
from cleave.workload.step import step_gemms
from simulator.cleave_methods import backward_task, forward_task, tasks_s
from simulator.method import Conditions
from simulator.sweep import methods
from tests.simulator.conditions import alike, paper

pytestmark = pytest.mark.slow

KNOWN = methods()


@pytest.mark.parametrize(
    ("name", "shape", "fused"),
    [
        pytest.param("cleave", TileShape.THREE_D, True, marks=pytest.mark.nightly),
        ("cleave-2d", TileShape.TWO_D, False),
    ],
)
def test_a_step_is_the_plan_of_its_linears_and_its_attention(
    name: str, shape: TileShape, fused: bool
) -> None:
    conditions = paper(16, "llama-tiny", batch=16, seq=256)
    spec = conditions.spec
    (outcome,) = KNOWN[name].outcomes(conditions)
    gemms = step_gemms(spec, 16, 256, fused)
    planner = TilePlanner(PsRates(), shape)
    step = plan_step(planner, gemms, ElementBytes(2, 2), conditions.devices, PsRates())
    tasks = (forward_task(spec, 256, 2), backward_task(spec, 256, 2))
    attention_s = spec.layers * sum(
        tasks_s(task, 16 * spec.kv_heads, conditions.rates) for task in tasks
    )
    assert outcome.step_s == pytest.approx(step.apart_s + attention_s, rel=1e-12)
    sent = sum(16 * spec.kv_heads * spec.layers * task.download_bytes for task in tasks)
    egress = sum(
        gemm.count * r.plan.egress_bytes for gemm, r in zip(gemms, step.reports, strict=True)
    )
    assert outcome.download_bytes * outcome.devices_used == pytest.approx(egress + sent)


@pytest.mark.nightly
def test_bytes_per_device_fall_with_devices() -> None:
    few, many = (KNOWN["cleave"].outcomes(paper(n, "opt-125m"))[0] for n in (16, 64))
    assert many.download_bytes < few.download_bytes
    assert many.upload_bytes < few.upload_bytes


@pytest.mark.nightly
def test_a_card_slows_down() -> None:
    free = paper(8, "opt-tiny", batch=16, seq=256)
    card = Conditions(free.spec, 16, 256, free.devices, ps=PsRates(1e8, 1e8))
    slow, fast = (KNOWN["cleave"].outcomes(c)[0] for c in (card, free))
    assert slow.step_s > fast.step_s
    assert fast.ps_egress_bytes_per_s > 1e8
    assert slow.ps_egress_bytes_per_s <= 1e8 * 1.01


def test_bytes_are_on_average_over_the_devices_used() -> None:
    # Of these devices most are too slow for any tile or task; nothing passes them.
    fast, slow = alike(2), alike(6, down=1e3, up=1e3, flops=1e6)
    devices = [dataclasses.replace(d, device=i) for i, d in enumerate(fast + slow)]
    spec = find_model("opt-tiny")
    (outcome,) = KNOWN["cleave"].outcomes(Conditions(spec, 2, 128, devices))
    (alone,) = KNOWN["cleave"].outcomes(Conditions(spec, 2, 128, devices[:2]))
    assert outcome.devices_used == 2
    assert outcome.download_bytes == pytest.approx(alone.download_bytes)


def test_devices_too_small_for_attention_do_not_fit() -> None:
    spec = find_model("opt-125m")
    task = forward_task(spec, 1024, 2)
    tiny = Conditions(spec, 2, 1024, alike(8, memory=task.memory_bytes))
    (outcome,) = KNOWN["cleave"].outcomes(tiny)
    assert not outcome.fits
    assert "attention" in outcome.misfit
    assert math.isinf(outcome.step_s)
