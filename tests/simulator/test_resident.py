"""Resident sub-layers: loads by hand, events against the closed form."""

from __future__ import annotations

import numpy as np
import pytest

from cleave.planner.shape import RateArrays
from cleave.workload.registry import find_model
from simulator.method import Conditions
from simulator.resident import CleaveResident
from simulator.resident_events import Assignment, Step, assign, simulate
from simulator.resident_layouts import LayoutSearch
from simulator.sublayers import Kind, Load, Residence, kinds, parameters, residence
from simulator.work import attention_flops, layer_work
from tests.simulator.conditions import alike, paper

FFN, ATTENTION = (Kind.FFN,), (Kind.ATTENTION,)


def test_bytes_are_those_of_the_design() -> None:
    conditions = paper(1)
    sample, weights = 1024 * 5120 * 2, parameters(conditions.spec, Kind.FFN)
    assert weights * 2 == pytest.approx(420e6, rel=0.01)
    assert parameters(conditions.spec, Kind.ATTENTION) * 2 == pytest.approx(210e6, rel=0.01)
    for r in (1, 4):
        ffn, attention = residence(conditions, FFN, r), residence(conditions, ATTENTION, r)
        assert ffn.forward.download_bytes == sample / r
        assert attention.forward.download_bytes == sample
        for held in (ffn, attention):
            assert held.forward.upload_bytes == held.backward.upload_bytes == sample / r
            assert held.backward.download_bytes == 2 * sample
        assert (ffn.weights_bytes, ffn.gradient_bytes) == (2 * weights, 4 * weights / r)


def test_a_device_alone_sends_only_the_ends_of_its_run() -> None:
    conditions = paper(1)
    sample = 1024 * 5120 * 2
    for run in (FFN, (Kind.ATTENTION, Kind.FFN), kinds(conditions.spec)[:6]):
        held = residence(conditions, run, 1)
        assert (held.forward.download_bytes, held.forward.upload_bytes) == (sample, sample)
        assert (held.backward.download_bytes, held.backward.upload_bytes) == (2 * sample, sample)


@pytest.mark.parametrize("name", ["opt-13b", "llama2-70b"])
def test_a_device_alone_computes_a_layer_and_its_recomputation(name: str) -> None:
    conditions = paper(1, name)
    spec = conditions.spec
    held = residence(conditions, (Kind.ATTENTION, Kind.FFN), 1)
    forward = layer_work(spec, 1024, 2).forward_flops
    assert held.forward.flops == pytest.approx(forward, rel=1e-12)
    # Anew: everything but the last product of each sub-layer.
    saved = 2 * 1024 * (spec.query_width * spec.width + spec.width * spec.ffn_width)
    assert held.backward.flops == pytest.approx(3 * forward - saved, rel=1e-12)
    assert held.forward.flops > attention_flops(spec, 1, 1024)


def test_sharing_saves_time_but_not_work() -> None:
    conditions = paper(1)
    alone, four = (residence(conditions, FFN, r) for r in (1, 4))
    assert four.forward.flops == alone.forward.flops / 4
    assert alone.backward.flops / 4 < four.backward.flops < alone.backward.flops


def test_gradients_are_held_until_they_are_sent() -> None:
    conditions = paper(1)
    weights = parameters(conditions.spec, Kind.FFN)
    assert residence(conditions, FFN, 1).memory_bytes > 6 * weights
    assert residence(conditions, FFN, 4).memory_bytes > 3 * weights


def held(down: float, flops: float, up: float) -> Residence:
    load = Load(down, flops, up)
    return Residence(FFN, load, load, 0.0, 0.0, 1.0)


def test_events_by_hand() -> None:
    # One device: 2 s down, 1 s of work, 3 s up. Four passes of one sample over two stages take
    # 4 x 6 s; with three samples each device serves 6 passes, one every 3 s at best.
    rates = RateArrays.of(alike(2, down=10, up=10, flops=10))
    stages = [held(20, 10, 30)] * 2
    places = Assignment((np.array([[0]]), np.array([[1]])))
    assert simulate(stages, places, rates, Step(1)).step_s == pytest.approx(24)
    # Samples enter at 2, 4, 6 s and leave the first uplink at 6, 9, 12.
    three = simulate(stages, places, rates, Step(3)).step_s
    assert 24 + 2 * 3 <= three <= 24 + 5 * 3


def test_weights_come_first_and_gradients_last() -> None:
    rates = RateArrays.of(alike(1, down=10, up=10, flops=10))
    load = Load(10, 10, 10)
    stage = Residence(FFN, load, load, weights_bytes=50, gradient_bytes=70, memory_bytes=1)
    run = simulate([stage], Assignment((np.array([[0]]),)), rates, Step(1))
    assert run.samples_s == pytest.approx(5 + 6)
    assert run.step_s == pytest.approx(5 + 6 + 7)


def test_equal_devices_take_about_what_the_closed_form_says() -> None:
    spec = find_model("opt-1.3b")
    conditions = Conditions(spec, 32, 512, alike(192, down=55e6))
    layout = LayoutSearch(conditions).closed_form(kinds(spec), run=1, r=2)
    assert layout is not None
    places = assign(layout.stages, conditions.rates, 2, 32)
    assert places is not None
    run = simulate(layout.stages, places, conditions.rates, Step(32))
    assert run.step_s == pytest.approx(layout.time_s, rel=0.1)
    assert run.step_s >= layout.steady_s


def test_nobody_holds_more_than_it_can() -> None:
    conditions = paper(256)
    for stretch in LayoutSearch(conditions).best_first(kinds(conditions.spec))[:5]:
        layout = stretch.layout
        places = assign(layout.stages, conditions.rates, layout.r, conditions.batch)
        if places is None:
            continue
        used = np.concatenate([groups.ravel() for groups in places.stages])
        assert len(set(used.tolist())) == len(used)
        for stage, groups in zip(layout.stages, places.stages, strict=True):
            assert conditions.rates.memory[groups].min() >= stage.memory_bytes


def test_too_few_devices_do_not_fit() -> None:
    (row,) = CleaveResident().outcomes(paper(32))
    assert not row.fits


def test_more_devices_are_faster() -> None:
    few, many = (CleaveResident().outcomes(paper(n, "opt-1.3b"))[0] for n in (64, 256))
    assert many.step_s < few.step_s
    assert few.fits
    assert many.fits
