"""Compute a job's energy record from the sessions' work and the server's own energy.

The sessions' counters are read in the server's event loop at the start and at the end of a job. The
difference is the job's work, because a server runs one job at a time.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from cleave.energy.account import DeviceUsage, Ps
from cleave.energy.meter import Basis
from cleave.energy.run_energy import RunEnergy
from cleave.machine.sensors import PowerMeter
from cleave.protocol.device_counters import DeviceCounters
from cleave.scheduler.sessions.session import DeviceState, Session
from cleave.scheduler.sessions.session_manager import MOVED
from cleave.server.jobs.fleet_energy import EnergyMeter
from cleave.server.runtime import LiveRuntime
from cleave.transport.addresses import is_loopback_address
from profiles.device_profile import DeviceKind

SAMPLE_S = 60.0
"""Time between samples of the energy counters, too short for a counter to overflow twice."""


class OwnPower:
    """Measures the energy that this machine has used since this object was created. Thread-safe.

    `stated_w` is the machine's power draw at the wall socket, in watts, as stated by the owner. If
    it is None, `meter` measures the energy with the machine's sensors, if any.
    """

    def __init__(
        self,
        meter: PowerMeter,
        stated_w: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._meter, self._stated_w, self._clock = meter, stated_w, clock
        self._began_s = clock()
        self._lock = threading.Lock()
        meter.sample()

    @property
    def source(self) -> str:
        """Return where the energy figures come from, in words for users."""
        if self._stated_w is not None:
            return f"{self._stated_w:g} W at the socket, as stated"
        return self._meter.source

    def used(self) -> Ps:
        """Return the energy that the machine has used since this object was created."""
        if self._stated_w is not None:
            return Ps(self._stated_w * (self._clock() - self._began_s), Basis.MODELLED)
        with self._lock:
            self._meter.sample()
            joules = self._meter.joules
        return Ps() if joules is None else Ps(joules, Basis.MEASURED)


@dataclass(frozen=True, slots=True)
class SessionWork:
    """The work that a device did in one session, or in a part of the session."""

    who: str  # identifies the device, across sessions if it has an identity
    profile: str
    kind: DeviceKind | None
    flops_per_s: float  # 0 if unknown
    here: bool  # whether the device runs on the server's machine
    counters: DeviceCounters
    present_s: float
    radio_s: float  # estimated time spent sending and receiving
    measured_j: float | None  # energy that the device measured; None if not measured
    goes_on: bool = False  # whether the device moved to another server, which counts it as new

    def since(self, before: SessionWork | None) -> SessionWork:
        """Return the work since an earlier reading `before`; all work if `before` is None."""
        if before is None:
            return self
        own_j = None  # unknown without an earlier measurement
        if self.measured_j is not None and before.measured_j is not None:
            own_j = max(0.0, self.measured_j - before.measured_j)
        return replace(
            self,
            counters=self.counters - before.counters,
            present_s=self.present_s - before.present_s,
            radio_s=self.radio_s - before.radio_s,
            measured_j=own_j,
        )


def _did(session: Session, now_s: float) -> SessionWork:
    counters, rates, radio_s = replace(session.counters), session.rates, 0.0
    here = session.here or is_loopback_address(session.address)
    if rates is not None and not here:
        radio_s = counters.downlink_bytes / rates.downlink_bytes_per_s
        radio_s += counters.uplink_bytes / rates.uplink_bytes_per_s
    identity = f"device {session.identity}" if session.identity is not None else ""
    return SessionWork(
        identity or f"session {session.id}",
        session.profile,
        session.kind,
        rates.flops_per_s if rates is not None else 0.0,
        here,
        counters,
        now_s - session.opened_s,
        radio_s,
        session.measured_j(now_s),
        session.identity is None and session.reason == MOVED,
    )


class JobLog:
    """A log of the work that each session does after the log is created. Not thread-safe."""

    def __init__(self, sessions: Mapping[int, Session], now_s: float) -> None:
        self._before = {s.id: _did(s, now_s) for s in sessions.values() if _works(s)}
        self._past: list[SessionWork] = []

    def ended(self, session: Session, now_s: float) -> None:
        """Add the work of a session that just ended to the log."""
        self._past.append(_did(session, now_s).since(self._before.pop(session.id, None)))

    def did(self, sessions: Mapping[int, Session], now_s: float) -> list[SessionWork]:
        """Return the work of each session since the log was created, including ended sessions."""
        here = [
            _did(s, now_s).since(self._before.get(s.id)) for s in sessions.values() if _works(s)
        ]
        return [*self._past, *here]


def usages_of(did: Sequence[SessionWork]) -> tuple[tuple[DeviceUsage, ...], int]:
    """Sum sessions' work by device profile, device kind, and whether energy was measured.

    Return the usage of each group, and the number of devices that run on their server's machine.
    """
    alike: defaultdict[tuple[str, DeviceKind | None, bool], list[SessionWork]] = defaultdict(list)
    for each in did:
        alike[each.profile, each.kind, each.measured_j is not None].append(each)
    usages = tuple(
        _usage(profile, kind, group, measured=measured)
        for (profile, kind, measured), group in alike.items()
    )
    return usages, len({each.who for each in did if each.here and not each.goes_on})


def _usage(
    profile: str, kind: DeviceKind | None, group: list[SessionWork], *, measured: bool
) -> DeviceUsage:
    total = sum((did.counters for did in group), DeviceCounters())
    away = [did.counters for did in group if not did.here]
    return DeviceUsage(
        profile,
        max(1, len({did.who for did in group if not did.goes_on})),
        sum(did.present_s for did in group),
        total.compute_s,
        sum(did.radio_s for did in group),
        total.downlink_bytes,
        total.uplink_bytes,
        network_bytes=float(sum(each.downlink_bytes + each.uplink_bytes for each in away)),
        measured_j=sum(did.measured_j or 0.0 for did in group) if measured else None,
        kind=kind,
        flops_per_s=max(did.flops_per_s for did in group),
    )


def _works(session: Session) -> bool:
    return session.state is not DeviceState.JOINING


class WorkLog(Protocol):
    """Interface for counting the work that each session does for a job, at one or more servers."""

    def begin(self) -> None:
        """Start to count each session's work."""

    def did(self) -> list[SessionWork]:
        """Return the work of each session since `begin`."""

    def end(self) -> None:
        """Stop counting the sessions' work."""


