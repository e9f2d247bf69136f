"""Plans followed strip by strip agree with the device's state machine in virtual time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cleave.arrays import Buffer, DType
from cleave.fleet.fleet import Fleet
from cleave.fleet.product import Side
from cleave.gemm import Gemm, Span, even_cuts
from cleave.planner.plan import DeviceRates, ElementBytes, GemmKind, Plan, PsRates, StepGemm
from cleave.planner.tiles.planner import TilePlanner
from cleave.planner.tiles.report import plan_step
from cleave.planner.tiles.streaming import (
    SharedCard,
    equal_shares,
    even_sizes,
    predicted_s,
)
from cleave.scheduler.tiles import gemm_job
from cleave.workload.registry import find_model
from cleave.workload.step import step_gemms
from emulator import sized_step
from emulator.sized_step import SizedStepper
from emulator.virtual import Arithmetic, VirtualRuntime, emulated
from profiles.fleet_device import FleetDevice
from profiles.fleets import paper_fleet
from tests.examples import examples
from tests.planner.fakes import FakePlanner

ELEMENT = ElementBytes(2, 2)
FEW = 12  # devices that keep what they hold: planning for the 64 of real fleets takes long


@pytest.fixture
def few_keep_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_job, "RESIDENCY_DEVICES", FEW)
    monkeypatch.setattr(sized_step, "RESIDENCY_DEVICES", FEW)


@dataclass(frozen=True)
class Afresh(FakePlanner):
    """A planner that is not told what devices hold, like planners of large fleets."""

    planner: TilePlanner

    def planned(self, gemm: Gemm, devices: Sequence[DeviceRates]) -> Plan:
        return self.planner.plan(gemm, ELEMENT, devices)


def _matrix(rows: int, columns: int) -> Buffer:
    return Buffer(np.broadcast_to(np.uint16(0), (rows, columns)), DType.BF16)


def _emulate(gemm: Gemm, devices: list[FleetDevice], ps: PsRates) -> tuple[float, float]:
    """Return the predicted and the actual seconds of a GEMM."""
    runtime = VirtualRuntime(devices, None, Arithmetic.NONE, coding="off")
    fleet = Fleet(runtime, TilePlanner(ps))
    begin_s = runtime.now_s
    a, b = fleet.operand(_matrix(gemm.m, gemm.k)), fleet.operand(_matrix(gemm.k, gemm.n))
    future = fleet.submit(Side(a), Side(b), _matrix(gemm.m, gemm.n))
    future.result()
    assert future.job.plan is not None
    rates = {d.device: d for d in runtime.fleet_rates()[1]}
    predicted = predicted_s(future.job.plan, ELEMENT, rates)
    return predicted, runtime.now_s - begin_s


@pytest.mark.slow
@pytest.mark.parametrize(("latency_s", "block_s"), [(0.0, 3e-4), (0.03, 0.0)])
@pytest.mark.parametrize("devices", [1, 8, pytest.param(100, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("sides", [(8192, 4096, 4096), (4096, 4096, 65536)])
def test_equal_devices_take_what_is_predicted(
    sides: tuple[int, int, int], devices: int, latency_s: float, block_s: float
) -> None:
    fleet = [FleetDevice(f"d{i}", 6e12, 50e6, 8e6, latency_s, 2 * 10**9) for i in range(devices)]
    predicted, took = _emulate(Gemm(*sides), fleet, PsRates(block_s=block_s))
    assert took == pytest.approx(predicted, rel=0.02)
    assert took >= predicted  # headers take time too


@pytest.mark.slow
@settings(max_examples=examples(15), deadline=None)
@given(
    m=st.integers(512, 8192),
    n=st.integers(512, 8192),
    k=st.integers(512, 16384),
    devices=st.integers(1, 40),
)
def test_unequal_devices_take_what_is_predicted(m: int, n: int, k: int, devices: int) -> None:
    predicted, took = _emulate(Gemm(m, n, k), paper_fleet(devices), PsRates(block_s=3e-4))
    assert took == pytest.approx(predicted, rel=0.02)


@pytest.mark.nightly
@pytest.mark.slow
@settings(max_examples=examples(12), deadline=None)
@given(
    tokens=st.integers(512, 8192),
    inputs=st.integers(256, 4096),
    outputs=st.integers(256, 4096),
    devices=st.integers(1, 40),
    card=st.sampled_from([math.inf, 2e9, 5e8]),
    latency_s=st.sampled_from([0.0, 0.01]),
)
@example(1424, 1699, 1292, 31, 5e8, 0.01)  # 0.93 of what is predicted
def test_both_gradients_of_a_linear_take_together_what_is_predicted(
    tokens: int, inputs: int, outputs: int, devices: int, card: float, latency_s: float
) -> None:
    ps = PsRates(card)
    fleet = [replace(device, latency_s=latency_s) for device in paper_fleet(devices)]
    runtime = VirtualRuntime(fleet, None, Arithmetic.NONE, ps, verify=False, coding="off")
    by = Fleet(runtime, Afresh(TilePlanner(replace(ps, block_s=3e-4))))
    gemms = (
        StepGemm(GemmKind.INPUT_GRADIENT, Gemm(tokens, inputs, outputs), 1, "fc1"),
        StepGemm(GemmKind.WEIGHT_GRADIENT, Gemm(outputs, inputs, tokens), 1, "fc1"),
    )
    step = plan_step(by.planner, gemms, ELEMENT, runtime.fleet_rates()[1], ps)
    begin_s = runtime.now_s
    x, w, dy = (
        by.operand(_matrix(*sides))
        for sides in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
    )
    futures = [
        by.submit(Side(dy), Side(w), _matrix(tokens, inputs)),
        by.submit(Side(dy, True), Side(x), _matrix(outputs, inputs)),
    ]
    for future in futures:
        future.result()
    took_s = runtime.now_s - begin_s
    # Two products that share a card are up to a tenth faster than each is predicted by itself.
    sooner, later = (0.02, 0.02) if math.isinf(card) else (0.10, 0.05)
    assert 1 - sooner <= took_s / step.predicted_s <= 1 + later
    assert max(found.predicted_s for found in step.reports) <= step.predicted_s * (1 + 1e-9)


def _step_s(model: str, devices: int, card: float) -> tuple[float, float]:
    """What a step of training was predicted to take, and what it took."""
    ps = PsRates(card, card)
    fleet = emulated(paper_fleet(devices), compute=False, ps=ps, coding="off")
    fleet.planner = TilePlanner(replace(ps, block_s=3e-4))
    gemms = step_gemms(find_model(model), 16, 256)
    step = plan_step(fleet.planner, gemms, ELEMENT, fleet.runtime.fleet_rates()[1], ps)
    took = SizedStepper(fleet, find_model(model), 16 * 256, DType.BF16).step()
    headers = took.counters.downlink_bytes / step.egress_bytes - 1
    assert devices <= FEW or 0 <= headers < 0.1
    return step.predicted_s, took.fleet_s


@pytest.mark.slow
@pytest.mark.usefixtures("few_keep_what_they_hold")
@pytest.mark.parametrize("card", [pytest.param(math.inf, marks=pytest.mark.nightly), 1e9])
@pytest.mark.parametrize(
    "model", ["opt-nano", pytest.param("llama-tiny", marks=pytest.mark.nightly)]
)
def test_a_step_takes_what_is_predicted(model: str, card: float) -> None:
    """Siblings read one input, which devices keep from the first to the last."""
    predicted_s, took_s = _step_s(model, FEW + 6, card)
    assert took_s == pytest.approx(predicted_s, rel=0.02 if math.isinf(card) else 0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("few_keep_what_they_hold")
def test_small_fleets_reuse_more_than_is_predicted() -> None:
    predicted_s, took_s = _step_s("opt-tiny", FEW, math.inf)
    assert 0.9 * predicted_s < took_s < predicted_s


@given(
    sides=st.lists(st.integers(1, 300), min_size=1, max_size=9),
    pieces=st.integers(1, 16),
    align=st.sampled_from([1, 4]),
)
def test_sizes_of_many_cuts_are_those_of_each(sides: list[int], pieces: int, align: int) -> None:
    cuts = [even_cuts(Span(7, 7 + side), pieces, align) for side in sides]
    found = even_sizes(np.array(sides), pieces, np.full(len(sides), align))
    if any(len(cut) < pieces for cut in cuts):
        assert found is None
    else:
        assert found is not None
        assert found.T.tolist() == [[span.size for span in cut] for cut in cuts]


RATES = st.lists(st.floats(1e3, 1e9), min_size=1, max_size=20)
NBYTES = st.floats(1.0, 1e9)


@given(most=RATES, total=st.floats(1e3, 1e10))
def test_shares_are_equal_but_for_those_who_can_take_less(most: list[float], total: float) -> None:
    shares = equal_shares(np.array(most), total)
    assert (shares <= most).all()
    assert shares.sum() == pytest.approx(min(total, sum(most)))
    less = shares[shares < np.array(most)]
    assert not len(less) or less == pytest.approx(shares.max())


@given(devices=st.lists(st.tuples(st.floats(1e3, 1e9), NBYTES), min_size=1, max_size=12),
       card=st.floats(1e3, 1e10))  # fmt: skip
def test_everything_is_sent_no_sooner_than_link_and_card_allow(
    devices: list[tuple[float, float]], card: float
) -> None:
    rates, nbytes = (np.array(each) for each in zip(*devices, strict=True))
    everyone = np.arange(len(rates))
    shared = SharedCard(nbytes, rates, card)
    last_s = shared.sent_s(everyone, nbytes)
    assert (last_s >= nbytes / rates * (1 - 1e-6)).all()
    assert last_s.max() >= nbytes.sum() / card * (1 - 1e-6)
    half_s = shared.sent_s(everyone, nbytes / 2)
    assert (half_s <= last_s).all()
    if rates.sum() <= card:
        assert last_s == pytest.approx(nbytes / rates)


def test_a_device_that_has_everything_leaves_its_share_to_the_others() -> None:
    shared = SharedCard(np.array([10.0, 30.0]), np.array([100.0, 100.0]), 10.0)
    assert shared.sent_s(np.array([0, 1]), np.array([10.0, 30.0])) == pytest.approx([2.0, 4.0])
    assert shared.sent_s(np.array([1]), np.array([10.0])) == pytest.approx([2.0])
