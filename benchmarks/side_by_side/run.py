"""One run: its processes, what disturbs it, and what its steps are measured by."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.links import LimitedNamespace
from benchmarks.side_by_side.faults import STOPPED_S, Disturber
from benchmarks.side_by_side.memory import forget_peak, peak_bytes
from benchmarks.side_by_side.method import Method, Way
from benchmarks.side_by_side.processes import Processes, Started
from benchmarks.side_by_side.row import Row
from benchmarks.side_by_side.setting import Fault, Setting

AFTER_FAULT: Final = 1
"""Whole steps after the one with the fault."""

_FAULT_STEPS: Final = 3 + AFTER_FAULT  # one that is not counted, a calm one, and the disturbed one
_PATIENCE: Final = 5
"""After a fault, a step may take so many calm ones, with `STOPPED_S` and `_WAKE_S`."""

_WAKE_S: Final = 300.0

LONG_STEP_S: Final = 120.0
"""A counted step that takes so long is the only one: another would say the same."""

LONG_FIRST_S: Final = 240.0
"""A first step that takes so long is counted itself, but for Cleave's, which plans in it and sends
what then stays; nothing stays by tiles. Connections, memory and threads take some seconds of it."""


@dataclass
class Run:
    """A run of a method, as its contender sees it.

    Attributes:
        method, setting: what to run.
        model: the model as programs take it: a name of the registry, or a folder.
        counted: the steps to count where nothing disturbs them.
        namespaces: where devices run.
        processes: what was started.
        logs: a folder for this run.
        row: takes what is measured.
        done: whether all has been measured.
    """

    method: Method
    setting: Setting
    model: str
    counted: int
    namespaces: Sequence[LimitedNamespace]
    processes: Processes
    logs: Path
    row: Row
    done: bool = False
    _before: list[tuple[int, int]] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Return all steps, with the first.

        Plain PyTorch does as many as runs with a fault, whose losses are compared with its.
        """
        if self.setting.fault is not Fault.NONE:
            return _FAULT_STEPS
        least = _FAULT_STEPS if self.method.way is Way.PLAIN else 0
        return max(self.counted + 1, least)

    def follow(
        self,
        records: Iterable[dict[str, Any]],
        devices: Sequence[Started] = (),
        server: Started | None = None,
    ) -> None:
        """Measure the steps that a process prints, until all are done.

        Args:
            records: what it prints.
            devices: the processes of devices; the fault meets the last.
            server: the server, or the only process.
        """
        disturber = Disturber(self.setting.fault, self._sender(devices))
        for record in records:
            if record.get("event") == "best":
                self.row.best = str(record["best"])
            if record.get("event") != "step":
                continue
            self._take(record, devices, server)
            step = len(self.row.losses)
            if step == self.steps or self._said_enough():
                self.done = True
                return
            if disturber.step_ended(step, self.row.seconds[-1] if self.row.seconds else 0.0):
                self.row.fault_step = step + 1
            if self.row.fault_step:
                calm = self.row.seconds[0] * _PATIENCE
                self.processes.until_s = time.monotonic() + calm + STOPPED_S + _WAKE_S

    def _said_enough(self) -> bool:
        calm = self.setting.fault is Fault.NONE
        return calm and bool(self.row.seconds) and self.row.seconds[-1] >= LONG_STEP_S

    def _first_counts(self) -> bool:
        calm = self.setting.fault is Fault.NONE
        way = self.method.way
        alike = way is Way.TILES or not way.of_cleave
        return calm and alike and self.row.first_s >= LONG_FIRST_S

    def _sender(self, devices: Sequence[Started]) -> Callable[[signal.Signals], None]:
        def send(number: signal.Signals) -> None:
            victim = devices[-1]
            if number is signal.SIGKILL:
                self.processes.may_end.add(victim.name)
            try:
                victim.signal(number)
            except ProcessLookupError:  # it has ended by itself
                return

        return send

    def _take(
        self, record: dict[str, Any], devices: Sequence[Started], server: Started | None
    ) -> None:
        """Take a step that has just ended. The first is not counted, unless it is long."""
        row = self.row
        row.losses.append(float(record["loss"]))
        now = [namespace.passed_bytes() for namespace in self.namespaces]
        measured = [one for one in (server, *devices) if one is not None]
        virtual = record.get("clock") == "virtual"
        took = float(record["fleet_s"] + record["ps_s"] if virtual else record["wall_s"])
        if len(row.losses) == 1:
            row.first_s = took
            if not self._first_counts():
                self._before = now
                forget_peak([pid for one in measured for pid in one.pids()])
                return
            self._before = [(0, 0)] * len(now)
        row.seconds.append(took)
        counted = len(row.seconds)
        pairs = [*zip(now, self._before, strict=True)]
        row.down_bytes = [(after[0] - before[0]) / counted for after, before in pairs]
        row.up_bytes = [(after[1] - before[1]) / counted for after, before in pairs]
        if virtual:
            row.down_bytes = [record["downlink_bytes"] / self.setting.devices]
            row.up_bytes = [record["uplink_bytes"] / self.setting.devices]
        link = self.setting.link
        both = zip(row.down_bytes, row.up_bytes, strict=True)
        row.links_s = max((down / link.down + up / link.up for down, up in both), default=0.0)
        if floor := record.get("floor_bytes"):
            saved = sum(sum(way.values()) for way in record["saved"].values())
            sent = record["downlink_bytes"] + record["uplink_bytes"]
            row.floor_ratio = (sent + saved) / floor
        if server is not None:
            row.server_peak_bytes = peak_bytes(server.pids())
        row.device_peak_bytes = max((peak_bytes(one.pids()) for one in devices), default=0)
