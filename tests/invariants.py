"""Checks of the state of a session manager and its scheduler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from cleave.protocol import limits
from cleave.scheduler.sessions.session_manager import SessionManager
from cleave.scheduler.stages.work import StageOrder
from cleave.scheduler.tiles.load import DeviceLoad
from cleave.scheduler.tiles.scheduler import Scheduler
from cleave.scheduler.tiles.tasks import Task


def check_state(manager: SessionManager) -> None:
    """Raise AssertionError if the states of a session manager and its scheduler disagree."""
    scheduler = manager.scheduler
    broken = broken_invariants(scheduler)
    assert not broken, "; ".join(broken)
    for session in manager.sessions.values():
        running = scheduler.runs_of(session.id)
        tasks = {run for run, u in session.expected.items() if not isinstance(u.detail, StageOrder)}
        unknown = sorted(tasks - running)
        assert not unknown, f"{session.name} is expected to answer {unknown}, which do not run"


def broken_invariants(scheduler: Scheduler) -> list[str]:
    """Return descriptions of the inconsistencies in the scheduler's state."""
    devices, copies, holders = (
        scheduler._devices,
        scheduler._copies,
        scheduler.device_memory._holders,
    )
    found = []
    for id, device in devices.items():
        found += [f"device {id}: {problem}" for problem in _of_device(device)]
        found += [
            f"device {id} holds or needs array {array}, and is not among its holders"
            for array in {*device.held, *device.needed}
            if id not in holders.get(array, ())
        ]
    given: dict[Task, list[int]] = {}
    for id, device in devices.items():
        for task in device.unanswered():
            given.setdefault(task, []).append(id)
    for task, owners in given.items():
        if len(owners) > 1 and set(owners) != copies.get(task):
            found.append(f"a task of job {task.job} is with devices {owners}, and no copy")
    for task, owners_said in copies.items():
        if set(given.get(task, ())) != owners_said or len(owners_said) < 2:
            found.append(
                f"a task of job {task.job} is said to be with {sorted(owners_said)} "
                f"and is with {given.get(task, [])}"
            )
    for task in (*scheduler._orphans, *scheduler._held):
        if task in given:
            found.append(f"a task of job {task.job} is kept back and given to {given[task]}")
        if task.job not in scheduler._jobs:
            found.append(f"a task of job {task.job} is kept back, and that has ended")
    return found


def _of_device(device: DeviceLoad) -> Iterable[str]:
    running, queued = device.running.values(), device.queue
    occupied = sum(array.nbytes for array in device.held.values())
    occupied += sum(task.output_bytes for task in running)
    if occupied != device.occupied_bytes:
        yield f"{device.occupied_bytes} bytes are booked, and {occupied} are occupied"
    if device.occupied_bytes > device.rates.memory_bytes:
        yield f"{device.occupied_bytes} bytes are more than its {device.rates.memory_bytes}"
    needed = Counter(a.id for task in (*running, *queued) for a in task.inputs)
    if needed != device.needed:
        yield f"arrays {dict(device.needed)} are booked as needed, and {dict(needed)} are"
    if len(running) > limits.MAX_RUNS_IN_FLIGHT:
        yield f"{len(running)} runs are under way"
    missing = {a.id for task in running for a in task.inputs} - device.held.keys()
    if missing:
        yield f"runs need the arrays {sorted(missing)}, which it does not hold"
    if both := device.held.keys() & set(device.forget):
        yield f"it holds the arrays {sorted(both)}, and is to forget them"
    if device.draining and queued:
        yield f"it drains, and {len(queued)} tasks wait for it"


def leftovers(manager: SessionManager) -> list[str]:
    """Return descriptions of state that was not freed although no job or operand is in use."""
    found = leftovers_of(manager.scheduler) + manager.stages.leftovers()
    if manager._buffers:
        found.append(f"{len(manager._buffers)} operands are left")
    expected = sum(len(session.expected) for session in manager.sessions.values())
    if expected:
        found.append(f"{expected} answers are expected")
    return found


def leftovers_of(scheduler: Scheduler) -> list[str]:
    """Return descriptions of what a scheduler did not free although no job is in use."""
    kept = {
        "jobs": scheduler._jobs,
        "jobs that wait": scheduler._waiting,
        "orphans": scheduler._orphans,
        "tasks that were kept back": scheduler._held,
        "reasons": scheduler._stuck,
        "copies": scheduler._copies,
        "beginnings": scheduler._begun_s,
    }
    found = [f"{len(some)} {name} are left" for name, some in kept.items() if some]
    if scheduler.device_memory._arrays or scheduler.device_memory._holders:
        found.append("arrays are named that nobody will use")
    for device in scheduler._devices.values():
        some = len(device.held) + len(device.needed) + len(device.unanswered())
        if some or device.occupied_bytes:
            found.append(f"device {device.id} has {some} arrays and tasks left")
    return found
