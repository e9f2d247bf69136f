"""Plans cover the GEMM exactly once, fit their devices, and depend on nothing but the numbers."""

from itertools import pairwise
from random import Random

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
    Residency,
    tile_download_bytes,
    tile_upload_bytes,
)
from cleave.planner.tiles.planner import TilePlanner
from cleave.protocol import limits
from tests.examples import examples
from tests.planner.checks import check_right, paper_rates

FP32 = ElementBytes(4, 4)
elements = st.sampled_from([FP32, ElementBytes(2, 2), ElementBytes(2, 4)])
small_gemms = st.builds(Gemm, *[st.integers(1, 12)] * 3)
rates = st.floats(1e3, 1e10)


@st.composite
def fleets(
    draw: st.DrawFn, most: int = 12, memory: tuple[int, int] = (2**20, 2**33)
) -> list[DeviceRates]:
    return [
        DeviceRates(
            device,
            draw(rates),
            draw(rates),
            draw(st.floats(1e6, 1e14)),
            draw(st.sampled_from([0.0, 1e-3, 0.2])),
            draw(st.integers(*memory)),
        )
        for device in draw(st.lists(st.integers(1, 10**6), min_size=1, max_size=most, unique=True))
    ]


def _fleet(devices: int, memory_bytes: int = 2**30) -> list[DeviceRates]:
    rng = np.random.default_rng(devices)
    return [
        DeviceRates(
            i + 1,
            float(rng.uniform(10e6, 100e6)),
            float(rng.uniform(5e6, 10e6)),
            float(rng.uniform(5e12, 7e12)),
            memory_bytes=memory_bytes,
        )
        for i in range(devices)
    ]


def _check_cut(cut: TileCut) -> None:
    sides = ((cut.tile.m, cut.m_cuts), (cut.tile.n, cut.n_cuts), (cut.tile.k, cut.k_cuts))
    for side, cuts in sides:
        assert Span(cuts[0].start, cuts[-1].stop) == side
        assert all(x.stop == y.start for x, y in pairwise(cuts))
        assert all(c.size > 0 for c in cuts)


def _check_covers(plan: Plan) -> None:
    """By counting, element by element."""
    gemm = plan.gemm
    times = np.zeros((gemm.m, gemm.n, gemm.k), np.int8)
    for planned in plan.tiles:
        t = planned.cut.tile
        times[t.m.start : t.m.stop, t.n.start : t.n.stop, t.k.start : t.k.stop] += 1
    assert (times == 1).all()


def _check_covers_large(plan: Plan) -> None:
    """Inside, without overlap, and of the right volume in sum."""
    gemm = plan.gemm
    boxes = np.array([[*p.cut.tile.m, *p.cut.tile.n, *p.cut.tile.k] for p in plan.tiles])
    assert (boxes[:, ::2] < boxes[:, 1::2]).all()
    assert (boxes[:, ::2] >= 0).all()
    assert (boxes[:, 1::2] <= [gemm.m, gemm.n, gemm.k]).all()
    assert sum(p.cut.tile.volume for p in plan.tiles) == gemm.volume
    starts, stops = boxes[:, None, ::2], boxes[None, :, 1::2]
    meets = (starts < stops).all(-1)
    assert (meets & meets.T).sum() == len(boxes)  # only with itself


def _check_tiles(plan: Plan, devices: list[DeviceRates], element: ElementBytes) -> None:
    memory = {d.device: d.memory_bytes for d in devices}
    for planned in plan.tiles:
        _check_cut(planned.cut)
        tile = planned.cut.tile
        assert planned.download_bytes == tile_download_bytes(tile, element)
        assert planned.upload_bytes == tile_upload_bytes(tile, plan.gemm, element)
        assert planned.download_bytes + planned.upload_bytes <= memory[planned.device]
        assert planned.time_s >= 0
    busy: dict[int, float] = {}
    for planned in plan.tiles:
        busy[planned.device] = busy.get(planned.device, 0.0) + planned.time_s
    assert plan.makespan_s == pytest.approx(max(busy.values()))


@settings(max_examples=examples(20))
@given(small_gemms, elements, fleets(most=8))
def test_a_plan_covers_every_multiplication_once(
    gemm: Gemm, element: ElementBytes, devices: list[DeviceRates]
) -> None:
    plan = TilePlanner().plan(gemm, element, devices)
    _check_covers(plan)
    _check_tiles(plan, devices, element)


@settings(max_examples=examples(20))
@given(small_gemms, elements, fleets(most=8, memory=(40, 2000)))
def test_tiles_fit_their_devices_however_small(
    gemm: Gemm, element: ElementBytes, devices: list[DeviceRates]
) -> None:
    plan = TilePlanner().plan(gemm, element, devices)
    _check_covers(plan)
    _check_tiles(plan, devices, element)


