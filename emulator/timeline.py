"""Recorded timelines: what was emulated once need not be emulated again.

A group of GEMMs that starts on a fleet at rest takes the same course every time: same messages,
same bytes, same seconds. The first time it is emulated event by event and its course recorded;
after that only its sums are added. That is exact where nothing random happens in between, and where
message sizes are the same: names grow, and msgpack writes larger numbers with more bytes, so a
timeline is reused only where its names need as many bytes as those of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from cleave.fleet.runtime import FleetCounters
from emulator.virtual import VirtualShell

_NAME_BOUNDS = (2**7, 2**8, 2**16, 2**32)  # where msgpack needs another byte for a number


@dataclass(frozen=True, slots=True)
class _Moment:
    """Everything that a group of GEMMs changes on a fleet at rest."""

    now_s: float
    events: int
    counters: FleetCounters
    arrays: int
    runs: int
    units: int
    results: int
    devices: dict[int, tuple[int, int, int, float]]  # blocks and FLOPs there, blocks and s here

    @classmethod
    def of(cls, shell: VirtualShell) -> _Moment:
        dispatcher = shell.coordinator.dispatcher
        devices = {
            number: (
                device.core.blocks,
                device.core.flops,
                shell.coordinator.sessions[number].blocks,
                shell.coordinator.sessions[number].compute_s,
            )
            for number, device in shell.devices.items()
            if number in shell.coordinator.sessions
        }
        return cls(
            shell.now_s,
            shell.events,
            shell.counters(),
            dispatcher.names.arrays,
            dispatcher.names.runs,
            dispatcher.counters.units,
            dispatcher.counters.results,
            devices,
        )


@dataclass(frozen=True, slots=True)
class _Timeline:
    begin: _Moment
    end: _Moment

    @property
    def lasts_s(self) -> float:
        return self.end.now_s - self.begin.now_s


class Timelines:
    """Runs groups of GEMMs on a virtual fleet, event by event or from a recorded timeline.

    Args:
        shell: of the fleet.
        reuse: False emulates everything, event by event.

    Attributes:
        reused: how many groups were not emulated.
        reused_events: how many events those would have been.
    """

    def __init__(self, shell: VirtualShell, *, reuse: bool = True) -> None:
        self.reused = 0
        self.reused_events = 0
        self._shell = shell
        self._reuse = reuse
        self._recorded: dict[Hashable, _Timeline] = {}

    def run(self, key: Hashable, group: Callable[[], None]) -> None:
        """Run a group of GEMMs: submit them, await them, release their operands.

        Args:
            key: what makes it the same as another: shapes, dtypes, which operands are shared.
            group: does it.
        """
        shell = self._shell
        at_rest = shell.settle() and self._repeatable()
        begin = _Moment.of(shell)
        known = self._recorded.get((key, shell.coordinator.epoch))
        if at_rest and known is not None and self._fits(known, begin):
            self._replay(known)
            return
        epoch = shell.coordinator.epoch
        group()
        if shell.settle() and at_rest and epoch == shell.coordinator.epoch:
            self._recorded[key, epoch] = _Timeline(begin, _Moment.of(shell))

    def _repeatable(self) -> bool:
        """Whether nothing random happens, and nobody wants to see every message."""
        shell = self._shell
        if not self._reuse or shell.observers:
            return False
        return all(d.profile.steady for d in shell.devices.values())

    def _fits(self, timeline: _Timeline, begin: _Moment) -> bool:
        if self._shell.next_event_s <= begin.now_s + timeline.lasts_s:
            return False
        for name in ("arrays", "runs"):
            there, then = getattr(timeline.begin, name), getattr(timeline.end, name)
            here = getattr(begin, name)
            widths = {_width(n) for n in (there + 1, then, here + 1, here + then - there)}
            if len(widths) > 1:
                return False
        return True

    def _replay(self, timeline: _Timeline) -> None:
        begin, end, shell = timeline.begin, timeline.end, self._shell
        dispatcher = shell.coordinator.dispatcher
        shell.now_s += timeline.lasts_s
        dispatcher.names.arrays += end.arrays - begin.arrays
        dispatcher.names.runs += end.runs - begin.runs
        dispatcher.counters.units += end.units - begin.units
        dispatcher.counters.results += end.results - begin.results
        shell.add(end.counters - begin.counters)
        for number, after in end.devices.items():
            before = begin.devices[number]
            device, session = shell.devices[number], shell.coordinator.sessions[number]
            device.core.blocks += after[0] - before[0]
            device.core.flops += after[1] - before[1]
            session.blocks += after[2] - before[2]
            session.compute_s += after[3] - before[3]
        self.reused += 1
        self.reused_events += end.events - begin.events


def _width(number: int) -> int:
    return sum(number >= bound for bound in _NAME_BOUNDS)
