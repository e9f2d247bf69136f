"""The dispatcher's state machine.

It keeps, for every device, a queue of units, what the device holds, and what it has been asked.
Arrays are sent when a unit that needs them comes up, which yields the wavefront order by itself,
and only as far as the device's memory goes; what a lost device had not answered goes to the others.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from cleave.dispatch import events
from cleave.dispatch.events import Command, Event
from cleave.dispatch.work import Stored, Unit, Work
from cleave.errors import PlanError
from cleave.gemm import Span
from cleave.planner.cost import tile_s
from cleave.planner.plan import DeviceRates
from cleave.protocol import limits

MAX_FAILURES: Final = 4
"""How often a unit may fail, and on every device that is there, before its work fails."""

_DROP_BATCH: Final = 512
_DROP_BATCH_BYTES: Final = 2**20


@dataclass(slots=True)
class Counters:
    """What happened so far."""

    units: int = 0
    results: int = 0
    reissued: int = 0
    late: int = 0


@dataclass(slots=True)
class Names:
    """The last names given to arrays and runs; they are never used again."""

    arrays: int = 0
    runs: int = 0


@dataclass(slots=True)
class _Device:
    rates: DeviceRates
    draining: bool = False
    queue: deque[Unit] = field(default_factory=deque)
    running: dict[int, Unit] = field(default_factory=dict)
    held: OrderedDict[int, Stored] = field(default_factory=OrderedDict)  # least recently used first
    needed: Counter[int] = field(default_factory=Counter)  # uses by queued and running units
    occupied_bytes: int = 0  # arrays held and results under way
    forget: list[int] = field(default_factory=list)  # dropped, to be told with the next array
    forget_bytes: int = 0


class Dispatcher:
    """Runs work on a fleet. See `handle`."""

    def __init__(self) -> None:
        self.counters = Counters()
        self._devices: dict[int, _Device] = {}
        self._works: dict[int, Work] = {}
        self._waiting: list[Work] = []  # submitted while the fleet was empty
        self._orphans: deque[Unit] = deque()  # of lost devices, while the fleet is empty
        self._arrays: dict[int, dict[tuple[Span, Span], Stored]] = {}  # by operand
        self._holders: dict[int, set[int]] = {}  # by array: devices that hold or will hold it
        self.names = Names()
        self._commands: list[Command] = []
        self._handlers: dict[type[Any], Callable[[Any, float], None]] = {
            events.DeviceReady: self._ready,
            events.DeviceDraining: self._draining,
            events.DeviceLost: self._lost,
            events.Submitted: self._submitted,
            events.ResultArrived: self._result,
            events.RunFailed: self._run_failed,
            events.Assembled: self._assembled,
            events.OperandReleased: self._operand_released,
            events.Paused: self._paused,
        }

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Take one event and return what is to be done about it, in order."""
        self._commands = []
        self._handlers[type(event)](event, now_s)
        return self._commands

    @property
    def devices(self) -> Sequence[int]:
        """The devices that may be given work."""
        return [d for d, state in self._devices.items() if not state.draining]

    @property
    def rates(self) -> list[DeviceRates]:
        """What is known of the devices that may be given work."""
        return [d.rates for d in list(self._devices.values()) if not d.draining]

    @property
    def idle(self) -> bool:
        """Whether no work is unfinished."""
        return not self._works

    @property
    def blank(self) -> bool:
        """Whether no work is under way and no device holds an array, as when it was new."""
        return not self._works and not any(d.held or d.forget for d in self._devices.values())

    def busy(self, device: int) -> bool:
        """Whether a device has something to do."""
        state = self._devices.get(device)
        return state is not None and bool(state.running or state.queue)

    # --- the names of arrays (the `Holdings` that work sees) ---

    def stored(self, operand: int, rows: Span, columns: Span, itemsize: int) -> Stored:
        """See `Holdings.stored`."""
        of_operand = self._arrays.setdefault(operand, {})
        array = of_operand.get((rows, columns))
        if array is None:
            nbytes = rows.size * columns.size * itemsize
            self.names.arrays += 1
            array = Stored(self.names.arrays, operand, rows, columns, nbytes)
            of_operand[rows, columns] = array
        return array

    def holders(self, operand: int) -> Mapping[int, Sequence[Stored]]:
        """See `Holdings.holders`."""
        found: dict[int, list[Stored]] = {}
        for array in self._arrays.get(operand, {}).values():
            for device in self._holders.get(array.id, ()):
                if not self._devices[device].draining:
                    found.setdefault(device, []).append(array)
        return found

    # --- devices come and go ---

    def _ready(self, event: events.DeviceReady, now_s: float) -> None:
        self._devices[event.rates.device] = _Device(event.rates)
        waiting, self._waiting = self._waiting, []
        for work in waiting:
            self._start(work)
        if self._orphans:
            orphans, self._orphans = self._orphans, deque()
            self._reassign(orphans)

    def _draining(self, event: events.DeviceDraining, now_s: float) -> None:
        device = self._devices.get(event.device)
        if device is None or device.draining:
            return
        device.draining = True
        unsent = list(device.queue)
        device.queue.clear()
        for unit in unsent:
            self._release_needs(event.device, device, unit)
        self._reassign(unsent)
        self._finish_draining(event.device, device)

    def _finish_draining(self, device_id: int, device: _Device) -> None:
        if device_id in self._devices and device.draining and not device.running:
            self._forget_device(device_id)
            self._commands.append(events.Drained(device_id))

    def _lost(self, event: events.DeviceLost, now_s: float) -> None:
        device = self._forget_device(event.device)
        if device is None:
            return
        self._reassign([*device.running.values(), *device.queue])

    def _forget_device(self, device_id: int) -> _Device | None:
        device = self._devices.pop(device_id, None)
        if device is not None:
            for array in {*device.held, *device.needed}:
                self._unhold(array, device_id)
        return device

    def _unhold(self, array: int, device_id: int) -> None:
        holders = self._holders.get(array)
        if holders is not None:
            holders.discard(device_id)
            if not holders:
                del self._holders[array]

    # --- work ---

    def _submitted(self, event: events.Submitted, now_s: float) -> None:
        self._works[event.work.id] = event.work
        self._start(event.work)

    def _start(self, work: Work) -> None:
        rates = [
            d.rates for d in self._devices.values() if not d.draining and work.runs_on(d.rates)
        ]
        if not rates:
            self._waiting.append(work)
            return
        touched = {}
        try:
            for device_id, unit in work.assign(rates, self):
                device = touched[device_id] = self._devices[device_id]
                self._enqueue(device_id, device, unit)
        except PlanError as error:
            self._fail(work.id, str(error))
            return
        if work.complete:
            self._complete(work.id)
        for device_id, device in touched.items():
            self._pump(device_id, device)

    def _enqueue(self, device_id: int, device: _Device, unit: Unit) -> None:
        self.counters.units += 1
        device.queue.append(unit)
        for array in unit.inputs:
            device.needed[array.id] += 1
            self._holders.setdefault(array.id, set()).add(device_id)

    def _reassign(self, units: Iterable[Unit]) -> None:
        """Give units to the devices that are predicted to finish them first."""
        load_s = {i: self._load_s(d) for i, d in self._devices.items() if not d.draining}
        touched = set()
        for unit in units:
            work = self._works.get(unit.work)
            if work is None:  # it failed meanwhile
                continue
            able = [i for i in load_s if work.runs_on(self._devices[i].rates)]
            if not able:
                self._orphans.append(unit)
                continue
            roomy = [i for i in able if self._holds(self._devices[i], unit)]
            if not roomy:
                self._fail(unit.work, f"no device has the memory for {_need(unit)} bytes at once")
                continue
            # Where it failed it is tried again only if there is nobody else.
            fresh = [i for i in roomy if i not in unit.failed_on] or roomy
            cost_s = {i: load_s[i] + self._unit_s(self._devices[i], unit) for i in fresh}
            chosen = min(cost_s, key=lambda i: (cost_s[i], i))
            load_s[chosen] = cost_s[chosen]
            self.counters.reissued += 1
            self._enqueue(chosen, self._devices[chosen], unit)
            touched.add(chosen)
        for device_id in sorted(touched):
            self._pump(device_id, self._devices[device_id])

    @staticmethod
    def _holds(device: _Device, unit: Unit) -> bool:
        return _need(unit) <= device.rates.memory_bytes

    def _load_s(self, device: _Device) -> float:
        return sum(self._unit_s(device, u) for u in (*device.running.values(), *device.queue))

    @staticmethod
    def _unit_s(device: _Device, unit: Unit) -> float:
        missing = sum(
            a.nbytes for a in unit.inputs if a.id not in device.held and a.id not in device.needed
        )
        return tile_s(device.rates, missing, unit.flops, unit.output_bytes)

    # --- sending ---

    def _pump(self, device_id: int, device: _Device) -> None:
        """Send as many queued units, with the arrays they need, as the device has room for."""
        while device.queue and len(device.running) < limits.MAX_RUNS_IN_FLIGHT:
            unit = device.queue[0]
            if unit.work not in self._works:  # it failed meanwhile
                device.queue.popleft()
                self._release_needs(device_id, device, unit)
                continue
            missing = []
            for array in unit.inputs:
                if array.id in device.held:
                    device.held.move_to_end(array.id)
                elif array not in missing:
                    missing.append(array)
            room = sum(a.nbytes for a in missing) + unit.output_bytes
            if not self._make_room(device_id, device, unit, room):
                return
            device.queue.popleft()
            self._tell_forgotten(device_id, device)
            for array in missing:
                device.held[array.id] = array
                device.occupied_bytes += array.nbytes
                self._commands.append(events.SendArray(device_id, array))
            self.names.runs += 1
            run = self.names.runs
            device.running[run] = unit
            device.occupied_bytes += unit.output_bytes
            self._commands.append(events.SendRun(device_id, run, unit))
        self._tell_if_much(device_id, device)

    def _make_room(self, device_id: int, device: _Device, unit: Unit, room: int) -> bool:
        """Evict until `room` bytes fit; False when running units must finish first."""
        limit = device.rates.memory_bytes
        if device.occupied_bytes + room <= limit:
            return True
        wanted = {array.id for array in unit.inputs}
        busy = {array.id for u in device.running.values() for array in u.inputs}
        # First what nobody queued needs, then, with nothing running, what is needed only later.
        rounds: list[Callable[[int], bool]] = [lambda i: not device.needed[i]]
        if not device.running:
            rounds.append(lambda i: i not in busy)
        for evictable in rounds:
            for array in list(device.held.values()):
                if device.occupied_bytes + room <= limit:
                    return True
                if array.id not in wanted and evictable(array.id):
                    self._drop(device_id, device, array)
        if device.occupied_bytes + room <= limit:
            return True
        if not device.running:  # the unit alone is too large for this device
            device.queue.popleft()
            self._release_needs(device_id, device, unit)
            self._fail(
                unit.work,
                f"device {device_id} offers {limit} bytes of memory and one unit of this work "
                f"needs {device.occupied_bytes + room}; give devices more memory",
            )
            self._pump(device_id, device)
        return False

    def _drop(self, device_id: int, device: _Device, array: Stored) -> None:
        del device.held[array.id]
        device.occupied_bytes -= array.nbytes
        device.forget.append(array.id)
        device.forget_bytes += array.nbytes
        if not device.needed[array.id]:
            self._unhold(array.id, device_id)

    def _tell_if_much(self, device_id: int, device: _Device) -> None:
        """Arrays that nobody needs are not left on a device for want of a next message."""
        if len(device.forget) >= _DROP_BATCH or device.forget_bytes >= _DROP_BATCH_BYTES:
            self._tell_forgotten(device_id, device)

    def _tell_forgotten(self, device_id: int, device: _Device) -> None:
        device.forget_bytes = 0
        while device.forget:
            some, device.forget = device.forget[: limits.MAX_IDS], device.forget[limits.MAX_IDS :]
            self._commands.append(events.SendDrop(device_id, tuple(some)))

    # --- answers ---

    def _take(self, device_id: int, run: int) -> tuple[_Device, Unit] | None:
        """The unit of a run, taken off the device; None for an answer nobody waits for."""
        device = self._devices.get(device_id)
        unit = device.running.pop(run, None) if device else None
        if device is None or unit is None:
            self.counters.late += 1
            return None
        device.occupied_bytes -= unit.output_bytes
        self._release_needs(device_id, device, unit)
        return device, unit

    def _release_needs(self, device_id: int, device: _Device, unit: Unit) -> None:
        for array in unit.inputs:
            device.needed[array.id] -= 1
            if not device.needed[array.id]:
                del device.needed[array.id]
                if array.id not in device.held:
                    self._unhold(array.id, device_id)
                elif array.operand not in self._arrays:
                    self._drop(device_id, device, array)

    def _result(self, event: events.ResultArrived, now_s: float) -> None:
        taken = self._take(event.device, event.run)
        if taken is None:
            return
        device, unit = taken
        work = self._works.get(unit.work)
        if work is not None:
            self.counters.results += 1
            self._assemble(work.arrived(unit, event.payload))
        self._pump(event.device, device)
        self._finish_draining(event.device, device)

    def _run_failed(self, event: events.RunFailed, now_s: float) -> None:
        taken = self._take(event.device, event.run)
        if taken is None:
            return
        device, unit = taken
        if event.spoiled:
            for array in dict.fromkeys(unit.inputs):
                if array.id in device.held:
                    self._drop(event.device, device, array)
        if unit.work in self._works:
            unit.failed_on.add(event.device)
            unit.failures += 1
            untried = [i for i in self.devices if i not in unit.failed_on]
            if unit.failures >= MAX_FAILURES and not untried:
                self._fail(
                    unit.work,
                    f"a unit failed on every device that was there, {unit.failures} times, "
                    f"last on device {event.device}: {event.reason}",
                )
            else:
                self._reassign([unit])
        self._pump(event.device, device)
        self._finish_draining(event.device, device)

    def _assemble(self, ready: Iterable[tuple[Unit, Any]]) -> None:
        for unit, payload in ready:
            self._commands.append(events.Assemble(unit, payload))

    def _assembled(self, event: events.Assembled, now_s: float) -> None:
        work = self._works.get(event.unit.work)
        if work is None:
            return
        self._assemble(work.assembled(event.unit))
        if work.complete:
            self._complete(work.id)

    def _complete(self, work: int) -> None:
        del self._works[work]
        self._commands.append(events.Finished(work))

    def _fail(self, work: int, reason: str) -> None:
        if self._works.pop(work, None) is None:
            return
        freed = []
        for device_id, device in self._devices.items():
            runs = tuple(run for run, unit in device.running.items() if unit.work == work)
            for run in runs:
                unit = device.running.pop(run)
                device.occupied_bytes -= unit.output_bytes
                self._release_needs(device_id, device, unit)
            if runs:
                self._commands.append(events.SendCancel(device_id, runs))
                freed.append((device_id, device))
        self._commands.append(events.Failed(work, reason))
        for device_id, device in freed:  # what waited for room may go now
            if device_id in self._devices:
                self._pump(device_id, device)
                self._finish_draining(device_id, device)

    # --- operands ---

    def _operand_released(self, event: events.OperandReleased, now_s: float) -> None:
        for array in self._arrays.pop(event.operand, {}).values():
            for device_id in sorted(self._holders.get(array.id, ())):
                device = self._devices[device_id]
                if array.id in device.held and not device.needed[array.id]:
                    self._drop(device_id, device, array)
        for device_id, device in self._devices.items():
            self._tell_if_much(device_id, device)

    def _paused(self, event: events.Paused, now_s: float) -> None:
        for device_id, device in self._devices.items():
            self._tell_forgotten(device_id, device)


def _need(unit: Unit) -> int:
    """Bytes that a device holds at once to do a unit."""
    return sum({a.id: a.nbytes for a in unit.inputs}.values()) + unit.output_bytes
