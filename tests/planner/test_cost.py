"""The wavefront-streaming cost model against a tile that is streamed strip by strip."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.gemm import Span, Tile, cut_tile, wavefront
from cleave.planner.plan import DeviceRates
from cleave.planner.tiles import cost
from cleave.planner.tiles.shape import fill_s, streamed_array_s, strips_per_side

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


@given(seconds, seconds)
def test_the_formula_is_the_limit_of_many_strips(download_s: float, upload_s: float) -> None:
    formula = cost.streamed_s(download_s, 0.0, upload_s)
    assert _streamed_by_hand(download_s, 0.0, upload_s, 100) == pytest.approx(formula, rel=0.02)


@given(seconds, seconds)
def test_computing_follows_the_same_curve(download_s: float, compute_s: float) -> None:
    formula = cost.streamed_s(download_s, compute_s, 0.0)
    assert _streamed_by_hand(download_s, compute_s, 0.0, 100) == pytest.approx(formula, rel=0.02)


@given(seconds, seconds, seconds)
def test_between_perfect_overlap_and_none(down: float, compute: float, up: float) -> None:
    streamed = cost.streamed_s(down, compute, up)
    assert max(down, compute, up) <= streamed <= down + max(compute, up)


@given(seconds, seconds, seconds, st.floats(1, 10))
def test_more_of_anything_takes_no_less(down: float, compute: float, up: float, by: float) -> None:
    base = cost.streamed_s(down, compute, up) * (1 - 1e-12)
    assert cost.streamed_s(down * by, compute, up) >= base
    assert cost.streamed_s(down, compute * by, up) >= base
    assert cost.streamed_s(down, compute, up * by) >= base


@given(seconds)
def test_the_two_branches_meet(download_s: float) -> None:
    at = cost.streamed_s(download_s, 0, download_s / 2)
    beyond = cost.streamed_s(download_s, 0, download_s / 2 * (1 + 1e-9))
    assert at == download_s
    assert beyond == pytest.approx(at)


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


def test_nothing_to_do_takes_no_time() -> None:
    assert cost.streamed_s(0.0, 0.0, 0.0) == 0.0


def test_a_tile_pays_the_latency_both_ways() -> None:
    device = DeviceRates(1, 100.0, 50.0, 1000.0, latency_s=0.25)
    assert cost.tile_s(device, 1000.0, 2000.0, 100.0) == pytest.approx(0.5 + 10.0)
    assert cost.tile_s(device, 0.0, 0.0, 100.0) == pytest.approx(0.5 + 2.0)


@given(st.floats(1e-6, 1e6), st.integers(0, 100_000))
def test_strips_per_side_stay_in_bounds(tile_time_s: float, tiles: int) -> None:
    assert 1 <= strips_per_side(tile_time_s, tiles) <= cost.MAX_STRIPS


@given(st.floats(1e-3, 1e3), st.integers(1, 10_000))
def test_strips_per_side_minimise_fill_and_the_work_of_the_ps(time_s: float, tiles: int) -> None:
    def price(strips: int) -> float:
        return 0.48 * time_s / strips + tiles * cost.PS_BLOCK_S * strips**2

    chosen = int(strips_per_side(time_s, tiles))
    best = min(price(p) for p in range(1, cost.MAX_STRIPS + 1))
    assert price(chosen) <= 1.35 * best
