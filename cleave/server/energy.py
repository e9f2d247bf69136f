"""The energy that the devices of a running server used so far, and what is not known of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from cleave.fleet.coordinator import Session
from cleave.footprint.grid import Grid
from cleave.footprint.meter import Activity, Gap, Used, used_by
from cleave.footprint.typical import Typical
from profiles.device_profile import DeviceProfile

Answer = dict[str, object]


class EnergyMeter:
    """Adds up sessions: those that ended, and those that are asked about.

    A device that measures itself (`energy_j` in its telemetry) is believed; the others are modelled
    by the profile that they state (`cleave.footprint.meter`), or by their class where that does not
    state its power (`cleave.footprint.typical`).

    Args:
        profiles: that devices may state; another name is nobody's.
        typical: what stands in where a profile is silent.
        grid: of the electricity that devices use; None where nobody said.
    """

    def __init__(
        self, profiles: Iterable[DeviceProfile], typical: Typical, grid: Grid | None
    ) -> None:
        self._powers = typical.powers_of(profiles)
        self._grid = grid
        self._past_j = 0.0
        self._past_known = 0
        self._past_unknown = 0
        self._past_gaps: Counter[Gap] = Counter()

    def used(self, session: Session, now_s: float) -> Used | None:
        """What a session used until now; None where it is unknown."""
        measured_j = session.telemetry.get("energy_j")
        if measured_j is not None and measured_j >= 0:
            return Used(measured_j)
        known, rates = self._powers.get(session.profile), session.rates
        if known is None or rates is None:
            return None
        did = Activity(
            now_s - session.opened_s,
            session.compute_s,
            session.downlink_bytes,
            session.uplink_bytes,
            rates.downlink_bytes_per_s,
            rates.uplink_bytes_per_s,
        )
        return used_by(known.power, did, known.assumed)

    def ended(self, session: Session, now_s: float) -> None:
        """A session is over."""
        used = self.used(session, now_s)
        if used is None:
            self._past_unknown += 1
        else:
            self._past_known += 1
            self._past_j += used.energy_j
            self._past_gaps.update(used.gaps)

    def answer(self, here: list[Used | None]) -> Answer:
        """What an overview says of energy; `here` is what the connected sessions used."""
        known = [used for used in here if used is not None]
        devices_j = None
        if known or self._past_known:
            devices_j = self._past_j + sum(used.energy_j for used in known)
        gaps = Counter(gap for used in known for gap in used.gaps)
        assumed = [f"{gaps[gap]} of {len(here)} devices: {gap.value}" for gap in Gap if gaps[gap]]
        ended = self._past_known + self._past_unknown
        assumed += [
            f"{self._past_gaps[gap]} of {ended} sessions that ended: {gap.value}"
            for gap in Gap
            if self._past_gaps[gap]
        ]
        unknown = len(here) - len(known)
        if unknown:
            assumed.append(f"{unknown} of {len(here)} devices: their power is unknown, not counted")
        if self._past_unknown:
            assumed.append(
                f"{self._past_unknown} of {ended} sessions that ended: unknown, not counted"
            )
        assumed.append("chargers, the network and the server itself: not counted")
        if self._grid is None:
            assumed.append("no country is stated (cleave serve --grid): carbon is unknown")
        else:
            grid = self._grid
            assumed.append(
                f"electricity of {grid.country}, {grid.year}: {grid.gco2e_per_kwh:.0f} gCO2e/kWh"
            )
        gco2e = None
        if self._grid is not None and devices_j is not None:
            gco2e = self._grid.gco2e(devices_j)
        return {
            "devices_j": devices_j,
            "ps_j": None,
            "gco2e": gco2e,
            "devices_known": len(known),
            "devices_unknown": unknown,
            "assumed": assumed,
        }
