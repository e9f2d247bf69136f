"""One run: its processes, its fault, and the measurement of its steps."""

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
"""Number of whole steps after the step with the fault."""

_FAULT_STEPS: Final = 3 + AFTER_FAULT  # an uncounted, an undisturbed and a disturbed step
_PATIENCE: Final = 5
"""Limit of a step after a fault in undisturbed steps, in addition to `STOPPED_S` and `_WAKE_S`."""

_WAKE_S: Final = 300.0

LONG_STEP_S: Final = 120.0
"""After a counted step of this length no more are counted; they would show the same."""

LONG_FIRST_S: Final = 240.0
"""A first step of this length counts itself, except for Cleave, which plans in it and sends data
that then stays (but nothing stays by tiles). Connections, memory and threads take some seconds."""


@dataclass
class Run:
    """A run of a method, as its contender sees it.

    Attributes:
        method, setting: the method and the setting.
        model: name in the registry, or folder of the model.
        counted: number of steps to count without a fault.
        namespaces: namespaces of the devices.
        processes: processes of the run.
        logs: folder for this run.
        row: row that receives the results.
        done: whether everything has been measured.
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
        """Return the number of all steps, including the first.

        Plain PyTorch runs at least as many as runs with a fault, whose losses are compared with it.
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
            records: records that the process prints.
            devices: device processes; the fault hits the last.
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
            except ProcessLookupError:  # the process has already ended
                return

        return send

    def _take(
        self, record: dict[str, Any], devices: Sequence[Started], server: Started | None
    ) -> None:
        """Record a finished step. The first does not count, unless it is long."""
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
