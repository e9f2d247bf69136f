"""Devices that come and go in virtual time, and runs that are the same again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave import arrays
from cleave.arrays import Buffer, DType
from cleave.fleet.fleet import Fleet
from cleave.fleet.product import GemmFuture, Side
from emulator.activity import Multiplication, Presence, TraceLog
from emulator.virtual import emulated
from profiles.availability import Availability, AvailabilityFamily, Durations
from profiles.fleet_device import FleetDevice
from profiles.fleets import find_fleet, paper_fleet, with_churn
from tests.emulator.fleets import virtual, watched
from tests.examples import examples

pytestmark = pytest.mark.slow

DEVICE = FleetDevice("test", 1e8, 1e5, 5e4, 0.05, 2**30)


def churning(session_s: float, gap_s: float, *, drains: bool = False) -> FleetDevice:
    stay = Availability(Durations(session_s), Durations(gap_s), drains=drains)
    return replace(DEVICE, availability=stay)


def submit(fleet: Fleet, m: int = 60, n: int = 50, k: int = 40) -> GemmFuture:
    rng = np.random.default_rng(m * n * k)
    a, b = (
        Side(fleet.operand(Buffer(rng.integers(-4, 5, s).astype(np.float32), DType.FP32)))
        for s in ((m, k), (k, n))
    )
    return fleet.submit(a, b, arrays.empty(m, n, DType.FP32))


def check(future: GemmFuture) -> None:
    a, b = future.a.operand.buffer.array, future.b.operand.buffer.array
    assert np.array_equal(future.result().array, a @ b)


# --- coming and going ---


@pytest.mark.nightly
@given(st.integers(0, 10**6), st.sampled_from([0.3, 1.0, 4.0]), st.booleans())
@settings(max_examples=examples(8))
def test_products_are_right_whoever_comes_and_goes(
    seed: int, session_s: float, drains: bool
) -> None:
    fleet = emulated([churning(session_s, 0.5, drains=drains)] * 6, seed=seed)
    futures = [submit(fleet, 60 + i) for i in range(4)]
    for future in futures:
        check(future)


def test_a_device_that_is_away_multiplies_nothing() -> None:
    fleet = emulated([churning(1.0, 0.5)] * 4)
    seen = watched(fleet)
    for _ in range(5):
        check(submit(fleet))
    gone = {p.device: p.at_s for p in seen if isinstance(p, Presence) and not p.here}
    begun = [m for m in seen if isinstance(m, Multiplication) and m.device in gone]
    assert begun
    assert all(m.begin_s <= gone[m.device] + DEVICE.latency_s for m in begun)


def test_hours_are_kept() -> None:
    """At 20 h nobody of a fleet that charges from 22 to 7 is there; the work waits two hours."""
    night = replace(DEVICE, availability=Availability(hours=(22.0, 7.0)))
    fleet = emulated([night] * 3, start_hour=20.0)
    assert fleet.device_count == 0
    check(submit(fleet))
    assert 7200 < virtual(fleet).now_s < 7300
    late = emulated([night] * 3, start_hour=23.0)
    assert late.device_count == 3


def test_who_drains_answers_what_it_was_given() -> None:
    fleet = emulated([churning(2.0, 1.0, drains=True)] * 5, seed=2)
    for _ in range(20):
        check(submit(fleet))
    # A newcomer may help with what runs; nothing is left undone by those who go.
    assert virtual(fleet).manager.scheduler.counters.reissued == 0
    assert virtual(fleet).now_s > 2.5
    assert virtual(fleet).manager.epoch > 10


def test_a_stay_shorter_than_a_hello_holds_nobody_up() -> None:
    """Weibull sessions are often that short; those who stay are there all the same."""
    brief = Availability(Durations(10.0, AvailabilityFamily.WEIBULL, 0.2), Durations(1e6))
    fleet = emulated([replace(DEVICE, availability=brief)] * 200 + [DEVICE])
    assert 1 <= fleet.device_count < 200
    assert virtual(fleet).now_s < 1
    check(submit(fleet))


# --- the same again ---


def believable(devices: int) -> list[FleetDevice]:
    """Home nights, with links that drift, jitter and lose."""
    return [
        replace(d, jitter_s=0.003, drift_sigma=0.4, drift_interval_s=1.0, loss=1e-5)
        for d in find_fleet("home-nights", devices=devices)
    ]


def event_log(devices: Sequence[FleetDevice], seed: int, churn: str = "") -> str:
    """Everything that happens in a few GEMMs."""
    lines: list[str] = []
    members = with_churn(devices, churn) if churn else list(devices)
    fleet = emulated(members, compute=False, seed=seed, start_hour=22.0)
    virtual(fleet).observers.append(TraceLog(lines.append))
    for size in (256, 400, 256):
        futures = [submit(fleet, size, size, size) for _ in range(2)]
        for future in futures:
            future.result()
        del future, futures
    fleet.close()
    return "".join(lines)


@pytest.mark.parametrize(
    ("devices", "churn"),
    [
        pytest.param(paper_fleet(70), "", id="paper", marks=pytest.mark.nightly),
        pytest.param(paper_fleet(16), "0.5:0.2", id="paper-churn"),
        pytest.param(believable(80), "", id="home-nights", marks=pytest.mark.nightly),
    ],
)
def test_runs_of_a_seed_leave_the_same_log_byte_for_byte(
    devices: list[FleetDevice], churn: str
) -> None:
    first = event_log(devices, 5, churn)
    assert len(first) > 5_000
    assert event_log(devices, 5, churn) == first
    if churn or devices[0].jitter_s:
        assert event_log(devices, 6, churn) != first
