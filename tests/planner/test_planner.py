"""Plans are right and fast for any fleet and GEMM, and depend on nothing but the numbers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.errors import PlanError
from cleave.gemm import Gemm, Span, Tile, TileCut, cut_tile
from cleave.planner.plan import (
    DeviceRates,
    ElementBytes,
    Plan,
    PsRates,
    Residency,
    tile_download_bytes,
    tile_upload_bytes,
)
from cleave.planner.tiles.bound import isolated_bound_s, overlap_bound_s
from cleave.planner.tiles.planner import PlanMethod, TilePlanner
from cleave.planner.tiles.shape import RateArrays
from cleave.protocol import limits
from tests.examples import examples
from tests.planner.checks import BF16, FP32, check_right, paper_rates

UNLIMITED = PsRates()
CARD_BYTES_PER_S = 10e9 / 8
elements = st.sampled_from([FP32, BF16, ElementBytes(2, 4)])
small_gemms = st.builds(Gemm, *[st.integers(1, 12)] * 3)
gemms = st.builds(Gemm, *[st.one_of(st.integers(1, 3000), st.sampled_from([4097, 20_000]))] * 3)
shares = st.floats(0.0, 3.0).map(lambda power: 10**power)  # within three orders of magnitude
few = settings(max_examples=examples(30))


@st.composite
def fleets(
    draw: st.DrawFn, most: int = 40, memory: tuple[float, float] = (2**20, 2**30)
) -> list[DeviceRates]:
    return [
        DeviceRates(
            device,
            1e5 * draw(shares),
            1e5 * draw(shares),
            1e9 * draw(shares),
            draw(st.sampled_from([0.0, 0.0, 0.005, 0.1])),
            int(draw(st.floats(*memory))),
        )
        for device in draw(st.lists(st.integers(1, 10**6), min_size=1, max_size=most, unique=True))
    ]


def _fleet(devices: int) -> list[DeviceRates]:
    return [replace(rates, device=rates.device + 1) for rates in paper_rates(devices)]


def _check_cut(cut: TileCut) -> None:
    sides = ((cut.tile.m, cut.m_cuts), (cut.tile.n, cut.n_cuts), (cut.tile.k, cut.k_cuts))
    for side, cuts in sides:
        assert Span(cuts[0].start, cuts[-1].stop) == side
        assert all(x.stop == y.start for x, y in pairwise(cuts))
        assert all(c.size > 0 for c in cuts)


def _check_tiles(plan: Plan, devices: list[DeviceRates], element: ElementBytes) -> None:
    check_right(plan, devices)
    busy: dict[int, float] = {}
    for planned in plan.tiles:
        _check_cut(planned.cut)
        tile = planned.tile
        assert planned.download_bytes == tile_download_bytes(tile, element)
        assert planned.upload_bytes == tile_upload_bytes(tile, plan.gemm, element)
        busy[planned.device] = busy.get(planned.device, 0.0) + planned.time_s
    assert plan.makespan_s == pytest.approx(max(busy.values()))


@settings(max_examples=examples(20))
@given(small_gemms, elements, fleets(most=8, memory=(40, 2000)))
def test_a_plan_covers_every_multiplication_once_however_little_memory_there_is(
    gemm: Gemm, element: ElementBytes, devices: list[DeviceRates]
) -> None:
    planner = TilePlanner()
    plan = planner.plan(gemm, element, devices)
    for order in (devices[::-1], devices):  # the second plan is from the cache
        assert planner.plan(gemm, element, order) == plan
    assert TilePlanner().plan(gemm, element, devices[::-1]) == plan
    times = np.zeros((gemm.m, gemm.n, gemm.k), np.int8)
    for planned in plan.tiles:
        t = planned.tile
        times[t.m.start : t.m.stop, t.n.start : t.n.stop, t.k.start : t.k.stop] += 1
    assert (times == 1).all()
    _check_tiles(plan, devices, element)


@few
@given(gemms, elements, fleets(), st.sampled_from(PlanMethod))
def test_plans_are_right_and_take_at_least_their_bounds(
    gemm: Gemm, element: ElementBytes, fleet: list[DeviceRates], method: PlanMethod
) -> None:
    plan = TilePlanner(UNLIMITED, method).plan(gemm, element, fleet)
    if len(plan.tiles) <= 2000:
        _check_tiles(plan, fleet, element)
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
@given(gemms, elements, fleets(memory=(2**38, 2**39)))
def test_the_published_method_never_cuts_the_depth(
    gemm: Gemm, element: ElementBytes, fleet: list[DeviceRates]
) -> None:
    plan = TilePlanner(UNLIMITED, PlanMethod.TWO_D).plan(gemm, element, fleet)
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
def test_more_devices_behind_a_card_never_slow_it_down() -> None:
    fleet, gemm = paper_rates(512), Gemm(4096, 4096, 4096)
    planner = TilePlanner(PsRates(CARD_BYTES_PER_S, CARD_BYTES_PER_S))
    spans_s = [planner.plan(gemm, BF16, fleet[:size]).makespan_s for size in (8, 32, 64, 128, 512)]
    assert all(later <= 1.02 * earlier for earlier, later in pairwise(spans_s))


@pytest.mark.parametrize("slower", [60.0, 360.0])
def test_a_straggler_whose_rates_change_changes_no_plan(slower: float) -> None:
    """An idle device that becomes even slower leaves the plan unchanged."""
    gemm, good = Gemm(2048, 768, 768), _fleet(3)
    planner = TilePlanner()
    without = planner.plan(gemm, FP32, good)
    for factor in (slower, 2 * slower):
        rates = [DeviceRates(9, 10e6 / factor, 5e6 / factor, 5e12 / factor)]
        plan = planner.plan(gemm, FP32, good + rates)
        assert plan.tiles == without.tiles


def test_slow_devices_are_used_where_together_they_matter() -> None:
    slow = [DeviceRates(i, 10e6, 5e6, 5e12) for i in range(10, 40)]
    fast = [DeviceRates(i, 30e6, 15e6, 15e12) for i in range(3)]
    plan = TilePlanner().plan(Gemm(8192, 4096, 4096), FP32, slow + fast)
    assert {tile.device for tile in plan.tiles} == {d.device for d in slow + fast}


@pytest.mark.parametrize(
    ("gemm", "devices", "message"),
    [
        (Gemm(2, 2, 2), [], "empty"),
        (Gemm(2, 0, 2), _fleet(2), "nothing to multiply"),
        (Gemm(2, 2, 2), [DeviceRates(7, 1e6, 1e6, 1e9, 0, 8)], "device 7 offers 8 bytes"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    gemm: Gemm, devices: list[DeviceRates], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        TilePlanner().plan(gemm, FP32, devices)


# --- what devices hold ---


def _residency(gemm: Gemm, devices: list[DeviceRates]) -> Residency:
    """Every device holds its share of A's rows and nothing of B."""
    step = gemm.m // len(devices)
    tiles, held = {}, {}
    for i, device in enumerate(devices):
        tile = Tile(Span(i * step, (i + 1) * step), Span(0, gemm.n), Span(0, gemm.k))
        tiles[device.device] = cut_tile(tile, 2, 2)
        held[device.device] = step * gemm.k * 4
    return Residency(tiles, held)


