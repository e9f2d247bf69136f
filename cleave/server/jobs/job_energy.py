"""What devices did for a job, and what the server's machine used: the run's energy record.

Sums are read in the server's loop when the job begins and when it ends. The difference is the
job's, since a server runs one job at a time.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from cleave.energy.account import DeviceUsage
from cleave.energy.run_energy import RunEnergy
from cleave.protocol.device_counters import DeviceCounters
from cleave.scheduler.session import DeviceState, Session
from cleave.server.jobs.fleet_energy import EnergyMeter
from cleave.server.jobs.own_power import OwnPower
from cleave.server.runtime import LiveRuntime
from profiles.device_profile import DeviceKind

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Did:
    """What a session did until some time; `who` names the device across its sessions."""

    who: str
    profile: str
    kind: DeviceKind | None
    flops_per_s: float
    here: bool
    counters: DeviceCounters
    present_s: float
    radio_s: float
    measured_j: float | None

    def since(self, before: _Did | None) -> _Did:
        """Return what was done after an earlier reading."""
        if before is None:
            return self
        own_j = None  # if it was not measured then, the part since is unknown
        if self.measured_j is not None and before.measured_j is not None:
            own_j = max(0.0, self.measured_j - before.measured_j)
        return replace(
            self,
            counters=self.counters - before.counters,
            present_s=self.present_s - before.present_s,
            radio_s=self.radio_s - before.radio_s,
            measured_j=own_j,
        )


def _did(session: Session, now_s: float) -> _Did:
    counters, rates, radio_s = replace(session.counters), session.rates, 0.0
    if rates is not None:
        radio_s = counters.downlink_bytes / rates.downlink_bytes_per_s
        radio_s += counters.uplink_bytes / rates.uplink_bytes_per_s
    identity = f"device {session.identity}" if session.identity is not None else ""
    return _Did(
        identity or f"session {session.id}",
        session.profile,
        session.kind,
        rates.flops_per_s if rates is not None else 0.0,
        _of_this_machine(session.address),
        counters,
        now_s - session.opened_s,
        radio_s,
        session.measured_j(now_s),
    )


def _of_this_machine(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


class JobLog:
    """What sessions did since the log was made. Used in the server's loop only.

    Args:
        sessions: the present sessions, by id.
        now_s: the time on the fleet's clock, in seconds.
    """

    def __init__(self, sessions: Mapping[int, Session], now_s: float) -> None:
        self._before = {s.id: _did(s, now_s) for s in sessions.values() if _works(s)}
        self._past: list[_Did] = []

    def ended(self, session: Session, now_s: float) -> None:
        """Add what a session did that has ended."""
        self._past.append(_did(session, now_s).since(self._before.pop(session.id, None)))

    def usages(
        self, sessions: Mapping[int, Session], now_s: float
    ) -> tuple[tuple[DeviceUsage, ...], int]:
        """Return the usage of devices, and how many devices are on this machine.

        Devices are grouped by profile and kind; those that measure themselves are groups of their
        own.
        """
        here = [
            _did(s, now_s).since(self._before.get(s.id)) for s in sessions.values() if _works(s)
        ]
        alike: defaultdict[tuple[str, DeviceKind | None, bool], list[_Did]] = defaultdict(list)
        for did in (*self._past, *here):
            alike[did.profile, did.kind, did.measured_j is not None].append(did)
        usages = tuple(
            _usage(profile, kind, group, measured=measured)
            for (profile, kind, measured), group in alike.items()
        )
        return usages, len({did.who for did in (*self._past, *here) if did.here})


def _usage(
    profile: str, kind: DeviceKind | None, group: list[_Did], *, measured: bool
) -> DeviceUsage:
    total = sum((did.counters for did in group), DeviceCounters())
    return DeviceUsage(
        profile,
        len({did.who for did in group}),
        sum(did.present_s for did in group),
        total.compute_s,
        sum(did.radio_s for did in group),
        total.downlink_bytes,
        total.uplink_bytes,
        measured_j=sum(did.measured_j or 0.0 for did in group) if measured else None,
        kind=kind,
        flops_per_s=max(did.flops_per_s for did in group),
    )


def _works(session: Session) -> bool:
    return session.state is not DeviceState.JOINING


class JobMeter:
    """The meter of a job's energy, from when it is made until it is closed.

    Its methods may be called in any thread except that of the loop, which must be running.

    Args:
        live: the server's runtime.
        energy: reports sessions that end.
        power: the power of the server's machine.
        steady: the fleet's clock, in seconds.
    """

    def __init__(
        self,
        live: LiveRuntime,
        energy: EnergyMeter,
        power: OwnPower,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._live, self._energy, self._power, self._steady = live, energy, power, steady
        self._began_s, self._ps = steady(), power.used()
        self._log = self._in_loop(self._open)

    def record(self) -> dict[str, Any]:
        """Return the run's energy record up to now."""
        sessions = self._live.manager.sessions
        usages, here = self._in_loop(lambda: self._log.usages(sessions, self._steady()))
        duration_s, drew = self._steady() - self._began_s, self._power.used()
        known = drew.energy_j is not None and self._ps.energy_j is not None
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
        """Stop measuring."""
        self._in_loop(lambda: self._energy.watchers.remove(self._log.ended))

    def _open(self) -> JobLog:
        log = JobLog(self._live.manager.sessions, self._steady())
        self._energy.watchers.append(log.ended)
        return log

    def _in_loop(self, ask: Callable[[], T]) -> T:
        async def asked() -> T:
            return ask()

        loop = self._live.loop
        if loop is None or not loop.is_running():  # the server ends, nobody else is there
            return ask()
        return asyncio.run_coroutine_threadsafe(asked(), loop).result()
