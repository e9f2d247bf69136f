"""The scheduler of GEMM tasks, a state machine that does no I/O.

The scheduler sends an array when the first task in a device's queue needs the array and the device
has free memory, so arrays arrive in wavefront order. Unanswered tasks of a lost device are assigned
to other devices and repartitioned if that is faster. Tasks of a late device are duplicated, and the
first valid result is used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from heapq import nlargest
from typing import Any, Final

from cleave.errors import PlanError
from cleave.planner.plan import DeviceRates
from cleave.protocol import limits
from cleave.scheduler import events
from cleave.scheduler.events import Event
from cleave.scheduler.instructions import (
    Done,
    Drained,
    Failed,
    Instruction,
    Overdue,
    Place,
    SendArray,
    SendCancel,
    SendDrop,
    SendRun,
    Stuck,
)
from cleave.scheduler.tiles.device_memory import DeviceMemory, Names
from cleave.scheduler.tiles.gemm_job import GemmJob
from cleave.scheduler.tiles.load import DeviceLoad
from cleave.scheduler.tiles.reassignment import find_stragglers, reassign, speculate
from cleave.scheduler.tiles.tasks import Task

# A task that failed this often, and on every device that can run it, is held back.
MAX_FAILURES: Final = 8
HOLD_S: Final = 5.0  # first wait of a held task. The wait doubles, and ends if a device joins.
HOLD_MOST_S: Final = 300.0
_RECUT_FROM_S: Final = 0.005  # repartition tasks that add more than this to the finish time
_HELPED_AT_ONCE: Final = 32  # maximum number of busy devices that a new device helps

# the reason reported for a withdrawn job, which did not fail
WITHDRAWN: Final = "it was withdrawn"
FINISHED_KEPT: Final = 64  # number of finished jobs whose durations are remembered
_DROP_BATCH: Final = 512
_DROP_BATCH_BYTES: Final = 2**20


@dataclass(slots=True)
class Counters:
    """Counts of tasks and results since the scheduler was created."""

    tasks: int = 0  # tasks assigned to devices, including reassigned and duplicated tasks
    results: int = 0
    flops: int = 0  # FLOPs of the accepted results
    reissued: int = 0  # tasks that were reassigned to another device
    late: int = 0  # answers that were no longer needed
    speculative: int = 0  # tasks that were duplicated on another device


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """The predicted and measured durations of a finished job, in seconds."""

    id: int
    title: str
    predicted_s: float
    took_s: float


class Scheduler:
    """Assigns tasks to devices. `handle` receives an event and returns instructions."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.finished: deque[FinishedJob] = deque(maxlen=FINISHED_KEPT)  # the latest job is last
        self._devices: dict[int, DeviceLoad] = {}
        self._jobs: dict[int, GemmJob] = {}
        self._waiting: list[GemmJob] = []  # no device can run these jobs yet
        self._orphans: deque[Task] = deque()  # no connected device can run these tasks
        self._held: dict[Task, float] = {}  # key: held task; value: retry time
        self._stuck: dict[int, str] = {}  # key: job; value: why no device can run it
        self._copies: dict[Task, set[int]] = {}  # key: duplicated task; value: its devices
        self._begun_s: dict[int, float] = {}  # key: job; value: submission time
        self._finished_s = 0.0
        self._now_s = 0.0
        self.names = Names()
        self.device_memory = DeviceMemory(self.names, lambda: self.rates)
        self._instructions: list[Instruction] = []
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            events.DeviceReady: self._ready,
            events.DeviceAside: self._set_aside,
            events.DeviceBack: self._back,
            events.DeviceRated: self._rated,
            events.DeviceDraining: self._draining,
            events.DeviceLost: self._lost,
            events.Submitted: self._submitted,
            events.ResultArrived: self._result,
            events.RunFailed: self._run_failed,
            events.LateAnswer: self._late_answer,
            events.OperandReleased: self._operand_released,
            events.Alive: self._alive,
            events.Paused: self._paused,
            events.Tick: self._tick,
            events.Withdrawn: self._withdrawn,
        }

    def handle(self, event: Event, now_s: float) -> list[Instruction]:
        """Handle one event and return the resulting instructions in order."""
        self._instructions = []
        self._now_s = now_s
        self._handlers[type(event)](event)
        return self._instructions

    @property
    def devices(self) -> Sequence[int]:
        """Return the IDs of the devices that are available for tasks."""
        return [d for d, state in list(self._devices.items()) if state.present]

    @property
    def rates(self) -> list[DeviceRates]:
        """Return the rates of available devices. Omit overdue devices unless all are overdue."""
        present = [d for d in list(self._devices.values()) if d.present]
        return [d.rates for d in present if not d.overdue] or [d.rates for d in present]

    @property
    def idle(self) -> bool:
        """Return whether all jobs are finished."""
        return not self._jobs

    @property
    def oldest(self) -> tuple[GemmJob, float] | None:
        """Return the oldest assigned job and its submission time; None if no job is assigned."""
        for id, begun_s in self._begun_s.items():
            if self._jobs[id].expected_s is not None:  # an unassigned job waits for a device
                return self._jobs[id], begun_s
        return None

    @property
    def blank(self) -> bool:
        """Return whether all jobs are finished and no device holds an array."""
        return not self._jobs and not any(d.held or d.forget for d in self._devices.values())

    def runs_of(self, device: int) -> Set[int]:
        """Return the IDs of a device's runs in flight."""
        state = self._devices.get(device)
        return state.running.keys() if state is not None else frozenset()

    def busy(self, device: int) -> bool:
        """Return whether a device has queued or running tasks."""
        state = self._devices.get(device)
        return state is not None and bool(state.running or state.queue)

    def overdue(self, device: int) -> bool:
        """Return whether a device missed a deadline and still counts as overdue."""
        state = self._devices.get(device)
        return state is not None and state.overdue

    def stuck(self, job: int) -> str:
        """Return why no connected device can run part of a job; empty if the job is not stuck."""
        return self._stuck.get(job, "")

    # --- devices join and leave ---

    def _ready(self, event: events.DeviceReady) -> None:
        self._devices[event.rates.device] = DeviceLoad(event.rates, one_run=event.careful)
        self._give_work(event.rates.device)

    def _back(self, event: events.DeviceBack) -> None:
        device = self._devices.get(event.rates.device)
        if device is None or not device.aside:
            return
        device.rates, device.aside, device.one_run = event.rates, False, event.careful
        self._give_work(device.id)

    def _rated(self, event: events.DeviceRated) -> None:
        """Store a device's new rates. If its memory is now too small, drop unneeded arrays."""
        device = self._devices.get(event.rates.device)
        if device is None:
            return
        device.rates = event.rates
        if device.occupied_bytes > device.rates.memory_bytes:  # stages now use some of the memory
            self.device_memory.clear(device)
            self._tell_forgotten(device)

    def _give_work(self, newcomer: int) -> None:
        """Assign the tasks that wait for a device, and let the new device help busy devices."""
        waiting, self._waiting = self._waiting, []
        for job in waiting:
            self._start(job)
        if self._orphans:
            orphans, self._orphans = self._orphans, deque()
            self._reassign(orphans)
        self._try_again([task for task in self._held if newcomer not in task.failed_on])
        if self._jobs:
            self._help_with_newcomer(newcomer)

    def _set_aside(self, event: events.DeviceAside) -> None:
        """Stop assigning tasks to a device for now, and move its unsent tasks to other devices."""
        device = self._devices.get(event.device)
        if device is None or not device.present:
            return
        device.aside = True
        self._give_away_queue(device)
        self.device_memory.clear(device)
        self._tell_forgotten(device)

    def _give_away_queue(self, device: DeviceLoad) -> None:
        unsent = list(device.queue)
        device.queue.clear()
        for task in unsent:
            self.device_memory.release_inputs(device, task)
        self._reassign(u for u in unsent if not self._copied(device.id, u))

    def _draining(self, event: events.DeviceDraining) -> None:
        """Stop assigning tasks to a device, which leaves after answering its runs in flight."""
        device = self._devices.get(event.device)
        if device is None or device.draining:
            return
        device.draining = True
        self._give_away_queue(device)
        self._finish_draining(device)

    def _finish_draining(self, device: DeviceLoad) -> None:
        """Remove a draining device if it has answered all its runs."""
        if device.id in self._devices and device.draining and not device.running:
            self._forget_device(device.id)
            self._instructions.append(Drained(device.id))

    def _lost(self, event: events.DeviceLost) -> None:
        device = self._forget_device(event.device)
        if device is not None:
            self._reassign(u for u in device.unanswered() if not self._copied(event.device, u))

    def _forget_device(self, device_id: int) -> DeviceLoad | None:
        """Remove a device and its arrays. Return its load, or None if the device is unknown."""
        device = self._devices.pop(device_id, None)
        if device is not None:
            self.device_memory.leave(device)
        return device

    # --- jobs and tasks ---

    def _submitted(self, event: events.Submitted) -> None:
        self._jobs[event.job.id] = event.job
        self._begun_s[event.job.id] = self._now_s
        self._start(event.job)

    def _start(self, job: GemmJob) -> None:
        """Assign a job's tasks and send the first ones. The job waits if no device can run it."""
        rates = self._able(job)
        if not rates:
            self._waiting.append(job)
            return
        touched = {}
        try:
            for device_id, task in job.assign(rates, self.device_memory):
                device = touched[device_id] = self._devices[device_id]
                self._enqueue(device, task)
        except PlanError as error:  # the plan may succeed once another device joins
            self._waiting.append(job)
            self._stick(job, str(error))
            return
        self._stuck.pop(job.id, None)
        if job.complete:
            self._complete(job.id)
        for device in touched.values():
            self._pump(device)

    def _enqueue(self, device: DeviceLoad, task: Task) -> None:
        self.counters.tasks += 1
        device.queue.append(task)
        self.device_memory.retain(device, task)

    def _reassign(self, tasks: Iterable[Task], *, repartition: bool = True) -> None:
        """Assign unassigned tasks to the devices that are predicted to finish them first."""
        by_job: dict[int, list[Task]] = {}
        for task in tasks:
            by_job.setdefault(task.job, []).append(task)
        for job_id, group in by_job.items():
            job = self._jobs.get(job_id)
            if job is not None:  # the job may have failed meanwhile
                self._reassign_of(job, group, repartition=repartition)

    def _reassign_of(self, job: GemmJob, tasks: list[Task], *, repartition: bool) -> None:
        """Assign unfinished tasks of one job to devices, unchanged or repartitioned."""
        devices, now_s = self._devices, self._now_s
        able = {r.device: devices[r.device].remaining_s(now_s) for r in self._able(job)}
        if not able:
            self._orphans.extend(tasks)
            return
        found = reassign(tasks, able, self._may_take, self._task_s)
        too_large: list[Task] = []
        if found.unassigned:  # as a last resort, retry on devices that failed the task
            again = reassign(found.unassigned, able, self._holds, self._task_s)
            found.assigned += again.assigned
            too_large = again.unassigned
        assigned = found.assigned
        slow = len(able) > 1 and found.finish_s - max(able.values()) > _RECUT_FROM_S
        if repartition and (too_large or slow):
            proposal = job.repartition(
                tasks, [devices[i].rates for i in able], able, self.device_memory
            )
            if (
                proposal is not None
                and (too_large or proposal[1] < found.finish_s)
                and all(self._holds(device_id, task) for device_id, task in proposal[0])
            ):
                assigned, too_large = proposal[0], []
                job.replace(tasks, [task for _, task in assigned])
        if too_large:
            self._orphans.extend(too_large)
            need = _need(too_large[0])
            self._stick(job, f"a task needs {need} bytes of memory, which no connected device has")
        for device_id, task in assigned:
            self.counters.reissued += 1
            self._enqueue(devices[device_id], task)
        for device_id in sorted({device_id for device_id, _ in assigned}):
            if device_id in devices:
                self._pump(devices[device_id])

    def _able(self, job: GemmJob) -> list[DeviceRates]:
        """Return the rates of the devices that can run a job.

        Omit overdue devices unless all of these devices are overdue.
        """
        able = [d for d in self._devices.values() if d.present and job.runs_on(d.rates)]
        return [d.rates for d in able if not d.overdue] or [d.rates for d in able]

    def _holds(self, device_id: int, task: Task) -> bool:
        return _need(task) <= self._devices[device_id].rates.memory_bytes

    def _may_take(self, device_id: int, task: Task) -> bool:
        return device_id not in task.failed_on and self._holds(device_id, task)

    def _task_s(self, device_id: int, task: Task) -> float:
        return self._devices[device_id].task_s(task)

    # --- duplicated tasks ---

    def _copied(self, device_id: int, task: Task) -> bool:
        """Forget a device's copy of a task. Return whether another device has a copy."""
        others = self._copies.get(task)
        if others is None:
            return False
        others.discard(device_id)
        if len(others) == 1:
            del self._copies[task]
        return bool(others)

    def _speculate(self, late: Mapping[int, float], helpers: Mapping[int, float]) -> None:
        """Duplicate the last tasks of late devices on helpers, or move tasks that were not sent.

        `late` and `helpers` map a device to the predicted time of its tasks, in seconds.
        """
        undone = {}
        for device_id in late:
            tasks = self._devices[device_id].unanswered()
            undone[device_id] = [u for u in tasks if u.job in self._jobs and u not in self._copies]

        def able(helper: int, task: Task) -> bool:
            rates = self._devices[helper].rates
            return self._jobs[task.job].runs_on(rates) and self._may_take(helper, task)

        touched = set()
        for device_id, helper, task in speculate(undone, late, helpers, able, self._task_s):
            device = self._devices[device_id]
            if task in device.queue:  # the task has not been sent
                device.queue.remove(task)
                self.device_memory.release_inputs(device, task)
                self.counters.reissued += 1
            else:
                self._copies[task] = {device_id, helper}
                self.counters.speculative += 1
            self._enqueue(self._devices[helper], task)
            touched.add(helper)
        for helper in sorted(touched):
            if helper in self._devices:
                self._pump(self._devices[helper])

    def _help_with_newcomer(self, newcomer: int) -> None:
        busy = [
            (device.remaining_s(self._now_s), device_id)
            for device_id, device in self._devices.items()
            if device_id != newcomer and (device.running or device.queue)
        ]
        late = {device_id: needs_s for needs_s, device_id in nlargest(_HELPED_AT_ONCE, busy)}
        self._speculate(late, {newcomer: self._devices[newcomer].remaining_s(self._now_s)})

    def _cancel_copies(self, device_id: int, task: Task) -> None:
        """Cancel all other copies of a task after a device has returned the first result."""
        for other_id in sorted(self._copies.pop(task) - {device_id}):
            other = self._devices[other_id]
            runs = tuple(run for run, asked in other.running.items() if asked is task)
            for run in runs:
                other.ended(run)
            if runs:
                self._instructions.append(SendCancel(other_id, runs))
            else:
                other.queue.remove(task)
            self.device_memory.release_inputs(other, task)
            self._pump(other)

    def _tick(self, event: events.Tick) -> None:
        """Retry held tasks that are due, and duplicate tasks of late devices on helpers."""
        due = [task for task, until_s in self._held.items() if until_s <= self._now_s]
        for task in due:
            task.failed_on.clear()
        self._try_again(due)
        # Jobs run in sequence, so results are expected from the end of the previous job.
        since_s = {job: max(begun_s, self._finished_s) for job, begun_s in self._begun_s.items()}
        found = find_stragglers(self._devices, self._jobs, since_s, self._now_s)
        for device_id in found.overdue:
            self._devices[device_id].miss(self._now_s)
            self._instructions.append(Overdue(device_id, True))
        late = found.remaining_s
        if not late:
            return
        helpers = {
            device_id: device.remaining_s(self._now_s)
            for device_id, device in self._devices.items()
            if device_id not in late and device.present and not device.overdue
        }
        if helpers:
            self._speculate(late, helpers)

    def _alive(self, event: events.Alive) -> None:
        """Handle a heartbeat. An overdue device whose wait is over may get tasks again."""
        device = self._devices.get(event.device)
        if device is None or not device.overdue or device.running:
            return
        if self._now_s >= device.retry_s:
            device.overdue = False
            self._instructions.append(Overdue(event.device, False))

    # --- tasks that no device can run ---

    def _stick(self, job: GemmJob, reason: str) -> None:
        """Record why part of a job is waiting. Report only the last new reason for each event."""
        if self._stuck.get(job.id) != reason:
            self._stuck[job.id] = reason
            said = [i for i in self._instructions if isinstance(i, Stuck) and i.job == job.id]
            for before in said:
                self._instructions.remove(before)
            self._instructions.append(Stuck(job.id, reason))

    def _hold(self, job: GemmJob, task: Task, last: str) -> None:
        """Hold back a task that failed on every device, and report the reason."""
        task.held += 1
        for_s = min(HOLD_MOST_S, HOLD_S * 2 ** (task.held - 1))
        self._held[task] = self._now_s + for_s
        self._stick(
            job,
            f"{job.title} failed on every connected device, last on {last}; it waits for "
            f"another device, or for a retry in {for_s:.0f} s",
        )

    def _try_again(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            del self._held[task]
        for job in {task.job for task in tasks} - {task.job for task in self._held}:
            self._stuck.pop(job, None)
        self._reassign(tasks, repartition=False)

    # --- sending ---

    def _pump(self, device: DeviceLoad) -> None:
        """Send queued tasks and missing arrays, within the limits on device memory and runs."""
        while device.queue and device.has_turn:
            task = device.queue[0]
            if task.job not in self._jobs:  # the job failed meanwhile
                device.queue.popleft()
                self.device_memory.release_inputs(device, task)
                continue
            missing = []
            for array in task.inputs:
                if array.id in device.held:
                    device.held.move_to_end(array.id)
                elif array not in missing:
                    missing.append(array)
            room = sum(a.nbytes for a in missing) + task.output_bytes
            if not self.device_memory.make_room(device, task, room):
                if device.running:  # running tasks must finish first
                    return
                device.queue.popleft()
                self.device_memory.release_inputs(device, task)
                self._reassign([task])  # repartition the task or find a device with enough memory
                continue
            device.queue.popleft()
            self._tell_forgotten(device)
            for array in missing:
                device.held[array.id] = array
                device.occupied_bytes += array.nbytes
                self._instructions.append(SendArray(device.id, array))
            self.names.runs += 1
            run = self.names.runs
            device.asked(run, task, room - task.output_bytes, self._now_s)
            self._instructions.append(SendRun(device.id, run, task))
        self._tell_if_much(device)
        self._finish_draining(device)

    def _tell_if_much(self, device: DeviceLoad) -> None:
        if len(device.forget) >= _DROP_BATCH or device.forget_bytes >= _DROP_BATCH_BYTES:
            self._tell_forgotten(device)

    def _tell_forgotten(self, device: DeviceLoad) -> None:
        """Tell a device to drop all arrays that were removed from its record."""
        device.forget_bytes = 0
        while device.forget:
            some, device.forget = device.forget[: limits.MAX_IDS], device.forget[limits.MAX_IDS :]
            self._instructions.append(SendDrop(device.id, tuple(some)))

    # --- answers ---

    def _take(self, device_id: int, run: int) -> tuple[DeviceLoad, Task] | None:
        """End a run. Return the run's device and task, or None if the run is not in flight."""
        self._heard(device_id)
        device = self._devices.get(device_id)
        task = device.ended(run) if device else None
        if device is None or task is None:
            self.counters.late += 1
            return None
        self.device_memory.release_inputs(device, task)
        return device, task

    def _late_answer(self, event: events.LateAnswer) -> None:
        self.counters.late += 1
        self._heard(event.device)

    def _heard(self, device_id: int) -> None:
        """Record that a device answered, so that the device is no longer overdue."""
        device = self._devices.get(device_id)
        if device is not None and device.heard(self._now_s):
            self._instructions.append(Overdue(device_id, False))

    def _result(self, event: events.ResultArrived) -> None:
        """Handle a result: end the run, write the results that are ready, and send more tasks."""
        taken = self._take(event.device, event.run)
        if taken is None:
            return
        device, task = taken
        device.one_run = False
        if task in self._copies:
            self._cancel_copies(event.device, task)
        job = self._jobs.get(task.job)
        if job is not None:
            self.counters.results += 1
            self.counters.flops += task.flops
            for placed, payload in job.arrived(task, event.payload):
                self._instructions.append(Place(placed, payload))
            if job.complete:
                self._complete(job.id)
        self._pump(device)

    def _run_failed(self, event: events.RunFailed) -> None:
        """Reassign a failed task, or hold it back if it failed too often."""
        taken = self._take(event.device, event.run)
        if taken is None:
            return
        device, task = taken
        if event.invalidated:
            self.device_memory.invalidate(device, task)
        job = self._jobs.get(task.job)
        task.failed_on.add(event.device)
        task.failures += 1
        if job is not None and not self._copied(event.device, task):
            able = [r.device for r in self._able(job) if self._holds(r.device, task)]
            if task.failures >= MAX_FAILURES and able and task.failed_on.issuperset(able):
                self._hold(job, task, f"device {event.device}: {event.reason}")
            else:
                self._reassign([task], repartition=False)
        self._pump(device)

    def _complete(self, job: int) -> None:
        """Finish a job whose results have all been released for writing."""
        done, begun_s = self._jobs.pop(job), self._begun_s.pop(job)
        self._stuck.pop(job, None)
        self._finished_s = self._now_s
        if done.expected_s is not None:
            took_s = self._now_s - begun_s
            self.finished.append(FinishedJob(job, done.title, done.expected_s, took_s))
        self._instructions.append(Done(job))

    def _fail(self, job: int, reason: str) -> None:
        if self._jobs.pop(job, None) is None:
            return
        del self._begun_s[job]
        self._finished_s = self._now_s
        self._stuck.pop(job, None)
        self._held = {u: until_s for u, until_s in self._held.items() if u.job != job}
        self._orphans = deque(u for u in self._orphans if u.job != job)
        self._copies = {u: d for u, d in self._copies.items() if u.job != job}
        freed = []
        for device in self._devices.values():
            runs = {run: task for run, task in device.running.items() if task.job == job}
            for run, task in runs.items():
                device.ended(run)
                self.device_memory.release_inputs(device, task)
            if runs:
                self._instructions.append(SendCancel(device.id, tuple(runs)))
                freed.append(device)
        self._instructions.append(Failed(job, reason))
        for device in freed:  # queued tasks may now fit in memory
            if device.id in self._devices:
                self._pump(device)

    # --- operands ---

    def _operand_released(self, event: events.OperandReleased) -> None:
        self.device_memory.forget(event.operand, self._devices)
        for device in self._devices.values():
            self._tell_if_much(device)

    def _paused(self, event: events.Paused) -> None:
        for device in self._devices.values():
            self._tell_forgotten(device)

    # --- withdrawal ---

    def _withdrawn(self, event: events.Withdrawn) -> None:
        self._waiting = [job for job in self._waiting if job.id != event.job]
        self._fail(event.job, WITHDRAWN)


def _need(task: Task) -> int:
    """Return a task's device memory requirement in bytes: its distinct inputs and its result."""
    return sum({a.id: a.nbytes for a in task.inputs}.values()) + task.output_bytes
