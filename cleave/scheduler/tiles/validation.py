"""Checks of the scheduler's state, for tests and debugging."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from cleave.protocol import limits
from cleave.scheduler.tiles.device_memory import DeviceMemory
from cleave.scheduler.tiles.gemm_job import GemmJob
from cleave.scheduler.tiles.load import DeviceLoad
from cleave.scheduler.tiles.tasks import Task


def broken_invariants(
    devices: Mapping[int, DeviceLoad],
    jobs: Mapping[int, GemmJob],
    copies: Mapping[Task, set[int]],
    kept_back: Iterable[Task],
    memory: DeviceMemory,
) -> list[str]:
    """Return descriptions of the inconsistencies in the scheduler's state.

    Args:
        copies: maps a duplicated task to the devices to which the task is assigned.
        kept_back: tasks that no device can run now.
    """
    found = []
    for id, device in devices.items():
        found += [f"device {id}: {problem}" for problem in _of_device(device)]
        found += [
            f"device {id} holds or needs array {array}, and is not among its holders"
            for array in {*device.held, *device.needed}
            if id not in memory.devices_with(array)
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
    for task in kept_back:
        if task in given:
            found.append(f"a task of job {task.job} is kept back and given to {given[task]}")
        if task.job not in jobs:
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


def leftovers(
    devices: Iterable[DeviceLoad], kept: Mapping[str, Collection[object]], memory: DeviceMemory
) -> list[str]:
    """Return descriptions of state that was not freed. `kept` maps names to collections."""
    found = [f"{len(some)} {name} are left" for name, some in kept.items() if some]
    if not memory.empty:
        found.append("arrays are named that nobody will use")
    for device in devices:
        some = len(device.held) + len(device.needed) + len(device.unanswered())
        if some or device.occupied_bytes:
            found.append(f"device {device.id} has {some} arrays and tasks left")
    return found
