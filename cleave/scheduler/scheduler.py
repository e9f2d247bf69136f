"""The dispatcher's state machine.

It keeps, for every device, a queue of units, what the device holds, and what it has been asked.
Arrays are sent when a unit that needs them comes up, which yields the wavefront order by itself,
and only as far as the device's memory goes. What a lost device had not answered goes to the others,
cut anew where that is faster; what a late one has not answered they get as well, and the first
valid answer counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import Any, Final

from cleave.errors import PlanError
from cleave.planner.plan import DeviceRates
from cleave.protocol import limits
from cleave.scheduler import events
from cleave.scheduler.device_memory import FleetHoldings, Names
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
from cleave.scheduler.load import DeviceLoad
from cleave.scheduler.reassignment import help_late, take_over
from cleave.scheduler.stragglers import late_devices
from cleave.scheduler.tasks import Unit, Work

MAX_FAILURES: Final = 4
"""How often a unit may fail, and on every device that is there, before it is kept back."""

HOLD_S: Final = 5.0
"""For so long the first time, then for twice as long, and tried as soon as another device comes."""

HOLD_MOST_S: Final = 300.0

_RECUT_FROM_S: Final = 0.005  # what a lost device left is cut anew if it takes longer as it is
_HELPED_AT_ONCE: Final = 32  # devices that one newcomer looks at

WITHDRAWN: Final = "it was withdrawn"
"""The reason of a work's failure that is none."""

FINISHED_KEPT: Final = 64
"""Works that are remembered when they are done."""

_DROP_BATCH: Final = 512
_DROP_BATCH_BYTES: Final = 2**20


@dataclass(slots=True)
class Counters:
    """What happened so far; `flops` are those of `results`."""

    units: int = 0
    results: int = 0
    flops: int = 0
    reissued: int = 0
    late: int = 0
    hedged: int = 0


@dataclass(frozen=True, slots=True)
class FinishedWork:
    """What was predicted of some work, and what became of it."""

    id: int
    title: str
    predicted_s: float
    took_s: float


