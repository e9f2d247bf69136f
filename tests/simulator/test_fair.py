"""No baseline is handicapped: units, FLOPs counted once, times that schedules really have."""

from __future__ import annotations

import dataclasses
import math
from functools import cache

import pytest

from cleave.planner.plan import DeviceRates
from cleave.workload.registry import find_model
from simulator.cloud import Cloud
from simulator.method import Conditions, Outcome
from simulator.sweep import methods
from simulator.work import train_flops
from tests.simulator.conditions import paper

pytestmark = pytest.mark.slow

FLEET_METHODS = {n: m for n, m in methods().items() if not isinstance(m, Cloud)}
SPEC = find_model("opt-1.3b")
DEVICES = 12


@cache
def on(name: str, **changes: float) -> list[Outcome]:
    """A few paper devices, every rate multiplied as said, and the server with their compute."""
    devices = [
        dataclasses.replace(d, **{key: getattr(d, key) * f for key, f in changes.items()})
        for d in paper(DEVICES).devices
    ]
    conditions = Conditions(SPEC, 16, 256, devices)
    ps_flops_per_s = conditions.ps_flops_per_s * changes.get("flops_per_s", 1)
    return FLEET_METHODS[name].outcomes(
        dataclasses.replace(conditions, ps_flops_per_s=ps_flops_per_s)
    )


@pytest.mark.parametrize("name", FLEET_METHODS)
def test_nobody_is_faster_than_all_flops_on_all_devices(name: str) -> None:
    flops = train_flops(SPEC, 16, 256)
    total = sum(d.flops_per_s for d in paper(DEVICES).devices)
    for row in on(name):
        assert row.step_s >= flops / total * (1 - 1e-9)


# With endless memory, the search for stages has the most plans to compare.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly) if name == "cleave-stages" else name
        for name in FLEET_METHODS
    ],
)
def test_with_links_that_cost_nothing_work_is_counted_once(name: str) -> None:
    # Free links and endless memory leave compute: nobody may need more than every device taking
    # as long as the slowest, except for whole samples and layers, and a pipeline's fill.
    free = {"downlink_bytes_per_s": 1e9, "uplink_bytes_per_s": 1e9, "memory_bytes": 1000}
    best = min(row.step_s for row in on(name, **free))
    alone = train_flops(SPEC, 16, 256) / max(d.flops_per_s for d in paper(DEVICES).devices)
    assert best < alone


@pytest.mark.parametrize("name", FLEET_METHODS)
def test_links_are_in_bytes_and_times_in_seconds(name: str) -> None:
    # All rates twice as fast: half the time, exactly; so nothing is in other units.
    twice = {"downlink_bytes_per_s": 2, "uplink_bytes_per_s": 2, "flops_per_s": 2}
    for slow, fast in zip(on(name), on(name, **twice), strict=True):
        assert fast.step_s == pytest.approx(slow.step_s / 2, rel=0.02)
        assert fast.fits == slow.fits


@pytest.mark.parametrize("name", FLEET_METHODS)
def test_bytes_fit_through_links_in_the_time(name: str) -> None:
    up = max(d.uplink_bytes_per_s for d in paper(DEVICES).devices)
    for row in on(name):
        assert row.upload_bytes / up <= row.step_s * (1 + 1e-9) < math.inf
        assert row.fits == (row.memory_needed_bytes <= row.memory_offered_bytes)
        assert 1 <= row.devices_used <= DEVICES


@pytest.mark.parametrize("name", FLEET_METHODS)
def test_memory_never_changes_what_is_faster_without_it(name: str) -> None:
    # Endless memory: everything fits, and nothing takes longer than on what did not.
    rows = on(name, memory_bytes=10_000)
    assert all(row.fits for row in rows)
    for small, large in zip(on(name), rows, strict=True):
        assert large.step_s <= small.step_s * 1.02 or small.fits is False


def test_one_device_is_the_same_for_all_pipelines() -> None:
    # A single device with endless memory: no links between peers are left, only arithmetic.
    device = [DeviceRates(0, 1e8, 1e7, 6e12, 0.0, 10**13)]
    conditions = Conditions(SPEC, 16, 256, device)
    alone = train_flops(SPEC, 16, 256) / 6e12
    for name in ("dtfm", "alpa", "asteroid", "confidant", "data-parallel"):
        for row in FLEET_METHODS[name].outcomes(conditions):
            assert row.step_s == pytest.approx(alone, rel=1e-6), row.method


def test_alpa_shards_more_where_memory_is_short() -> None:
    # By hand: 13e9 parameters x 16 bytes on 1024 devices of 1 GB and more are 0.2 GB each.
    (row,) = FLEET_METHODS["alpa"].outcomes(paper(1024))
    assert row.fits
    assert row.memory_needed_bytes < 3e9


def test_data_parallel_leaves_out_who_has_no_room() -> None:
    # The two with the fastest links hold nothing; the others hold the model and are chosen.
    small = [DeviceRates(i, 1e9, 1e9, 6e12, 0.0, 10**6) for i in range(2)]
    roomy = [DeviceRates(i, 1e8, 1e7, 6e12, 0.0, 10**12) for i in range(2, 6)]
    conditions = Conditions(SPEC, 16, 256, small + roomy)
    (row,) = FLEET_METHODS["data-parallel"].outcomes(conditions)
    assert row.fits
    assert row.devices_used <= 4
