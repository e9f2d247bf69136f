"""Emulate training steps by tiles from array sizes alone, for models of any size.

The GEMMs run in the same order as in training. All matrices are views of a single zero element. A
group of GEMMs that repeats on an idle fleet is emulated once, and its timeline is then replayed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import numpy as np

from cleave.arrays import Buffer, DType
from cleave.fleet.fleet import Fleet
from cleave.fleet.product import GemmFuture, Operand, Side
from cleave.planner.stages.model import PsCompute
from cleave.planner.stages.prediction import local_step_s
from cleave.planner.tiles.boxes import collector_paused
from cleave.protocol.device_counters import DeviceCounters
from cleave.scheduler.counters import FleetCounters
from cleave.scheduler.tiles.gemm_job import RESIDENCY_DEVICES
from cleave.workload.registry import ModelSpec
from cleave.workload.stages import StageSizes, cut_batch
from cleave.workload.step import ONCE, LinearShape, siblings_in_order, step_flops
from emulator.virtual import VirtualRuntime

_NAME_BOUNDS = (2**7, 2**8, 2**16, 2**32)  # msgpack encodes larger integers in more bytes


_DeviceMoment = tuple[int, int, DeviceCounters]  # blocks, FLOPs, and the session's counters


@dataclass(frozen=True, slots=True)
class _Moment:
    """A snapshot, taken while the fleet is idle, of all values that a group of GEMMs changes."""

    now_s: float
    events: int
    counters: FleetCounters
    arrays: int
    runs: int
    tasks: int
    results: int
    devices: dict[int, _DeviceMoment]

    @classmethod
    def of(cls, runtime: VirtualRuntime) -> _Moment:
        scheduler = runtime.manager.scheduler
        devices = {
            number: (
                device.core.blocks,
                device.core.flops,
                replace(runtime.manager.sessions[number].counters),
            )
            for number, device in runtime.devices.items()
            if number in runtime.manager.sessions
        }
        return cls(
            runtime.now_s,
            runtime.events,
            runtime.counters(),
            scheduler.names.arrays,
            scheduler.names.runs,
            scheduler.counters.tasks,
            scheduler.counters.results,
            devices,
        )


class Timelines:
    """Emulates groups of GEMMs on a virtual fleet, or replays their recorded timelines.

    A timeline (elapsed time and counters) is replayed only if the replay is exact. No device may
    behave randomly, and all messages must have the recorded sizes.
    """

    def __init__(self, runtime: VirtualRuntime, *, reuse: bool = True) -> None:
        self.reused_events = 0
        self._runtime = runtime
        self._reuse = reuse
        self._recorded: dict[Hashable, tuple[_Moment, _Moment]] = {}

    def run(self, key: Hashable, group: Callable[[], None]) -> None:
        """Emulate a group of GEMMs, or replay the timeline of an earlier group with an equal key.

        Groups with equal keys must have equal shapes, dtypes and shared operands. `group` submits
        the GEMMs, waits for their results, and releases their operands.
        """
        runtime = self._runtime
        at_rest = runtime.settle() and self._repeatable()
        epoch = runtime.manager.epoch
        known = self._recorded.get((key, epoch))
        if at_rest and known is not None and self._fits(*known):
            self._replay(*known)
            return
        begin = _Moment.of(runtime)
        group()
        if runtime.settle() and at_rest and epoch == runtime.manager.epoch:
            self._recorded[key, epoch] = begin, _Moment.of(runtime)

    def _repeatable(self) -> bool:
        """Return True if reuse is on, all devices are steady, and no observer is registered."""
        runtime = self._runtime
        if not self._reuse or runtime.observers:
            return False
        return all(d.profile.steady for d in runtime.devices.values())

    def _fits(self, begin: _Moment, end: _Moment) -> bool:
        """Return True if no event is due during the replay, and IDs have the recorded sizes."""
        runtime, names = self._runtime, self._runtime.manager.scheduler.names
        if runtime.next_event_s <= runtime.now_s + end.now_s - begin.now_s:
            return False
        for there, then, here in (
            (begin.arrays, end.arrays, names.arrays),
            (begin.runs, end.runs, names.runs),
        ):
            widths = {_width(n) for n in (there + 1, then, here + 1, here + then - there)}
            if len(widths) > 1:
                return False
        return True

    def _replay(self, begin: _Moment, end: _Moment) -> None:
        runtime = self._runtime
        scheduler = runtime.manager.scheduler
        runtime.now_s += end.now_s - begin.now_s
        scheduler.names.arrays += end.arrays - begin.arrays
        scheduler.names.runs += end.runs - begin.runs
        scheduler.counters.tasks += end.tasks - begin.tasks
        scheduler.counters.results += end.results - begin.results
        runtime.add(end.counters - begin.counters)
        for number, (blocks, flops, counters) in end.devices.items():
            blocks_then, flops_then, counters_then = begin.devices[number]
            core = runtime.devices[number].core
            core.blocks += blocks - blocks_then
            core.flops += flops - flops_then
            runtime.manager.sessions[number].counters += counters - counters_then
        self.reused_events += end.events - begin.events


def _width(number: int) -> int:
    return sum(number >= bound for bound in _NAME_BOUNDS)


@dataclass(frozen=True, slots=True)
class SizedStep:
    """Result of a step that took `fleet_s` virtual seconds and `wall_s` real seconds.

    `events` counts the emulated events, and `reused_events` the events of replayed timelines.
    """

    fleet_s: float
    wall_s: float
    events: int
    reused_events: int
    counters: FleetCounters


def server_s(spec: ModelSpec, rows: int, sequence: int, flops_per_s: float) -> float:
    """Return the time in seconds that the server spends on attention if it trains by tiles.

    As in `cleave plan`, this is the time of a step without devices, minus the time that the server
    would need for the devices' GEMMs. `flops_per_s` is the throughput of the server.
    """
    model = StageSizes(spec, sequence, 2, 2).costs(cut_batch(rows, sequence, 1))
    alone_s = local_step_s(model, PsCompute(flops_per_s, 0.0))
    return max(0.0, alone_s - step_flops(spec, rows, sequence) / flops_per_s)


class SizedStepper:
    """Emulates whole steps or single layers on a virtual fleet that computes no results.

    Args:
        fleet: a fleet from `emulated(..., compute=False)`.
        tokens: number of tokens in the batch (sequences times sequence length).
        reuse: True to replay recorded timelines for groups of Linears with equal shapes. Ignored on
            fleets of up to `RESIDENCY_DEVICES` devices, which keep operands between groups.
    """

    def __init__(
        self, fleet: Fleet, spec: ModelSpec, tokens: int, dtype: DType, *, reuse: bool = True
    ) -> None:
        runtime = fleet.runtime
        if not isinstance(runtime, VirtualRuntime):
            raise TypeError("steps without data run only on emulated fleets")
        self._fleet = fleet
        self._runtime = runtime
        self._tokens = tokens
        self._dtype = dtype
        self._resident = fleet.device_count <= RESIDENCY_DEVICES
        self._spec = spec
        self._groups = siblings_in_order(spec)
        self._timelines = None if self._resident else Timelines(runtime, reuse=reuse)
        self._kept: dict[tuple[int, str], Operand] = {}

    @property
    def groups(self) -> int:
        """Return the number of groups of Linears per pass. Linears in a group share their input."""
        return len(self._groups)

    def step(self, progress: Callable[[int, int], None] | None = None) -> SizedStep:
        """Emulate both passes of a step. `progress` receives finished and total group counts."""
        count = self.groups
        order = [(i, True) for i in range(count)] + [(i, False) for i in reversed(range(count))]
        return self._measured(order, progress)

    def layer(self, index: int) -> SizedStep:
        """Emulate the forward and backward passes of decoder layer `index`."""
        in_layers = [i for i, group in enumerate(self._groups) if group[0].name not in ONCE]
        per_layer = len(in_layers) // self._spec.layers
        begin = in_layers[0] + index * per_layer
        end = begin + per_layer
        order = [(i, True) for i in range(begin, end)]
        return self._measured([*order, *((i, False) for i, _ in reversed(order))], None)

    def _measured(
        self, order: list[tuple[int, bool]], progress: Callable[[int, int], None] | None
    ) -> SizedStep:
        runtime, timelines = self._runtime, self._timelines
        begin_s, wall_s = runtime.now_s, time.perf_counter()
        events, counters = runtime.events, runtime.counters()
        reused = timelines.reused_events if timelines else 0
        with collector_paused():  # events create many long-lived objects but no reference cycles
            for done, (index, forward) in enumerate(order):
                self._group(index, forward=forward)
                if progress is not None:
                    progress(done + 1, len(order))
            self._kept.clear()
            runtime.settle()
        return SizedStep(
            runtime.now_s - begin_s,
            time.perf_counter() - wall_s,
            runtime.events - events,
            (timelines.reused_events if timelines else 0) - reused,
            runtime.counters() - counters,
        )

    def _group(self, index: int, *, forward: bool) -> None:
        linears = self._groups[index]

        def run() -> None:
            (self._forward if forward else self._backward)(index, linears)
            if not self._resident:
                self._kept.clear()

        if self._timelines is None:
            run()
        else:
            key = (forward, tuple((s.inputs, s.outputs) for s in linears))
            self._timelines.run(key, run)

    def _forward(self, index: int, linears: tuple[LinearShape, ...]) -> None:
        for linear in linears:
            x = self._operand(index, "x", self._tokens, linear.inputs)
            w = self._operand(index, linear.name, linear.outputs, linear.inputs)
            self._submit(Side(x), Side(w, True)).result()

    def _backward(self, index: int, linears: tuple[LinearShape, ...]) -> None:
        for linear in reversed(linears):
            x = self._operand(index, "x", self._tokens, linear.inputs)
            w = self._operand(index, linear.name, linear.outputs, linear.inputs)
            dy = self._fleet.operand(self._matrix(self._tokens, linear.outputs))
            futures = [self._submit(Side(dy), Side(w)), self._submit(Side(dy, True), Side(x))]
            for future in futures:
                future.result()
            self._kept.pop((index, linear.name), None)
        self._kept.pop((index, "x"), None)

    def _operand(self, index: int, name: str, rows: int, columns: int) -> Operand:
        """Return a matrix's operand, and store it in `_kept` so that other GEMMs can share it."""
        operand = self._kept.get((index, name))
        if operand is None:
            operand = self._fleet.operand(self._matrix(rows, columns))
            self._kept[index, name] = operand
        return operand

    def _submit(self, a: Side, b: Side) -> GemmFuture:
        return self._fleet.submit(a, b, self._matrix(a.shape[0], b.shape[1]))

    def _matrix(self, rows: int, columns: int) -> Buffer:
        zero = np.zeros((), self._dtype.storage)
        return Buffer(np.broadcast_to(zero, (rows, columns)), self._dtype)
