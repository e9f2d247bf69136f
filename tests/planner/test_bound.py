"""No plan beats the bounds: held against every plan there is, for tiny GEMMs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.gemm import Gemm, Span, Tile, cut_tile, wavefront
from cleave.planner import plan as cost
from cleave.planner.plan import DeviceRates, ElementBytes, PsRates
from cleave.planner.tiles.bound import isolated_bound_s, overlap_bound_s
from cleave.planner.tiles.shape import (
    RateArrays,
    best_tile,
    fill_s,
    streamed_array_s,
    strips_per_side,
)
from tests.examples import examples
from tests.planner.checks import paper_rates

UNLIMITED = PsRates()
elements = st.sampled_from([ElementBytes(4, 4), ElementBytes(2, 2), ElementBytes(2, 4)])
devices = st.builds(
    DeviceRates,
    st.just(0),
    st.floats(1.0, 1e3),
    st.floats(1.0, 1e3),
    st.floats(1.0, 1e3),
    st.sampled_from([0.0, 0.01, 1.0]),
)
Box = tuple[int, int, int]


def _guillotine(box: Box, pieces: int) -> Iterator[list[Box]]:
    """Yield all ways to cut a box into `pieces` boxes by straight cuts."""
    if pieces == 1:
        yield [box]
        return
    for side, size in enumerate(box):
        for at in range(1, size):
            first, second = list(box), list(box)
            first[side], second[side] = at, size - at
            for left in range(1, pieces):
                for one in _guillotine((first[0], first[1], first[2]), left):
                    for other in _guillotine((second[0], second[1], second[2]), pieces - left):
                        yield one + other


def _parts_s(
    box: Box, gemm: Gemm, element: ElementBytes, d: DeviceRates
) -> tuple[float, float, float]:
    m, n, k = box
    returned = element.finished if k == gemm.k else element.partial
    return (
        (m + n) * k * element.sent / d.downlink_bytes_per_s,
        2 * m * n * k / d.flops_per_s,
        m * n * returned / d.uplink_bytes_per_s,
    )


@settings(max_examples=examples(40), deadline=None)
@given(
    st.builds(Gemm, *[st.integers(1, 3)] * 3), elements, st.lists(devices, min_size=1, max_size=3)
)
def test_no_plan_beats_the_bounds(
    gemm: Gemm, element: ElementBytes, fleet: list[DeviceRates]
) -> None:
    rates = RateArrays.of(fleet)
    isolated = isolated_bound_s(gemm, element, rates, UNLIMITED)
    overlap = overlap_bound_s(gemm, element, rates, UNLIMITED)
    assert overlap <= isolated * (1 + 1e-3)  # the isolated one allows for its search
    for pieces in range(1, 4):
        for boxes in _guillotine((gemm.m, gemm.n, gemm.k), pieces):
            for owners in product(range(len(fleet)), repeat=pieces):
                # With perfect overlap of links and computing, and latency paid once.
                ends = np.zeros(len(fleet))
                for box, owner in zip(boxes, owners, strict=True):
                    ends[owner] += max(_parts_s(box, gemm, element, fleet[owner]))
                for owner in set(owners):
                    ends[owner] += 2 * fleet[owner].latency_s
                assert ends.max() >= overlap * (1 - 1e-6)
                if len(set(owners)) == pieces:  # one tile each
                    took = max(
                        2 * fleet[owner].latency_s
                        + cost.streamed_s(*_parts_s(box, gemm, element, fleet[owner]))
                        for box, owner in zip(boxes, owners, strict=True)
                    )
                    assert took >= isolated * (1 - 1e-6)


@settings(max_examples=examples(60), deadline=None)
@given(st.builds(Gemm, *[st.integers(1, 40)] * 3), elements, devices, st.floats(1e-3, 1e3))
def test_the_best_tile_is_the_best_of_all_integer_tiles(
    gemm: Gemm, element: ElementBytes, device: DeviceRates, time_s: float
) -> None:
    best = best_tile(gemm, element, RateArrays.of([device]), time_s).volume[0]
    m, n, k = np.meshgrid(
        *(np.arange(1, side + 1) for side in (gemm.m, gemm.n, gemm.k)), indexing="ij"
    )
    returned = np.where(k == gemm.k, element.finished, element.partial)
    down = (m + n) * k * element.sent / device.downlink_bytes_per_s
    slower = np.maximum(
        2 * m * n * k / device.flops_per_s, m * n * returned / device.uplink_bytes_per_s
    )
    took = np.where(slower <= down / 2, down, slower + down**2 / (4 * slower))
    fits = took + 2 * device.latency_s <= time_s
    most = (m * n * k)[fits].max(initial=0)
    assert best >= most * (1 - 1e-6)


def test_the_published_estimates() -> None:
    """The table of the design, section 4, for one weight gradient of a known fleet."""
    rates = RateArrays.of([replace(d, latency_s=0.0) for d in paper_rates(1024)])
    gemm, bf16 = Gemm(5120, 5120, 131072), ElementBytes(2, 2)
    deep = isolated_bound_s(gemm, bf16, rates, UNLIMITED)
    flat = isolated_bound_s(gemm, bf16, rates, UNLIMITED, two_dimensional=True)
    assert flat > 1.8 * deep
    assert overlap_bound_s(gemm, bf16, rates, UNLIMITED) < deep


def test_only_a_slow_card_raises_the_bounds() -> None:
    fleet = [DeviceRates(i, 1e8, 1e7, 1e12) for i in range(64)]
    rates, gemm, fp32 = RateArrays.of(fleet), Gemm(4096, 4096, 4096), ElementBytes(4, 4)
    for ps in (PsRates(egress_bytes_per_s=1e7), PsRates(ingress_bytes_per_s=1e6)):
        for bound in (isolated_bound_s, overlap_bound_s):
            free = bound(gemm, fp32, rates, UNLIMITED)
            assert bound(gemm, fp32, rates, ps) > 2 * free
            assert bound(gemm, fp32, rates, PsRates(1e12, 1e12)) == pytest.approx(free)


seconds = st.floats(1e-3, 1e3)


def _streamed_by_hand(download_s: float, compute_s: float, upload_s: float, strips: int) -> float:
    """Strips come one after another; blocks are computed, then uploaded, one after another."""
    cut = cut_tile(Tile(Span(0, strips), Span(0, strips), Span(0, 1)), strips, strips)
    arrival: dict[tuple[str, Span], float] = {}
    clock = computed = uploaded = 0.0
    blocks = strips * strips
    for block in wavefront(cut):
        for name in (("a", block.m), ("b", block.n)):
            if name not in arrival:
                clock += download_s / (2 * strips)
                arrival[name] = clock
        ready = max(arrival["a", block.m], arrival["b", block.n])
        computed = max(computed, ready) + compute_s / blocks
        uploaded = max(uploaded, computed) + upload_s / blocks
    return uploaded


@given(seconds, seconds, st.booleans())
def test_the_formula_is_the_limit_of_many_strips(
    download_s: float, other_s: float, computes: bool
) -> None:
    rest = (other_s, 0.0) if computes else (0.0, other_s)
    formula = cost.streamed_s(download_s, *rest)
    assert _streamed_by_hand(download_s, *rest, 100) == pytest.approx(formula, rel=0.02)


@given(seconds, seconds, seconds, st.floats(1, 10))
def test_more_of_anything_takes_no_less(down: float, compute: float, up: float, by: float) -> None:
    base = cost.streamed_s(down, compute, up) * (1 - 1e-12)
    assert max(down, compute, up) * (1 - 1e-9) <= base <= down + max(compute, up)
    assert cost.streamed_s(down * by, compute, up) >= base
    assert cost.streamed_s(down, compute * by, up) >= base
    assert cost.streamed_s(down, compute, up * by) >= base


@pytest.mark.parametrize(("strips", "share"), [(4, 0.12), (8, 0.06), (16, 0.03)])
def test_fill_is_what_few_strips_add(strips: int, share: float) -> None:
    """The shares that the design states, and those of streaming by hand where X = download / 2."""
    assert fill_s(cost.streamed_s(1.0, 0.2, 0.5), strips) == pytest.approx(share, abs=0.003)
    by_hand = _streamed_by_hand(1.0, 0.0, 1.0, strips) / cost.streamed_s(1.0, 0.0, 1.0) - 1
    assert by_hand == pytest.approx(share, rel=0.35)


@given(seconds, seconds, seconds)
def test_many_tiles_are_timed_as_one_is(down: float, compute: float, up: float) -> None:
    slower = np.array([compute, up, max(compute, up)])
    many = streamed_array_s(np.full(3, down), slower)
    assert many == pytest.approx([cost.streamed_s(down, float(x), 0.0) for x in slower])


def test_a_tile_pays_the_latency_both_ways() -> None:
    device = DeviceRates(1, 100.0, 50.0, 1000.0, latency_s=0.25)
    assert cost.tile_s(device, 1000.0, 2000.0, 100.0) == pytest.approx(0.5 + 10.0)
    assert cost.tile_s(device, 0.0, 0.0, 100.0) == pytest.approx(0.5 + 2.0)


@given(st.floats(1e-3, 1e3), st.integers(1, 10_000))
def test_strips_per_side_minimise_fill_and_the_work_of_the_ps(time_s: float, tiles: int) -> None:
    def price(strips: int) -> float:
        return 0.48 * time_s / strips + tiles * cost.PS_BLOCK_S * strips**2

    chosen = int(strips_per_side(time_s, tiles))
    best = min(price(p) for p in range(1, cost.MAX_STRIPS + 1))
    assert price(chosen) <= 1.35 * best
