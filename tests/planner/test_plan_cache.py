"""Fleets of equal rates share a plan, in which only the numbers of the devices differ."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.gemm import Gemm
from cleave.planner.plan import DeviceRates
from cleave.planner.tiles.plan_cache import CachedPlan, PlanCache
from cleave.planner.tiles.planner import TilePlanner
from tests.examples import examples
from tests.planner.checks import BF16, check_right, paper_rates

GEMM = Gemm(512, 768, 256)


def numbered(fleet: list[DeviceRates], numbers: list[int]) -> list[DeviceRates]:
    """Return the fleet with other numbers."""
    return [replace(device, device=n) for device, n in zip(fleet, numbers, strict=True)]


def kept(fleet: list[DeviceRates], *, provisional: bool = False) -> tuple[PlanCache, CachedPlan]:
    """Return a cache that keeps one plan."""
    cache = PlanCache()
    plan = TilePlanner().plan(GEMM, BF16, fleet)
    return cache, cache.keep(GEMM, BF16, fleet, CachedPlan(plan, provisional))


def test_a_device_that_comes_back_with_another_number_needs_no_other_plan() -> None:
    fleet = paper_rates(4)
    cache, _ = kept(fleet)
    back = [*fleet[:3], replace(fleet[3], device=168)]
    found = cache.find(GEMM, BF16, back)
    assert found is not None
    check_right(found.plan, back)
    assert found.plan == TilePlanner().plan(GEMM, BF16, back)


def test_other_rates_need_another_plan() -> None:
    fleet = paper_rates(4)
    cache, _ = kept(fleet)
    slower = replace(fleet[3], flops_per_s=fleet[3].flops_per_s / 2)
    assert cache.find(GEMM, BF16, [*fleet[:3], slower]) is None
    assert cache.find(GEMM, BF16, numbered(fleet, [0, 1, 3, 2])) is None
    assert cache.find(GEMM, BF16, fleet[:3]) is None
    assert cache.find(replace(GEMM, m=511), BF16, fleet) is None


def test_what_is_to_be_used_once_is_so_for_fleets_of_equal_rates() -> None:
    fleet = paper_rates(4)
    cache, first = kept(fleet, provisional=True)
    back = [*fleet[:3], replace(fleet[3], device=168)]
    for devices in (fleet, back):
        found = cache.find(GEMM, BF16, devices)
        assert found is not None
        assert found.provisional
    cache.keep(GEMM, BF16, back, CachedPlan(TilePlanner().plan(GEMM, BF16, back)))
    assert cache.find(GEMM, BF16, fleet) == first  # its own was not replaced
    found = cache.find(GEMM, BF16, [*fleet[:3], replace(fleet[3], device=169)])
    assert found is not None
    assert not found.provisional


def test_a_cleared_cache_finds_nothing() -> None:
    fleet = paper_rates(4)
    cache, _ = kept(fleet)
    cache.clear()
    assert cache.find(GEMM, BF16, fleet) is None


@settings(max_examples=examples(20))
@given(st.data())
def test_a_planner_makes_the_same_plan_whatever_it_planned_before(data: st.DataObject) -> None:
    fleet = paper_rates(data.draw(st.integers(1, 8)))
    distinct = st.lists(
        st.integers(0, 10**6), min_size=len(fleet), max_size=len(fleet), unique=True
    )
    planner = TilePlanner()
    for numbers in data.draw(st.lists(distinct, min_size=2, max_size=4)):
        devices = numbered(fleet, numbers)
        assert planner.plan(GEMM, BF16, devices) == TilePlanner().plan(GEMM, BF16, devices)
