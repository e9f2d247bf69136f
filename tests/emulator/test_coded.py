"""What virtual time counts where payloads are coded: bytes, and as long as plans say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cleave.arrays import Buffer, DType, empty
from cleave.fleet.fleet import Fleet
from cleave.fleet.product import Side
from cleave.planner.coding import LINK_BYTES_PER_S as LINK_BYTES_PER_S_TO_CODE
from cleave.planner.coding import CodingPolicy, coded_ratio
from cleave.planner.plan import PsRates
from cleave.planner.stages.model import PsCompute
from cleave.planner.stages.search import plan_stages
from cleave.planner.tiles.planner import TilePlanner
from cleave.protocol.limits import CODED_LEAST_BYTES
from cleave.protocol.messages import Put
from cleave.workload.registry import find_model
from emulator.deferred import SizedProduct
from emulator.sized_stages import EmulatedStep, SizedModel, run_steps
from emulator.virtual import Arithmetic, VirtualRuntime, coding_saves
from profiles.fleet_device import FleetDevice

LINK_BYTES_PER_S = 1e6


def _slow(count: int) -> list[FleetDevice]:
    """Devices on slow links."""
    return [
        FleetDevice(
            name=f"slow-{number}",
            flops_per_s=1e11,
            downlink_bytes_per_s=LINK_BYTES_PER_S,
            uplink_bytes_per_s=LINK_BYTES_PER_S,
            latency_s=0.005,
            memory_bytes=2**31,
        )
        for number in range(count)
    ]


def _emulated(coding: str, dtype: DType) -> tuple[EmulatedStep, float, VirtualRuntime]:
    """A step of a model on slow links, what its plan predicts, and the fleet."""
    fleet = _slow(3)
    runtime = VirtualRuntime(fleet, None, Arithmetic.NONE, verify=False, coding=coding)
    model = SizedModel(find_model("opt-tiny"), 8, 64, 4, dtype)
    ps = PsCompute(1e12, 0.0)
    plan = plan_stages(model.costs(), list(runtime.stage_devices().values()), ps)
    loss_s = [model.sizes.loss_flops / ps.flops_per_s * tokens for tokens in model.tokens]
    steps = run_steps(runtime, lambda: model.work(plan), loss_s, 2).steps
    return steps[1], plan.step_s, runtime


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP32])
@pytest.mark.parametrize("coding", ["auto", "off"])
def test_a_step_takes_what_is_planned(coding: str, dtype: DType) -> None:
    step, planned_s, _ = _emulated(coding, dtype)
    assert step.seconds == pytest.approx(planned_s, rel=0.05)


def test_fast_links_that_share_a_slow_card_are_coded() -> None:
    fleet = [replace(d, downlink_bytes_per_s=1e8, uplink_bytes_per_s=1e8) for d in _slow(4)]

    def coded(card_bytes_per_s: float) -> set[tuple[bool, bool]]:
        card = PsRates(card_bytes_per_s, 10 * card_bytes_per_s)
        runtime = VirtualRuntime(fleet, None, Arithmetic.NONE, card, verify=False)
        rates = runtime.stage_devices().values()
        return {(one.codes_downlink, one.codes_uplink) for one in rates}

    assert coded(4 * LINK_BYTES_PER_S_TO_CODE) == {(True, False)}
    assert coded(5 * LINK_BYTES_PER_S_TO_CODE) == {(False, False)}


@pytest.mark.slow
def test_what_is_saved_and_what_travels_is_what_travelled_plain() -> None:
    _, _, plain = _emulated("off", DType.BF16)
    _, _, coded = _emulated("auto", DType.BF16)
    assert not plain.counters().saved.down.total
    counted = coded.counters()
    for way in ("down", "up"):
        travelled, saved = getattr(counted.traffic, way), getattr(counted.saved, way)
        before = travelled.gradients + saved.gradients, travelled.weights + saved.weights
        assert saved.total > 0
        for kind, whole in zip(("gradients", "weights"), before, strict=True):
            if whole:
                # Biases are short and travel plain; headers do.
                assert getattr(saved, kind) / whole == pytest.approx(1 - 0.675, rel=0.05)
        assert not saved.graphs + saved.other


@pytest.mark.parametrize("coding", ["auto", "off"])
def test_a_device_answers_when_it_is_expected_to(coding: str) -> None:
    runtime = VirtualRuntime(
        _slow(1), None, Arithmetic.NONE, verify=False, observe=True, coding=coding
    )
    fleet = Fleet(runtime, TilePlanner())
    ones = fleet.operand(Buffer(np.ones((512, 512), np.float32), DType.FP32))
    fleet.submit(Side(ones), Side(ones), empty(512, 512, DType.FP32)).result()
    (session,) = runtime.manager.sessions.values()
    (sample,) = session.pace.samples
    # Latency and headers are in what it took alone; coding is worth more.
    assert sample.took_s == pytest.approx(sample.expected_s, rel=0.1)
    assert sample.took_s > sample.expected_s


@pytest.mark.parametrize("policy", CodingPolicy)
def test_every_device_can_code(policy: CodingPolicy) -> None:
    runtime = VirtualRuntime(_slow(1), None, Arithmetic.NONE, verify=False, coding=policy)
    runtime.settle()  # what it was told arrives
    (session,) = runtime.manager.sessions.values()
    assert session.codes_puts == (policy is not CodingPolicy.OFF)
    assert runtime.devices[session.id].core.codes_results == session.codes_puts


@pytest.mark.parametrize(
    ("nbytes", "dtype", "left"),
    [
        (CODED_LEAST_BYTES, "bf16", coded_ratio("bf16")),
        (CODED_LEAST_BYTES, "fp32", coded_ratio("fp32")),
        (CODED_LEAST_BYTES, "int64", 1.0),
        (CODED_LEAST_BYTES - 4, "fp32", 1.0),
    ],
)
def test_short_arrays_and_integers_travel_plain(nbytes: int, dtype: str, left: float) -> None:
    saved = coding_saves(Put(1, 1, nbytes // 2, dtype, SizedProduct(nbytes)))
    assert nbytes - saved == round(left * nbytes)
