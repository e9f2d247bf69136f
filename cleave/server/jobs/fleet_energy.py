"""The total energy used by a server's devices, and the assumptions behind the total."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from cleave.energy.account import Ps
from cleave.energy.grid import Grid
from cleave.energy.meter import Activity, Basis, Gap, used_by
from cleave.energy.typical import KnownPower, Typical
from cleave.scheduler.sessions.session import Session
from profiles.device_profile import DeviceProfile

Answer = dict[str, object]

_OF_PS: Final = {
    Basis.MEASURED: "the server: what its machine measured since the server began, all it does",
    Basis.MODELLED: "the server: as stated by cleave serve --ps-watts",
    Basis.UNKNOWN: "the server: its machine does not tell what it draws "
    "(cleave serve --ps-watts says)",
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
    here: Counter[Basis] = field(default_factory=Counter)  # connected devices by basis
    here_gaps: Counter[Gap] = field(default_factory=Counter)  # connected devices by gap
    ended: Counter[Basis] = field(default_factory=Counter)  # ended sessions by basis
    ended_gaps: Counter[Gap] = field(default_factory=Counter)  # ended sessions by gap

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
        known, rates = self._known(session), session.rates
        used = None
        if known is not None and rates is not None:
            did = Activity(
                now_s - session.opened_s,
                session.counters.compute_s,
                session.counters.downlink_bytes,
                session.counters.uplink_bytes,
                rates.downlink_bytes_per_s,
                rates.uplink_bytes_per_s,
            )
            used = used_by(known.power, did, known.assumed)
        if used is None:
            return DeviceEnergy(None, Basis.UNKNOWN, doubted)
        return DeviceEnergy(used.energy_j, Basis.MODELLED, used.gaps + doubted)

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
            return "no country is stated (cleave serve --grid): carbon is unknown"
        return (
            f"electricity of {grid.country}, {grid.year}: {grid.gco2e_per_kwh:.0f} gCO2e/kWh; "
            f"of the devices alone"
        )


def _assumed(sums: EnergySums) -> list[str]:
    here, ended = sums.here.total(), sums.ended.total()
    unknown, past_unknown = sums.here[Basis.UNKNOWN], sums.ended[Basis.UNKNOWN]
    gaps, past_gaps = sums.here_gaps, sums.ended_gaps
    assumed = [f"{gaps[gap]} of {here} devices: {gap.value}" for gap in Gap if gaps[gap]]
    assumed += [
        f"{past_gaps[gap]} of {ended} sessions that ended: {gap.value}"
        for gap in Gap
        if past_gaps[gap]
    ]
    if unknown:
        assumed.append(f"{unknown} of {here} devices: their power is unknown, not counted")
    if past_unknown:
        assumed.append(f"{past_unknown} of {ended} sessions that ended: unknown, not counted")
    assumed.append("chargers and the network: not counted")
    return assumed