@settings(max_examples=examples(12))
@given(
    st.builds(Gemm, *[st.sampled_from([1, 2, 63, 512, 4097, 20_000])] * 3),
    elements,
    fleets(most=80, memory=(2**28, 2**33)),
)
def test_large_gemms(gemm: Gemm, element: ElementBytes, devices: list[DeviceRates]) -> None:
    plan = TilePlanner().plan(gemm, element, devices)
    if len(plan.tiles) <= 2000:
        _check_covers_large(plan)
    _check_tiles(plan, devices, element)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2, 7, 40, 41, 300])
@pytest.mark.parametrize(
    "gemm",
    [
        Gemm(2048, 5120, 5120),
        Gemm(1, 50272, 768),
        Gemm(50272, 1, 768),
        Gemm(1, 1, 100_000),
        Gemm(3, 2, 1),
        Gemm(5120, 5120, 131072),
    ],
    ids=str,
)
def test_fleets_of_every_size(gemm: Gemm, devices: int) -> None:
    fleet = _fleet(devices)
    plan = TilePlanner().plan(gemm, FP32, fleet)
    _check_covers_large(plan)
    _check_tiles(plan, fleet, FP32)


@settings(max_examples=examples(10))
@given(small_gemms, elements, fleets(most=6, memory=(40, 2**30)), st.randoms(use_true_random=False))
def test_the_order_of_devices_does_not_matter(
    gemm: Gemm, element: ElementBytes, devices: list[DeviceRates], random: Random
) -> None:
    shuffled = devices.copy()
    random.shuffle(shuffled)
    plan, other = (TilePlanner().plan(gemm, element, d) for d in (devices, shuffled))
    assert plan == other
    planner = TilePlanner()
    assert planner.plan(gemm, element, devices) == plan
    assert planner.plan(gemm, element, devices) == plan  # from its cache


@pytest.mark.parametrize("slower", [60.0, 360.0])
def test_a_straggler_whose_rates_change_changes_no_plan(slower: float) -> None:
    """Nothing is planned anew when a device that gets nothing turns out still slower."""
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


def test_more_devices_share_the_work() -> None:
    gemm = Gemm(2048, 5120, 5120)
    spans = [TilePlanner().plan(gemm, FP32, _fleet(d)).makespan_s for d in (1, 8, 64)]
    assert spans[0] > 2 * spans[1] > 4 * spans[2]


def test_faster_devices_get_more() -> None:
    slow = DeviceRates(1, 10e6, 5e6, 5e12)
    fast = DeviceRates(2, 20e6, 10e6, 10e12)
    plan = TilePlanner().plan(Gemm(4000, 4000, 4000), FP32, [slow, fast])
    volume = {p.device: p.cut.tile.volume for p in plan.tiles}
    assert volume[2] > 2 * volume[1]


def test_an_empty_fleet_has_no_plan() -> None:
    with pytest.raises(PlanError, match="empty"):
        TilePlanner().plan(Gemm(2, 2, 2), FP32, [])


@pytest.mark.parametrize("gemm", [Gemm(0, 2, 2), Gemm(2, 0, 2), Gemm(2, 2, 0)], ids=str)
def test_nothing_to_multiply_has_no_plan(gemm: Gemm) -> None:
    with pytest.raises(PlanError, match="nothing to multiply"):
        TilePlanner().plan(gemm, FP32, _fleet(2))


def test_a_device_without_memory_is_named() -> None:
    with pytest.raises(PlanError, match="device 7 offers 8 bytes"):
        TilePlanner().plan(Gemm(2, 2, 2), FP32, [DeviceRates(7, 1e6, 1e6, 1e9, 0, 8)])


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
    _check_covers_large(plan)


def test_what_is_held_is_left_where_a_fresh_plan_is_faster() -> None:
    gemm, devices = Gemm(16, 4000, 1000), _fleet(16)
    fresh = TilePlanner().plan(gemm, FP32, devices)
    assert TilePlanner().plan(gemm, FP32, devices, [_residency(gemm, devices)]) == fresh


# --- devices with little memory ---


def test_a_device_without_memory_is_left_idle() -> None:
    devices = [*_fleet(3), DeviceRates(9, 1e6, 1e6, 1e9, 0, 8)]
    plan = TilePlanner().plan(Gemm(64, 64, 64), FP32, devices)
    assert {p.device for p in plan.tiles} <= {1, 2, 3}
    _check_covers(plan)


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
        (Gemm(2048, 5120, 5120), 2**30),
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
@pytest.mark.parametrize("devices", [1, 5, 200])
@pytest.mark.parametrize("gemm", [Gemm(7, 5, 3), Gemm(640, 320, 5120), Gemm(500, 500, 90000)])
def test_a_part_is_planned_quickly_and_whole(gemm: Gemm, devices: int) -> None:
    fleet = paper_rates(devices)
    element = ElementBytes(2, 4)
    planner = TilePlanner()
    part = planner.plan_part(gemm, element, fleet)
    check_right(part, fleet)
    thorough = planner.plan(gemm, element, fleet)
    assert part.makespan_s <= 1.5 * thorough.makespan_s + 1e-3 * devices
