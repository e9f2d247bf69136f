"""What a plan amounts to: sums over a step, what limits it, time against energy."""

from __future__ import annotations

import pytest

from cleave.gemm import Gemm
from cleave.planner.plan import DeviceRates, GemmKind, PsRates, StepGemm
from cleave.planner.tiles.bound import isolated_bound_s, overlap_bound_s
from cleave.planner.tiles.planner import TilePlanner
from cleave.planner.tiles.report import (
    Bottleneck,
    PlanReport,
    StepReport,
    advice,
    plan_step,
    report,
)
from cleave.planner.tiles.shape import RateArrays
from tests.planner.checks import BF16, paper_rates

UNLIMITED = PsRates()
GEMM = Gemm(2048, 2048, 2048)
STEP = (
    StepGemm(GemmKind.FORWARD, Gemm(512, 768, 768), 12, "out_proj"),
    StepGemm(GemmKind.INPUT_GRADIENT, Gemm(512, 768, 768), 12, "out_proj"),
    StepGemm(GemmKind.WEIGHT_GRADIENT, Gemm(768, 768, 512), 12, "out_proj"),
    StepGemm(GemmKind.FORWARD, Gemm(512, 5000, 768), 1, "lm_head"),
)


def alike(
    down: float = 1e8, up: float = 1e8, flops: float = 1e13, latency_s: float = 0.0
) -> list[DeviceRates]:
    return [DeviceRates(i, down, up, flops, latency_s) for i in range(8)]


def reported(devices: list[DeviceRates], ps: PsRates = UNLIMITED, gemm: Gemm = GEMM) -> PlanReport:
    return report(TilePlanner(ps).plan(gemm, BF16, devices), BF16, devices, ps)


# --- one plan ---


def test_a_plan_is_held_against_its_bounds() -> None:
    devices = paper_rates(16)
    found = reported(devices)
    rates = RateArrays.of(devices)
    bound_s = isolated_bound_s(GEMM, BF16, rates, UNLIMITED)
    assert found.gap == pytest.approx(found.plan.makespan_s / bound_s - 1)
    assert 0 <= found.gap < 0.25
    assert found.overlap_bound_s == overlap_bound_s(GEMM, BF16, rates, UNLIMITED)


def test_bytes_are_of_the_device_with_most() -> None:
    """One device with little memory does several tiles: bytes add up, memory does not."""
    devices = [DeviceRates(0, 1e8, 1e8, 1e13, 0.0, 2**20)]
    found = reported(devices, gemm=Gemm(1024, 1024, 1024))
    tiles = found.plan.tiles
    assert len(tiles) > 1
    assert found.download_bytes == sum(t.download_bytes for t in tiles)
    assert found.upload_bytes == sum(t.upload_bytes for t in tiles) == 2 * 1024 * 1024
    assert found.memory_bytes == max(t.download_bytes + t.upload_bytes for t in tiles) <= 2**20


@pytest.mark.parametrize(
    ("devices", "ps", "limit"),
    [
        (alike(down=1e6), UNLIMITED, Bottleneck.DOWNLINK),
        (alike(up=1e5), UNLIMITED, Bottleneck.UPLINK),
        (alike(down=1e9, up=1e9, flops=1e9), UNLIMITED, Bottleneck.COMPUTE),
        (alike(down=1e9, up=1e9, latency_s=5.0), UNLIMITED, Bottleneck.LATENCY),
        (alike(), PsRates(egress_bytes_per_s=1e6), Bottleneck.PS_EGRESS),
        (alike(), PsRates(ingress_bytes_per_s=1e5), Bottleneck.PS_INGRESS),
    ],
    ids=lambda value: value.value if isinstance(value, Bottleneck) else "",
)
def test_what_limits_a_plan(devices: list[DeviceRates], ps: PsRates, limit: Bottleneck) -> None:
    found = reported(devices, ps)
    assert found.bottleneck is limit
    step = StepReport((found,), (1,))
    assert step.bottleneck is limit
    assert advice(step).startswith(f"{limit.value} limits most of the step: ")
    assert advice(step).endswith(".")


# --- a step ---


def test_totals_are_sums_with_multiplicities() -> None:
    step = plan_step(TilePlanner(UNLIMITED), STEP, BF16, paper_rates(12), UNLIMITED)
    pairs = list(zip(step.reports, [12, 12, 12, 1], strict=True))
    assert step.counts == (12, 12, 12, 1)
    assert [r.plan.gemm for r in step.reports] == [g.gemm for g in STEP]
    assert step.makespan_s == pytest.approx(sum(r.plan.makespan_s * c for r, c in pairs))
    assert step.fill_s == pytest.approx(sum(r.plan.fill_s * c for r, c in pairs))
    assert step.bound_s == pytest.approx(sum(r.plan.bound_s * c for r, c in pairs))
    assert step.overlap_bound_s == pytest.approx(sum(r.overlap_bound_s * c for r, c in pairs))
    assert step.egress_bytes == sum(r.plan.egress_bytes * c for r, c in pairs)
    assert step.ingress_bytes == sum(r.plan.ingress_bytes * c for r, c in pairs)
    rates = [(r.egress_bytes_per_s, r.ingress_bytes_per_s) for r in step.reports]
    assert (step.peak_egress_bytes_per_s, step.peak_ingress_bytes_per_s) == tuple(
        max(each) for each in zip(*rates, strict=True)
    )
    assert step.blocks == sum(
        len(t.cut.m_cuts) * len(t.cut.n_cuts) * c for r, c in pairs for t in r.plan.tiles
    )


def test_both_gradients_of_a_linear_are_under_way_together() -> None:
    step = plan_step(TilePlanner(UNLIMITED), STEP, BF16, paper_rates(12), UNLIMITED)
    assert [each.places for each in step.submissions] == [(0,), (1, 2), (3,)]
    alone = [r.predicted_s for r in step.reports]
    forward, both, head = (each.seconds for each in step.submissions)
    assert (forward, head) == (alone[0], alone[3])
    assert max(alone[1:3]) < both < sum(alone[1:3])
    assert step.predicted_s == pytest.approx(12 * (forward + both) + head)
    assert step.apart_s == pytest.approx(12 * sum(alone[:3]) + alone[3])


def test_the_limit_of_a_step_is_the_one_of_most_of_its_time() -> None:
    devices = alike(down=1e6, up=1e6)
    deep, flat = reported(devices, gemm=Gemm(64, 64, 4096)), reported(devices, gemm=Gemm(512, 9, 1))
    assert (deep.bottleneck, flat.bottleneck) == (Bottleneck.DOWNLINK, Bottleneck.UPLINK)
    often = round(2 * deep.plan.makespan_s / flat.plan.makespan_s)
    assert StepReport((deep, flat), (1, 1)).bottleneck is Bottleneck.DOWNLINK
    assert StepReport((deep, flat), (1, often)).bottleneck is Bottleneck.UPLINK
