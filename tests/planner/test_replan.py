"""A device that leaves or joins moves the tiles of one slab; the plan stays right and fast."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.gemm import Gemm
from cleave.planner.plan import DeviceRates, Plan, PlannedTile, PsRates
from cleave.planner.tiles.planner import TilePlanner
from cleave.planner.tiles.replan import CachedPlan, PlanCache
from tests.examples import examples
from tests.planner.checks import BF16, check_right, paper_rates

FLAT = Gemm(4096, 4096, 4096)
WORTH_KEEPING = 1.15  # how much longer a changed plan may take
BARELY_USABLE = 3.0  # and that of the moment, until the GEMM comes up again


def planned(planner: TilePlanner, devices: list[DeviceRates], gemm: Gemm = FLAT) -> Plan:
    plan = planner.plan(gemm, BF16, devices)
    check_right(plan, devices)
    return plan


def without(devices: list[DeviceRates], *gone: int) -> list[DeviceRates]:
    return [d for d in devices if d.device not in gone]


def slab(plan: Plan, tile: PlannedTile) -> set[PlannedTile]:
    """The tiles that share a slab with this one."""
    cut_n = plan.columns_cut_n
    mine = (tile.tile.n if cut_n else tile.tile.m, tile.tile.k)
    return {t for t in plan.tiles if (t.tile.n if cut_n else t.tile.m, t.tile.k) == mine}


def of_device(plan: Plan, device: int) -> PlannedTile:
    return next(t for t in plan.tiles if t.device == device)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [64])
def test_only_the_slab_of_the_device_that_left_is_dealt_anew(devices: int) -> None:
    planner, fleet = TilePlanner(PsRates()), paper_rates(devices)
    before = planned(planner, fleet)
    left = range(0, devices, 9)
    anew = 0
    for gone in left:
        planner = TilePlanner(PsRates())
        planner.plan(FLAT, BF16, fleet)
        rest = without(fleet, gone)
        after = planned(planner, rest)
        if after == TilePlanner(PsRates()).plan(FLAT, BF16, rest):
            anew += 1  # the slab alone would have taken too long
            continue
        moved = slab(before, of_device(before, gone))
        assert len(moved) <= devices / 4
        assert set(before.tiles) - moved <= set(after.tiles)
        assert {t.device for t in after.tiles} == set(range(devices)) - {gone}
    assert anew <= len(left) / 4


@pytest.mark.parametrize("devices", [64, 128])
def test_a_device_that_joins_shares_the_slab_that_takes_longest(devices: int) -> None:
    planner, fleet = TilePlanner(PsRates()), paper_rates(devices)
    before = planned(planner, fleet)
    new = DeviceRates(1000, 5e7, 8e6, 6e12)
    after = planned(planner, [*fleet, new])
    moved = slab(before, max(before.tiles, key=lambda t: t.time_s))
    assert set(before.tiles) - moved <= set(after.tiles)
    assert len({t.device for t in after.tiles}) == devices + 1
    assert {t.device for t in slab(after, of_device(after, 1000))} == {
        1000,
        *(t.device for t in moved),
    }
    assert after.makespan_s <= before.makespan_s * (1 + 1e-9)
    assert after.bound_s < before.bound_s  # more devices could be faster


def test_one_leaves_as_another_joins() -> None:
    planner, fleet = TilePlanner(PsRates()), paper_rates(64)
    before = planned(planner, fleet)
    after = planned(planner, [*without(fleet, 5), DeviceRates(1000, 5e7, 8e6, 6e12)])
    assert {t.device for t in after.tiles} == {*range(64), 1000} - {5}
    assert len(set(before.tiles) & set(after.tiles)) >= 32
    assert after.makespan_s <= BARELY_USABLE * before.makespan_s


def test_two_devices_of_a_slab_leave_at_once() -> None:
    planner, fleet = TilePlanner(PsRates()), paper_rates(64)
    before = planned(planner, fleet)
    gone = {t.device for t in sorted(slab(before, before.tiles[0]))[:2]}
    after = planned(planner, without(fleet, *gone))
    assert {t.device for t in after.tiles} == set(range(64)) - gone


def test_losses_in_a_row() -> None:
    planner, fleet = TilePlanner(PsRates()), paper_rates(64)
    plan = first = planned(planner, fleet)
    kept = 0
    for gone in (3, 60, 17, 18, 44, 9, 31, 0, 50, 25):
        fleet = without(fleet, gone)
        after = planned(planner, fleet)
        assert {t.device for t in after.tiles} <= {d.device for d in fleet}
        kept += len(set(after.tiles) & set(plan.tiles)) >= 0.7 * len(plan.tiles)
        plan = after
    assert kept >= 4  # a new plan was better for the others
    plan = planned(planner, fleet)
    fresh = TilePlanner(PsRates()).plan(FLAT, BF16, fleet)
    assert plan.makespan_s <= WORTH_KEEPING * max(first.makespan_s, fresh.makespan_s)


def test_a_device_that_had_no_tile_leaves() -> None:
    gemm, fleet = Gemm(10, 12, 5000), paper_rates(64)
    planner = TilePlanner(PsRates())
    before = planned(planner, fleet, gemm)
    idle = {d.device for d in fleet} - {t.device for t in before.tiles}
    assert idle
    after = planned(planner, without(fleet, min(idle)), gemm)
    assert after.tiles == before.tiles
    assert after.makespan_s == before.makespan_s


FLEET = paper_rates(64)


@pytest.mark.parametrize(
    ("ps", "changed"),
    [
        pytest.param(PsRates(), without(FLEET, *range(5)), id="many leave"),
        pytest.param(PsRates(), [*FLEET[:-1], DeviceRates(63, 1e7, 1e6, 1e12)], id="other rates"),
        pytest.param(PsRates(1e8, 1e8), without(FLEET, 1), id="behind a card"),
    ],
)
def test_other_changes_are_planned_anew(ps: PsRates, changed: list[DeviceRates]) -> None:
    planner = TilePlanner(ps)
    planned(planner, FLEET)
    assert planned(planner, changed) == TilePlanner(ps).plan(FLAT, BF16, changed)


def test_a_share_that_was_cut_to_fit_its_device_is_not_dealt_twice() -> None:
    """`check_right` finds what is multiplied twice."""
    fleet = paper_rates(40)
    small = DeviceRates(
        16, fleet[16].downlink_bytes_per_s, fleet[16].uplink_bytes_per_s, 6e12, 0.0, 2**21
    )
    devices = [d if d.device != 16 else small for d in fleet]
    gemm = Gemm(3000, 3000, 3000)
    for gone in (2, 15):
        planner = TilePlanner(PsRates())
        planned(planner, devices, gemm)
        planned(planner, without(devices, gone), gemm)


def test_a_newcomer_without_memory_stays_idle() -> None:
    planner, fleet = TilePlanner(PsRates()), paper_rates(40)
    planned(planner, fleet)
    after = planned(planner, [*fleet, DeviceRates(99, 5e7, 1e7, 1e12, 0.0, 8)])
    assert 99 not in {t.device for t in after.tiles}


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


@pytest.mark.slow
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
