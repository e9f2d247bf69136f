"""The energy used by a server's devices, in total and by a job.

The sessions' counters are read in the server's event loop at the start and at the end of a job. The
difference is the job's work, because a server runs one job at a time."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from cleave.energy.account import DeviceUsage, Ps
from cleave.energy.grid import Grid
from cleave.energy.meter import Basis, Gap, gaps_of, parts_of
from cleave.energy.run_energy import RunEnergy
from cleave.energy.typical import KnownPower, Typical
from cleave.machine.sensors import PowerMeter
from cleave.protocol.device_counters import DeviceCounters
from cleave.scheduler.sessions.session import DeviceState, Session
from cleave.scheduler.sessions.session_manager import MOVED
from cleave.server.runtime import LiveRuntime
from cleave.transport.addresses import is_loopback_address
from profiles.device_profile import DeviceKind, DeviceProfile

Answer = dict[str, object]

_OF_PS: Final = {
    Basis.MEASURED: "the server: all energy that its machine measured since the server started",
    Basis.MODELLED: "the server: as stated with cleave serve --ps-watts",
    Basis.UNKNOWN: "the server: its machine does not measure its power "
    "(state it with cleave serve --ps-watts)",
}


@dataclass(frozen=True, slots=True)
class DeviceEnergy:
    """The energy that a device used in one session."""

    energy_j: float | None  # None if unknown
    basis: Basis  # measured by the device, modelled, or unknown
    gaps: tuple[Gap, ...] = ()  # assumptions behind `energy_j`, and rejected values from the device


@dataclass(frozen=True, slots=True)
class EnergySums:
    """Energy totals over sessions. Add the totals of several servers with `+`."""

    energy_j: float = 0.0
    here: Counter[Basis] = field(default_factory=Counter)  # number of connected devices, by basis
    here_gaps: Counter[Gap] = field(default_factory=Counter)  # number of connected devices, by gap
    ended: Counter[Basis] = field(default_factory=Counter)  # number of ended sessions, by basis
    ended_gaps: Counter[Gap] = field(default_factory=Counter)  # number of ended sessions, by gap

    @classmethod
    def of(cls, here: Iterable[DeviceEnergy]) -> EnergySums:
        """Return the energy totals of connected devices."""
        used = list(here)
        return cls(
            sum(each.energy_j or 0.0 for each in used),
            Counter(each.basis for each in used),
            Counter(gap for each in used for gap in each.gaps),
        )

    def when_ended(self) -> EnergySums:
        """Return the same totals, with connected devices counted as ended sessions."""
        ended, gaps = self.ended + self.here, self.ended_gaps + self.here_gaps
        return EnergySums(self.energy_j, ended=ended, ended_gaps=gaps)

    def __add__(self, other: EnergySums) -> EnergySums:
        return EnergySums(
            self.energy_j + other.energy_j,
            self.here + other.here,
            self.here_gaps + other.here_gaps,
            self.ended + other.ended,
            self.ended_gaps + other.ended_gaps,
        )


class EnergyMeter:
    """Measures the energy that devices use in all sessions, including ended sessions.

    The energy of a session comes from the first available source:

    1. the device's own measurement (`energy_j` in its telemetry), unless it implies more power than
       the device's profile allows;
    2. a model with the power figures in the device's profile (`cleave.energy.meter`);
    3. a model with the figures of a typical device (`cleave.energy.typical`), if the profile has no
       power figures or the device states only its kind.

    Without a `grid`, the carbon emissions are unknown. When a session ends, each of `watchers` is
    called with the session and the time in seconds.
    """

    def __init__(
        self, profiles: Iterable[DeviceProfile], typical: Typical, grid: Grid | None
    ) -> None:
        self._typical = typical
        self._powers = typical.powers_of(profiles)
        self._grid = grid
        self.watchers: list[Callable[[Session, float], None]] = []
        self._past = EnergySums()

    def used(self, session: Session, now_s: float) -> DeviceEnergy:
        """Return the energy that a device has used from the start of its session to `now_s`."""
        own_j = session.measured_j(now_s)
        if own_j is not None:
            return DeviceEnergy(own_j, Basis.MEASURED)
        doubted = (Gap.DOUBTED,) if "energy_j" in session.telemetry else ()
        known = self._known(session)
        if known is None or known.power is None or session.rates is None:
            return DeviceEnergy(None, Basis.UNKNOWN, doubted)
        present_s, compute_s = now_s - session.opened_s, session.counters.compute_s
        parts = parts_of(known.power, present_s, compute_s, _radio_s(session))
        gaps = gaps_of(known.power, known.assumed)
        return DeviceEnergy(parts.energy_j, Basis.MODELLED, gaps + doubted)

    def _known(self, session: Session) -> KnownPower | None:
        known = self._powers.get(session.profile)
        if known is None and session.kind is not None and session.rates is not None:
            return self._typical.power_of_kind(session.kind, session.rates.flops_per_s)
        return known

    def ended(self, session: Session, now_s: float) -> None:
        """Add the energy of a session that just ended, and notify the watchers."""
        self._past += EnergySums.of([self.used(session, now_s)]).when_ended()
        for watcher in self.watchers:
            watcher(session, now_s)

    def sums(self, here: Iterable[DeviceEnergy]) -> EnergySums:
        """Return the totals over all ended sessions and the connected devices in `here`."""
        return self._past + EnergySums.of(here)

    def answer(self, sums: EnergySums, ps: Ps | None = None) -> Answer:
        """Return the energy section of an overview. `ps` is the energy that the PS used."""
        ps = ps or Ps()
        everyone = sums.here + sums.ended
        known, unknown = everyone.total() > everyone[Basis.UNKNOWN], sums.here[Basis.UNKNOWN]
        return {
            "devices_j": sums.energy_j if known else None,
            "ps_j": ps.energy_j,
            "ps_basis": ps.basis.value,
            "gco2e": self._grid.gco2e(sums.energy_j) if self._grid and known else None,
            "devices_known": sums.here.total() - unknown,
            "devices_unknown": unknown,
            "devices_measured": sums.here[Basis.MEASURED],
            "assumed": [*_assumed(sums), _OF_PS[ps.basis], self._of_grid()],
        }

    def _of_grid(self) -> str:
        grid = self._grid
        if grid is None:
            return "carbon is unknown, because no country is stated (cleave serve --grid)"
        return (
            f"electricity of {grid.country}, {grid.year}: {grid.gco2e_per_kwh:.0f} gCO2e/kWh; "
            f"for the devices only"
        )


def _assumed(sums: EnergySums) -> list[str]:
    here, ended = sums.here.total(), sums.ended.total()
    unknown, past_unknown = sums.here[Basis.UNKNOWN], sums.ended[Basis.UNKNOWN]
    gaps, past_gaps = sums.here_gaps, sums.ended_gaps
    assumed = [f"{gaps[gap]} of {here} devices: {gap.value}" for gap in Gap if gaps[gap]]
    assumed += [
        f"{past_gaps[gap]} of {ended} ended sessions: {gap.value}" for gap in Gap if past_gaps[gap]
    ]
    if unknown:
        assumed.append(f"{unknown} of {here} devices: their power is unknown, not counted")
    if past_unknown:
        assumed.append(f"{past_unknown} of {ended} ended sessions: power unknown, not counted")
    assumed.append("chargers and the network: not counted")
    return assumed


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
        """Return a description for users of the source of the energy figures."""
        if self._stated_w is not None:
            return f"{self._stated_w:g} W at the wall socket, as stated"
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
    goes_on: bool = (
        False  # whether the device moved to another server, which counts it as a new device
    )

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


def _is_here(session: Session) -> bool:
    """Return whether the device runs on its server's machine, so that it uses no radio."""
    return session.here or is_loopback_address(session.address)


def _radio_s(session: Session) -> float:
    """Estimate the time that a device spent sending and receiving; 0 on the server's machine."""
    done, rates = session.counters, session.rates
    if rates is None or _is_here(session):
        return 0.0
    down_s = done.downlink_bytes / rates.downlink_bytes_per_s
    return down_s + done.uplink_bytes / rates.uplink_bytes_per_s


def _did(session: Session, now_s: float) -> SessionWork:
    rates = session.rates
    identity = f"device {session.identity}" if session.identity is not None else ""
    return SessionWork(
        identity or f"session {session.id}",
        session.profile,
        session.kind,
        rates.flops_per_s if rates is not None else 0.0,
        _is_here(session),
        replace(session.counters),
        now_s - session.opened_s,
        _radio_s(session),
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
    """Sum the sessions' work by device profile, device kind, and whether energy was measured.

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