def test_what_is_held_already_is_not_sent_again() -> None:
    gemm, devices = Gemm(4000, 4, 1000), _fleet(2)
    residency = _residency(gemm, devices)
    fresh = TilePlanner().plan(gemm, FP32, devices)
    plan = TilePlanner().plan(gemm, FP32, devices, [residency])
    assert {p.device: p.cut for p in plan.tiles} == residency.tiles
    assert plan.makespan_s < fresh.makespan_s / 10
    assert sum(p.download_bytes for p in plan.tiles) == 2 * 4 * 1000 * 4
    check_right(plan, devices)


def test_what_is_held_is_left_where_a_fresh_plan_is_faster() -> None:
    gemm, devices = Gemm(16, 4000, 1000), _fleet(16)
    fresh = TilePlanner().plan(gemm, FP32, devices)
    assert TilePlanner().plan(gemm, FP32, devices, [_residency(gemm, devices)]) == fresh


# --- devices with little memory ---


def test_a_device_with_little_memory_does_not_hold_up_the_others() -> None:
    good = [DeviceRates(i, 1e6, 1e6, 1e9) for i in (1, 2)]
    little = DeviceRates(3, 1e6, 1e6, 1e9, 0, 400)
    gemm = Gemm(64, 64, 64)
    alone = TilePlanner().plan(gemm, FP32, good)
    together = TilePlanner().plan(gemm, FP32, [*good, little])
    assert together.makespan_s <= 1.1 * alone.makespan_s


def _largest_message(plan: Plan, element: ElementBytes) -> int:
    sizes = []
    for planned in plan.tiles:
        cut = planned.cut
        m, n = (max(c.size for c in cuts) for cuts in (cut.m_cuts, cut.n_cuts))
        each = element.partial if cut.tile.is_partial(plan.gemm) else element.finished
        sizes += [max(m, n) * cut.tile.k.size * element.sent, m * n * each]
    return max(sizes)


@pytest.mark.parametrize(
    ("gemm", "memory_bytes"),
    [
        (Gemm(2048, 50272, 5120), 2**33),
        (Gemm(20480, 5120, 131072), 2**34),
        (Gemm(100, 5000, 2**20), 2**36),
    ],
    ids=str,
)
def test_strips_and_blocks_fit_into_messages(gemm: Gemm, memory_bytes: int) -> None:
    device = DeviceRates(1, 5e9, 5e9, 1e12, 0, memory_bytes)
    plan = TilePlanner().plan(gemm, FP32, [device])
    assert _largest_message(plan, FP32) < limits.MAX_MESSAGE_BYTES - 1024


def test_plans_from_what_is_held_fit_their_devices() -> None:
    """X (2x16) is held; the whole of W (16x64, 4096 bytes) in one strip does not fit."""
    device = DeviceRates(1, 1e6, 1e6, 1e9, 0, 3000)
    gemm = Gemm(2, 64, 16)
    whole = Tile(Span(0, 2), Span(0, 64), Span(0, 16))
    cut = TileCut(whole, (whole.m,), (whole.n,), (whole.k,))
    plan = TilePlanner().plan(gemm, FP32, [device], [Residency({1: cut}, {1: 128})])
    for planned in plan.tiles:
        strips = planned.cut
        block = max(c.size for c in strips.m_cuts) * max(c.size for c in strips.n_cuts) * 4
        pair = sum(max(c.size for c in cuts) * 16 * 4 for cuts in (strips.m_cuts, strips.n_cuts))
        assert pair + block <= device.memory_bytes


@pytest.mark.slow
@pytest.mark.parametrize("devices", [5, pytest.param(64, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("gemm", [Gemm(7, 5, 3), Gemm(640, 320, 5120), Gemm(500, 500, 90000)])
def test_a_part_is_planned_quickly_and_whole(gemm: Gemm, devices: int) -> None:
    fleet = paper_rates(devices)
    element = ElementBytes(2, 4)
    planner = TilePlanner()
    part = planner.plan_part(gemm, element, fleet)
    check_right(part, fleet)
    thorough = planner.plan(gemm, element, fleet)
    assert part.makespan_s <= 1.5 * thorough.makespan_s + 1e-3 * devices
