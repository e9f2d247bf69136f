"""Whatever the fleet and the GEMM: plans are right, and no faster than their bounds allow."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.gemm import Gemm
from cleave.planner.plan import DeviceRates, ElementBytes, PsRates
from cleave.planner.tiles.bound import isolated_bound_s, overlap_bound_s
from cleave.planner.tiles.planner import PlanMethod, TilePlanner
from cleave.planner.tiles.shape import RateArrays
from tests.examples import examples
from tests.planner.checks import BF16, FP32, check_right, paper_rates

UNLIMITED = PsRates()
CARD_BYTES_PER_S = 10e9 / 8
gemms = st.builds(Gemm, *[st.integers(1, 3000)] * 3)
elements = st.sampled_from([BF16, FP32, ElementBytes(2, 4)])
shares = st.floats(0.0, 3.0).map(lambda power: 10**power)  # within three orders of magnitude
few = settings(max_examples=examples(30))


@st.composite
def fleets(draw: st.DrawFn, most: int = 40) -> list[DeviceRates]:
    """Of one to `most` devices."""
    latency_s = st.sampled_from([0.0, 0.0, 0.005, 0.1])
    return [
        DeviceRates(
            device,
            1e5 * draw(shares),
            1e5 * draw(shares),
            1e9 * draw(shares),
            draw(latency_s),
            int(2**20 * draw(shares)),
        )
        for device in range(draw(st.integers(1, most)))
    ]


@few
@given(gemms, elements, fleets(), st.sampled_from(PlanMethod))
def test_plans_are_right(
    gemm: Gemm, element: ElementBytes, fleet: list[DeviceRates], method: PlanMethod
) -> None:
    check_right(TilePlanner(UNLIMITED, method).plan(gemm, element, fleet), fleet)


@few
@given(gemms, elements, fleets(), st.sampled_from(PlanMethod))
def test_plans_take_at_least_their_bounds(
    gemm: Gemm, element: ElementBytes, fleet: list[DeviceRates], method: PlanMethod
) -> None:
    plan = TilePlanner(UNLIMITED, method).plan(gemm, element, fleet)
    rates = RateArrays.of(fleet)
    overlap_s = overlap_bound_s(gemm, element, rates, UNLIMITED)
    assert plan.makespan_s >= overlap_s * (1 - 1e-6)
    isolated_s = isolated_bound_s(
        gemm, element, rates, UNLIMITED, two_dimensional=method is PlanMethod.TWO_D
    )
    assert plan.bound_s == pytest.approx(isolated_s)
    if len(plan.tiles) == plan.devices_used:
        assert plan.makespan_s >= isolated_s * (1 - 1e-6)


@few
@given(gemms, elements, fleets())
def test_the_published_method_never_cuts_the_depth(
    gemm: Gemm, element: ElementBytes, fleet: list[DeviceRates]
) -> None:
    roomy = [replace(d, memory_bytes=2**30) for d in fleet]  # where all fits, nothing is cut again
    plan = TilePlanner(UNLIMITED, PlanMethod.TWO_D).plan(gemm, element, roomy)
    assert all(t.tile.k == (0, gemm.k) for t in plan.tiles)
    assert all(r.slabs == 1 for r in plan.regions)


@settings(max_examples=examples(12))
@given(gemms, elements, fleets(), shares, shares)
def test_no_more_passes_the_card_than_it_can_carry(
    gemm: Gemm, element: ElementBytes, fleet: list[DeviceRates], out: float, back: float
) -> None:
    ps = PsRates(egress_bytes_per_s=1e5 * out, ingress_bytes_per_s=1e5 * back)
    plan = TilePlanner(ps).plan(gemm, element, fleet)
    check_right(plan, fleet)
    assert plan.egress_bytes <= 1.01 * ps.egress_bytes_per_s * plan.makespan_s
    assert plan.ingress_bytes <= 1.01 * ps.ingress_bytes_per_s * plan.makespan_s


@pytest.mark.slow
@pytest.mark.parametrize(
    "gemm", [Gemm(4096, 4096, 4096), Gemm(2048, 8192, 2048)], ids=["cube", "wide"]
)
def test_more_devices_behind_a_card_never_slow_it_down(gemm: Gemm) -> None:
    fleet = paper_rates(512)
    planner = TilePlanner(PsRates(CARD_BYTES_PER_S, CARD_BYTES_PER_S))
    spans_s = [planner.plan(gemm, BF16, fleet[:size]).makespan_s for size in (8, 32, 64, 128, 512)]
    assert all(later <= 1.02 * earlier for earlier, later in pairwise(spans_s))
