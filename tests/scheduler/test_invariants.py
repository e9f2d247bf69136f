"""The checks of the scheduler's state find mistakes."""

from __future__ import annotations

from cleave.planner.plan import DeviceRates
from cleave.scheduler import events
from cleave.scheduler.tiles.scheduler import Scheduler
from tests.invariants import broken_invariants, leftovers_of


def test_wrong_books_are_told() -> None:
    scheduler = Scheduler()
    scheduler.handle(events.DeviceReady(DeviceRates(1, 1e6, 1e6, 1e9)), 0.0)
    assert broken_invariants(scheduler) == []
    assert leftovers_of(scheduler) == []
    scheduler._devices[1].occupied_bytes = 9
    assert broken_invariants(scheduler) == ["device 1: 9 bytes are booked, and 0 are occupied"]
    assert leftovers_of(scheduler) == ["device 1 has 0 arrays and tasks left"]