class ServerLog:
    """A `WorkLog` of one server, for use outside the server's event loop.

    `steady` is the fleet's clock, in seconds.
    """

    def __init__(
        self, live: LiveRuntime, energy: EnergyMeter, steady: Callable[[], float] = time.monotonic
    ) -> None:
        self._live, self._energy, self._steady = live, energy, steady
        self._log: JobLog | None = None

    def begin(self) -> None:
        self.end()

        def opened() -> JobLog:
            log = JobLog(self._live.manager.sessions, self._steady())
            self._energy.watchers.append(log.ended)
            return log

        self._log = self._live.in_loop(opened)

    def did(self) -> list[SessionWork]:
        """Return each session's work since `begin`; empty if `begin` was never called."""
        log, live = self._log, self._live
        if log is None:
            return []
        return live.in_loop(lambda: log.did(live.manager.sessions, self._steady()))

    def end(self) -> None:
        if (log := self._log) is not None:
            self._log = None
            self._live.in_loop(lambda: self._energy.watchers.remove(log.ended))


class JobMeter:
    """Measures the energy used for a job. Do not use it in a server's event loop.

    If some servers run on other machines (`alone` is False), the record omits the servers' energy,
    because the energy that the other machines use is unknown.
    """

    def __init__(
        self,
        logs: Sequence[WorkLog],
        power: OwnPower,
        steady: Callable[[], float] = time.monotonic,
        *,
        alone: bool = True,
    ) -> None:
        self._logs, self._power, self._steady, self._alone = logs, power, steady, alone
        self._began_s, self._ps = steady(), power.used()
        for log in logs:
            log.begin()

    def record(self) -> dict[str, Any]:
        """Return the job's energy record for the time since the meter was created."""
        usages, here = usages_of([work for log in self._logs for work in log.did()])
        duration_s, drew = self._steady() - self._began_s, self._power.used()
        known = drew.energy_j is not None and self._ps.energy_j is not None and self._alone
        return RunEnergy(
            duration_s,
            duration_s,
            usages,
            (drew.energy_j or 0.0) - (self._ps.energy_j or 0.0) if known else None,
            self._power.source if known else "",
            virtual=False,
            devices_here=here,
            machine_basis=drew.basis,
        ).to_record()

    def close(self) -> None:
        """Stop counting the sessions' work at all servers."""
        for log in self._logs:
            log.end()
