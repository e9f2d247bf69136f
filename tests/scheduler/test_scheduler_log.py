"""What happened to a device, a job and a run is told, without their payloads."""

from __future__ import annotations

import weakref

import pytest

from cleave.gemm import Span
from cleave.planner.plan import DeviceRates
from cleave.scheduler import events
from cleave.scheduler.instructions import Place, SendArray, SendCancel, SendRun
from cleave.scheduler.scheduler_log import SchedulerLog
from cleave.scheduler.tiles.scheduler import Scheduler
from cleave.scheduler.tiles.tasks import ArrayRef, Task

ARRAY = ArrayRef(3, 1, Span(0, 4), Span(0, 4), 64)
TASK = Task(7, (ARRAY,), 128, 64, None)


@pytest.fixture
def log() -> SchedulerLog:
    made = SchedulerLog()
    rates = DeviceRates(1, 1e6, 1e6, 1e9)
    made.add(1.0, events.DeviceReady(rates), [SendArray(1, ARRAY), SendRun(1, 5, TASK)])
    made.add(2.0, events.ResultArrived(1, 5, b"x" * 64), [Place(TASK, b"x" * 64)])
    made.add(3.0, events.Tick(), [SendCancel(2, (6, 8))])
    return made


def test_the_logs_of_a_device_a_job_and_a_run(log: SchedulerLog) -> None:
    of_device = ["DeviceReady", "SendArray", "SendRun", "ResultArrived"]
    assert [line.split()[2] for line in log.lines(device=1)] == of_device
    assert [line.split()[2] for line in log.lines(job=7)] == ["SendRun", "Place"]
    assert [line.split()[2] for line in log.lines(run=5)] == ["SendRun", "ResultArrived"]
    assert log.lines(run=8) == ["3.000 s: SendCancel (device 2, runs (6, 8))"]
    assert len(log.lines()) == 7


def test_the_latest_event_is_kept_whole() -> None:
    log = SchedulerLog(length=2)
    log.add(0.0, events.Tick(), [])
    log.add(1.0, events.Tick(), [SendCancel(2, (run,)) for run in range(5)])
    assert len(log.lines()) == 6


def test_payloads_are_not_kept() -> None:
    class Payload:
        pass

    payload = Payload()
    gone = weakref.ref(payload)
    log = SchedulerLog()
    log.add(0.0, events.ResultArrived(1, 5, payload), [Place(TASK, payload)])
    del payload
    assert gone() is None


def test_wrong_books_are_told() -> None:
    scheduler = Scheduler()
    scheduler.handle(events.DeviceReady(DeviceRates(1, 1e6, 1e6, 1e9)), 0.0)
    scheduler.validate()
    assert scheduler.leftovers() == []
    scheduler._devices[1].occupied_bytes = 9
    with pytest.raises(AssertionError, match="device 1: 9 bytes are booked, and 0 are occupied"):
        scheduler.validate()
    assert scheduler.leftovers() == ["device 1 has 0 arrays and tasks left"]


def test_a_fault_is_in_the_story() -> None:
    scheduler = Scheduler()
    scheduler.handle(events.DeviceReady(DeviceRates(1, 1e6, 1e6, 1e9)), 0.0)
    with pytest.raises(AttributeError):
        scheduler.handle(events.Submitted(None), 1.0)  # type: ignore[arg-type]
    assert scheduler.log.lines()[-1].startswith("1.000 s: Submitted")