class Dispatcher:
    """Runs work on a fleet. See `handle`."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.finished: deque[FinishedWork] = deque(maxlen=FINISHED_KEPT)  # the latest last
        self._devices: dict[int, DeviceLoad] = {}
        self._works: dict[int, Work] = {}
        self._waiting: list[Work] = []  # submitted while the fleet was empty
        self._orphans: deque[Unit] = deque()  # that no device which is there can take
        self._held: dict[Unit, float] = {}  # that every device failed, until when
        self._stuck: dict[int, str] = {}  # by work, why no device can do it
        self._copies: dict[Unit, set[int]] = {}  # devices of units that several were given
        self._begun_s: dict[int, float] = {}  # by work
        self._finished_s = 0.0
        self._now_s = 0.0
        self.names = Names()
        self.holdings = FleetHoldings(self.names, lambda: self.rates)
        self._instructions: list[Instruction] = []
        self._handlers: dict[type[Any], Callable[[Any, float], None]] = {
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
        """Take one event and return what is to be done about it, in order."""
        self._instructions = []
        self._now_s = now_s
        self._handlers[type(event)](event, now_s)
        return self._instructions

    @property
    def devices(self) -> Sequence[int]:
        """The devices that may be given work."""
        return [d for d, state in list(self._devices.items()) if state.present]

    @property
    def rates(self) -> list[DeviceRates]:
        """What is known of the devices that may be given work; overdue ones only if all are."""
        present = [d for d in list(self._devices.values()) if d.present]
        return [d.rates for d in present if not d.overdue] or [d.rates for d in present]

    @property
    def idle(self) -> bool:
        """Whether no work is unfinished."""
        return not self._works

    @property
    def oldest(self) -> tuple[Work, float] | None:
        """The work that is under way for longest, and since when; None where there is none."""
        for id, begun_s in self._begun_s.items():
            if self._works[id].expected_s is not None:  # else it waits for a device
                return self._works[id], begun_s
        return None

    @property
    def blank(self) -> bool:
        """Whether no work is under way and no device holds an array, as when it was new."""
        return not self._works and not any(d.held or d.forget for d in self._devices.values())

    def busy(self, device: int) -> bool:
        """Whether a device has something to do."""
        state = self._devices.get(device)
        return state is not None and bool(state.running or state.queue)

    def overdue(self, device: int) -> bool:
        """Whether a device has not answered what it should have long ago."""
        state = self._devices.get(device)
        return state is not None and state.overdue

    def stuck(self, work: int) -> str:
        """Why no device that is there can do some work; empty where one can, or none is there."""
        return self._stuck.get(work, "")

    # --- devices come and go ---

    def _ready(self, event: events.DeviceReady, now_s: float) -> None:
        self._devices[event.rates.device] = DeviceLoad(event.rates, one_run=event.careful)
        self._welcome(event.rates.device, now_s)

    def _back(self, event: events.DeviceBack, now_s: float) -> None:
        device = self._devices.get(event.rates.device)
        if device is None or not device.aside:
            return
        device.rates, device.aside, device.one_run = event.rates, False, event.careful
        self._welcome(device.id, now_s)

    def _rated(self, event: events.DeviceRated, now_s: float) -> None:
        device = self._devices.get(event.rates.device)
        if device is not None:
            device.rates = event.rates

    def _welcome(self, newcomer: int, now_s: float) -> None:
        """A device takes what waited for one, and some of what others are at."""
        waiting, self._waiting = self._waiting, []
        for work in waiting:
            self._start(work)
        if self._orphans:
            orphans, self._orphans = self._orphans, deque()
            self._reassign(orphans)
        self._try_again([unit for unit in self._held if newcomer not in unit.failed_on])
        if self._works:
            self._help_with_newcomer(newcomer, now_s)

    def _set_aside(self, event: events.DeviceAside, now_s: float) -> None:
        device = self._devices.get(event.device)
        if device is None or not device.present:
            return
        device.aside = True
        self._give_away_queue(device)
        self.holdings.clear(device)
        self._tell_forgotten(device)

    def _give_away_queue(self, device: DeviceLoad) -> None:
        """Others do what a device was not sent yet."""
        unsent = list(device.queue)
        device.queue.clear()
        for unit in unsent:
            self.holdings.unwant(device, unit)
        self._reassign(u for u in unsent if not self._copied(device.id, u))

    def _draining(self, event: events.DeviceDraining, now_s: float) -> None:
        device = self._devices.get(event.device)
        if device is None or device.draining:
            return
        device.draining = True
        self._give_away_queue(device)
        self._finish_draining(device)

    def _finish_draining(self, device: DeviceLoad) -> None:
        if device.id in self._devices and device.draining and not device.running:
            self._forget_device(device.id)
            self._instructions.append(Drained(device.id))

    def _lost(self, event: events.DeviceLost, now_s: float) -> None:
        device = self._forget_device(event.device)
        if device is not None:
            self._reassign(u for u in device.unanswered() if not self._copied(event.device, u))

    def _forget_device(self, device_id: int) -> DeviceLoad | None:
        device = self._devices.pop(device_id, None)
        if device is not None:
            self.holdings.leave(device)
        return device

    # --- work ---

    def _submitted(self, event: events.Submitted, now_s: float) -> None:
        self._works[event.work.id] = event.work
        self._begun_s[event.work.id] = now_s
        self._start(event.work)

    def _start(self, work: Work) -> None:
        rates = self._able(work)
        if not rates:
            self._waiting.append(work)
            return
        touched = {}
        try:
            for device_id, unit in work.assign(rates, self.holdings):
                device = touched[device_id] = self._devices[device_id]
                self._enqueue(device, unit)
        except PlanError as error:  # a device that comes may change that
            self._waiting.append(work)
            self._stick(work, str(error))
            return
        self._stuck.pop(work.id, None)
        if work.complete:
            self._complete(work.id)
        for device in touched.values():
            self._pump(device)

    def _enqueue(self, device: DeviceLoad, unit: Unit) -> None:
        self.counters.units += 1
        device.queue.append(unit)
        self.holdings.want(device, unit)

    def _reassign(self, units: Iterable[Unit], *, recut: bool = True) -> None:
        """Give units to the devices that are predicted to finish them first.

        Args:
            units: that no device is to do any more.
            recut: whether their work may cut them anew, to share them among more devices.
        """
        by_work: dict[int, list[Unit]] = {}
        for unit in units:
            by_work.setdefault(unit.work, []).append(unit)
        for work_id, group in by_work.items():
            work = self._works.get(work_id)
            if work is not None:  # else it failed meanwhile
                self._reassign_of(work, group, recut=recut)

    def _reassign_of(self, work: Work, units: list[Unit], *, recut: bool) -> None:
        devices, now_s = self._devices, self._now_s
        able = {r.device: devices[r.device].remaining_s(now_s) for r in self._able(work)}
        if not able:
            self._orphans.extend(units)
            return
        found = take_over(units, able, self._may_take, self._unit_s)
        too_large: list[Unit] = []
        if found.unassigned:  # where they failed they are tried again only if there is nobody else
            again = take_over(found.unassigned, able, self._holds, self._unit_s)
            found.assigned += again.assigned
            too_large = again.unassigned
        assigned = found.assigned
        slow = len(able) > 1 and found.finish_s - max(able.values()) > _RECUT_FROM_S
        if recut and (too_large or slow):
            anew = work.recut(units, [devices[i].rates for i in able], able, self.holdings)
            if (
                anew is not None
                and (too_large or anew.finish_s < found.finish_s)
                and all(self._holds(device_id, unit) for device_id, unit in anew.assigned)
            ):
                work.replace(units, [unit for _, unit in anew.assigned])
                assigned, too_large = anew.assigned, []
        if too_large:
            self._orphans.extend(too_large)
            need = _need(too_large[0])
            self._stick(work, f"no device that is there has the memory for {need} bytes at once")
        for device_id, unit in assigned:
            self.counters.reissued += 1
            self._enqueue(devices[device_id], unit)
        for device_id in sorted({device_id for device_id, _ in assigned}):
            if device_id in devices:
                self._pump(devices[device_id])

    def _able(self, work: Work) -> list[DeviceRates]:
        """The devices that may do some of a work; overdue ones only where no others are."""
        able = [d for d in self._devices.values() if d.present and work.runs_on(d.rates)]
        return [d.rates for d in able if not d.overdue] or [d.rates for d in able]

    def _holds(self, device_id: int, unit: Unit) -> bool:
        return _need(unit) <= self._devices[device_id].rates.memory_bytes

    def _may_take(self, device_id: int, unit: Unit) -> bool:
        return device_id not in unit.failed_on and self._holds(device_id, unit)

    def _unit_s(self, device_id: int, unit: Unit) -> float:
        return self._devices[device_id].unit_s(unit)

    # --- units that two devices were given ---

    def _copied(self, device_id: int, unit: Unit) -> bool:
        """A device will not do a unit: whether another does it still."""
        others = self._copies.get(unit)
        if others is None:
            return False
        others.discard(device_id)
        if len(others) == 1:
            del self._copies[unit]
        return bool(others)

    def _help(self, late: Mapping[int, float], helpers: Mapping[int, float]) -> None:
        """Give the last units of late devices to others too.

        Args:
            late: by device, how long it is expected to need for what it was given.
            helpers: by device, what it has to do already, seconds.
        """
        undone = {}
        for device_id in late:
            units = self._devices[device_id].unanswered()
            undone[device_id] = [
                u for u in units if u.work in self._works and u not in self._copies
            ]

        def able(helper: int, unit: Unit) -> bool:
            rates = self._devices[helper].rates
            return self._works[unit.work].runs_on(rates) and self._may_take(helper, unit)

        touched = set()
        for device_id, helper, unit in help_late(undone, late, helpers, able, self._unit_s):
            device = self._devices[device_id]
            if unit in device.queue:  # it was not sent yet
                device.queue.remove(unit)
                self.holdings.unwant(device, unit)
                self.counters.reissued += 1
            else:
                self._copies[unit] = {device_id, helper}
                self.counters.hedged += 1
            self._enqueue(self._devices[helper], unit)
            touched.add(helper)
        for helper in sorted(touched):
            if helper in self._devices:
                self._pump(self._devices[helper])

    def _help_with_newcomer(self, newcomer: int, now_s: float) -> None:
        """A device that comes while others are at work takes some of it."""
        busy = [
            (device.remaining_s(now_s), device_id)
            for device_id, device in self._devices.items()
            if device_id != newcomer and (device.running or device.queue)
        ]
        late = {device_id: needs_s for needs_s, device_id in nlargest(_HELPED_AT_ONCE, busy)}
        self._help(late, {newcomer: self._devices[newcomer].remaining_s(now_s)})

    def _cancel_copies(self, device_id: int, unit: Unit) -> None:
        """A device answered a unit: the others need not."""
        for other_id in sorted(self._copies.pop(unit) - {device_id}):
            other = self._devices[other_id]
            runs = tuple(run for run, asked in other.running.items() if asked is unit)
            for run in runs:
                other.ended(run)
            if runs:
                self._instructions.append(SendCancel(other_id, runs))
            else:
                other.queue.remove(unit)
            self.holdings.unwant(other, unit)
            self._pump(other)
            self._finish_draining(other)

    def _tick(self, event: events.Tick, now_s: float) -> None:
        """Time passed: where work is overdue, others get what is missing, before anyone is lost."""
        due = [unit for unit, until_s in self._held.items() if until_s <= now_s]
        for unit in due:
            unit.failed_on.clear()
        self._try_again(due)
        found = late_devices(self._devices, self._works, self._expected_since(), now_s)
        for device_id in found.overdue:
            self._devices[device_id].miss(now_s)
            self._instructions.append(Overdue(device_id, True))
        late = found.remaining_s
        if not late:
            return
        helpers = {
            device_id: device.remaining_s(now_s)
            for device_id, device in self._devices.items()
            if device_id not in late and device.present and not device.overdue
        }
        if helpers:
            self._help(late, helpers)

    def _expected_since(self) -> dict[int, float]:
        """By work, since when something of it should have come: works follow one another."""
        return {work: max(begun, self._finished_s) for work, begun in self._begun_s.items()}

    def _alive(self, event: events.Alive, now_s: float) -> None:
        """A device whose units others took over may be asked again: an answer was lost, not it."""
        device = self._devices.get(event.device)
        if device is None or not device.overdue or device.running:
            return
        if now_s >= device.retry_s:
            device.overdue = False
            self._instructions.append(Overdue(event.device, False))

    # --- units that no device can do ---

    def _stick(self, work: Work, reason: str) -> None:
        """Some of a work waits for another device, or a better day; said once for each reason."""
        if self._stuck.get(work.id) != reason:
            self._stuck[work.id] = reason
            self._instructions.append(Stuck(work.id, reason))

    def _hold(self, work: Work, unit: Unit, last: str) -> None:
        """Every device failed a unit: it is kept back, so that they are not busy with failing."""
        unit.held += 1
        for_s = min(HOLD_MOST_S, HOLD_S * 2 ** (unit.held - 1))
        self._held[unit] = self._now_s + for_s
        self._stick(
            work,
            f"{work.title} failed on every device that is there, last on {last}; it waits for "
            f"another device, and is tried again in {for_s:.0f} s",
        )

    def _try_again(self, units: Sequence[Unit]) -> None:
        """Units that were kept back are given out again."""
        for unit in units:
            del self._held[unit]
        for work in {unit.work for unit in units} - {unit.work for unit in self._held}:
            self._stuck.pop(work, None)
        self._reassign(units, recut=False)

    # --- sending ---

    def _pump(self, device: DeviceLoad) -> None:
        """Send as many queued units, with the arrays they need, as the device has room for."""
        while device.queue and device.has_turn:
            unit = device.queue[0]
            if unit.work not in self._works:  # it failed meanwhile
                device.queue.popleft()
                self.holdings.unwant(device, unit)
                continue
            missing = []
            for array in unit.inputs:
                if array.id in device.held:
                    device.held.move_to_end(array.id)
                elif array not in missing:
                    missing.append(array)
            room = sum(a.nbytes for a in missing) + unit.output_bytes
            if not self.holdings.make_room(device, unit, room):
                if device.running:  # these must finish first
                    return
                device.queue.popleft()
                self.holdings.unwant(device, unit)
                self._reassign([unit])  # cut anew, or to one that has the memory
                continue
            device.queue.popleft()
            self._tell_forgotten(device)
            for array in missing:
                device.held[array.id] = array
                device.occupied_bytes += array.nbytes
                self._instructions.append(SendArray(device.id, array))
            self.names.runs += 1
            run = self.names.runs
            device.asked(run, unit, room - unit.output_bytes, self._now_s)
            self._instructions.append(SendRun(device.id, run, unit))
        self._tell_if_much(device)

    def _tell_if_much(self, device: DeviceLoad) -> None:
        """Arrays that nobody needs are not left on a device for want of a next message."""
        if len(device.forget) >= _DROP_BATCH or device.forget_bytes >= _DROP_BATCH_BYTES:
            self._tell_forgotten(device)

    def _tell_forgotten(self, device: DeviceLoad) -> None:
        device.forget_bytes = 0
        while device.forget:
            some, device.forget = device.forget[: limits.MAX_IDS], device.forget[limits.MAX_IDS :]
            self._instructions.append(SendDrop(device.id, tuple(some)))

    # --- answers ---

    def _take(self, device_id: int, run: int) -> tuple[DeviceLoad, Unit] | None:
        """The unit of a run, taken off the device; None for an answer nobody waits for."""
        self._heard(device_id)
        device = self._devices.get(device_id)
        unit = device.ended(run) if device else None
        if device is None or unit is None:
            self.counters.late += 1
            return None
        self.holdings.unwant(device, unit)
        return device, unit

    def _late_answer(self, event: events.LateAnswer, now_s: float) -> None:
        self.counters.late += 1
        self._heard(event.device)

    def _heard(self, device_id: int) -> None:
        device = self._devices.get(device_id)
        if device is not None and device.heard(self._now_s):
            self._instructions.append(Overdue(device_id, False))

    def _result(self, event: events.ResultArrived, now_s: float) -> None:
        taken = self._take(event.device, event.run)
        if taken is None:
            return
        device, unit = taken
        device.one_run = False
        if unit in self._copies:
            self._cancel_copies(event.device, unit)
        work = self._works.get(unit.work)
        if work is not None:
            self.counters.results += 1
            self.counters.flops += unit.flops
            for placed, payload in work.arrived(unit, event.payload):
                self._instructions.append(Place(placed, payload))
            if work.complete:
                self._complete(work.id)
        self._pump(device)
        self._finish_draining(device)

    def _run_failed(self, event: events.RunFailed, now_s: float) -> None:
        taken = self._take(event.device, event.run)
        if taken is None:
            return
        device, unit = taken
        if event.spoiled:
            self.holdings.spoil(device, unit)
        work = self._works.get(unit.work)
        unit.failed_on.add(event.device)
        unit.failures += 1
        if work is not None and not self._copied(event.device, unit):
            able = [r.device for r in self._able(work) if self._holds(r.device, unit)]
            if unit.failures >= MAX_FAILURES and able and unit.failed_on.issuperset(able):
                self._hold(work, unit, f"device {event.device}: {event.reason}")
            else:
                self._reassign([unit], recut=False)
        self._pump(device)
        self._finish_draining(device)

    def _complete(self, work: int) -> None:
        done, begun_s = self._works.pop(work), self._begun_s.pop(work)
        self._stuck.pop(work, None)
        self._finished_s = self._now_s
        if done.expected_s is not None:
            took_s = self._now_s - begun_s
            self.finished.append(FinishedWork(work, done.title, done.expected_s, took_s))
        self._instructions.append(Done(work))

    def _fail(self, work: int, reason: str) -> None:
        if self._works.pop(work, None) is None:
            return
        del self._begun_s[work]
        self._finished_s = self._now_s
        self._stuck.pop(work, None)
        self._held = {u: until_s for u, until_s in self._held.items() if u.work != work}
        self._orphans = deque(u for u in self._orphans if u.work != work)
        self._copies = {u: d for u, d in self._copies.items() if u.work != work}
        freed = []
        for device in self._devices.values():
            runs = {run: unit for run, unit in device.running.items() if unit.work == work}
            for run, unit in runs.items():
                device.ended(run)
                self.holdings.unwant(device, unit)
            if runs:
                self._instructions.append(SendCancel(device.id, tuple(runs)))
                freed.append(device)
        self._instructions.append(Failed(work, reason))
        for device in freed:  # what waited for room may go now
            if device.id in self._devices:
                self._pump(device)
                self._finish_draining(device)

    # --- operands ---

    def _operand_released(self, event: events.OperandReleased, now_s: float) -> None:
        self.holdings.forget(event.operand, self._devices)
        for device in self._devices.values():
            self._tell_if_much(device)

    def _paused(self, event: events.Paused, now_s: float) -> None:
        for device in self._devices.values():
            self._tell_forgotten(device)

    # --- second thoughts ---

    def _withdrawn(self, event: events.Withdrawn, now_s: float) -> None:
        self._waiting = [work for work in self._waiting if work.id != event.work]
        self._fail(event.work, WITHDRAWN)


def _need(unit: Unit) -> int:
    """Bytes that a device holds at once to do a unit."""
    return sum({a.id: a.nbytes for a in unit.inputs}.values()) + unit.output_bytes
