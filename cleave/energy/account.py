"""The energy and carbon of a run on a fleet, or on a GPU in a data centre. Pure numbers.

Fleet, in joules, summed over its devices (`meter` has E_device):

    E = sum E_device supply + network b + E_ps

b = b_down + b_up is the bytes between devices and the PS. `supply` is energy at the socket over
energy used, or 1 if a power was measured at the wall.
Data centre, with g GPUs of power P for t seconds:

    E = PUE (1 + host_share) g P t

Carbon is in `carbon`. It has two views, because the choice decides the conclusion. *Attributed*
counts the run's share of making the devices. *Sunk cost* does not, because existing devices have
already been made. The formulae follow arXiv 2507.01803 and the baselines in `assumptions.toml`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cleave.energy.assumptions import Assumptions
from cleave.energy.carbon import embodied_gco2e, operational_gco2e
from cleave.energy.meter import Basis, Gap, parts_of
from cleave.energy.typical import KnownPower, Typical
from profiles.device_profile import DeviceKind, DeviceProfile, Embodied, Power


@dataclass(frozen=True, slots=True)
class DeviceUsage:
    """The total usage of all devices of one profile.

    Attributes:
        profile: the profile that the devices state. If it is empty or unknown, their energy is
            unknown unless `active_power_w`, `measured_j` or `kind` determines it.
        present_s, compute_s: seconds connected, and seconds multiplying.
        radio_s: seconds of receiving plus seconds of sending.
        down_bytes, up_bytes: bytes received, and bytes sent.
        active_power_w: stated power of multiplying, above idle; used if the profile has none.
        network_bytes: bytes that cross the network; None means `down_bytes + up_bytes`. Bytes
            between devices count as received and as sent, but cross the network once.
        measured_j: joules that the devices measured themselves; None if they do not measure.
        kind: the kind that the devices state; used if the profile is unknown.
        flops_per_s: throughput of the fastest device; decides whether typical power applies.
    """

    profile: str
    devices: int
    present_s: float
    compute_s: float
    radio_s: float
    down_bytes: float
    up_bytes: float
    active_power_w: float | None = None
    measured_j: float | None = None
    network_bytes: float | None = None
    kind: DeviceKind | None = None
    flops_per_s: float = 0.0

    def kind_by(self, profiles: Mapping[str, DeviceProfile]) -> DeviceKind | None:
        """Return the kind in the profile, or the kind that the devices state."""
        profile = profiles.get(self.profile)
        return profile.kind if profile is not None else self.kind

    @property
    def crossing_bytes(self) -> float:
        """Return the bytes that cross the network, each counted once."""
        both = self.down_bytes + self.up_bytes
        return both if self.network_bytes is None else self.network_bytes


@dataclass(frozen=True, slots=True)
class CloudSpell:
    """The usage of GPUs in a data centre.

    Attributes:
        gpus: number of GPUs that work all that time.
    """

    profile: DeviceProfile
    time_s: float
    gpus: int = 1


@dataclass(frozen=True, slots=True)
class EnergyPart:
    """The energy of one part of a run.

    Attributes:
        energy_j: joules; None if unknown, and then left out of all sums.
    """

    name: str
    energy_j: float | None
    basis: Basis


@dataclass(frozen=True, slots=True)
class Footprint:
    """The energy and carbon of a run.

    Attributes:
        operational_gco2e: carbon of its electricity; None if the grid is unknown.
        embodied_gco2e: the run's share of the carbon of making the devices.
        devices, devices_unknown: number of devices, and of those with unknown energy.
        embodied_unknown: number of devices whose making is unknown and not in `embodied_gco2e`.
        assumed: the assumptions, as texts for people.
    """

    parts: tuple[EnergyPart, ...]
    operational_gco2e: float | None
    embodied_gco2e: float
    devices: int
    devices_unknown: int = 0
    embodied_unknown: int = 0
    assumed: tuple[str, ...] = ()

    @property
    def energy_j(self) -> float:
        """Return the sum of the known parts."""
        return sum(part.energy_j for part in self.parts if part.energy_j is not None)

    @property
    def complete(self) -> bool:
        """Return whether every device's energy is included."""
        return self.devices_unknown == 0

    @property
    def attributed_gco2e(self) -> float | None:
        """Return the carbon of electricity and of making; None if the grid is unknown."""
        if self.operational_gco2e is None:
            return None
        return self.operational_gco2e + self.embodied_gco2e


@dataclass(frozen=True, slots=True)
class Ps:
    """The energy of the parameter server, and its basis."""

    energy_j: float | None = None
    basis: Basis = Basis.UNKNOWN


def fleet_footprint(
    usages: Sequence[DeviceUsage],
    profiles: Mapping[str, DeviceProfile],
    typical: Typical,
    assumptions: Assumptions,
    gco2e_per_kwh: float | None,
    ps: Ps | None = None,
) -> Footprint:
    """Return the energy and carbon of a run on a fleet.

    Args:
        typical: figures to use if profiles lack them.
        gco2e_per_kwh: carbon intensity for devices, network and PS; None if unknown.
        ps: energy of the PS; unknown by default.
    """
    compute_j = idle_j = radio_j = supply_j = measured_j = embodied_g = 0.0
    unknown = unmade = measured = 0
    gaps: Counter[Gap] = Counter()
    standing_in: Counter[DeviceKind] = Counter()
    for usage in usages:
        profile = profiles.get(usage.profile)
        kind = usage.kind_by(profiles)
        known = _power_of(usage, profile, typical)
        ratio = _supply(kind, assumptions) if kind is not None else 1.0
        if usage.measured_j is not None:
            measured += usage.devices
            measured_j += usage.measured_j
            supply_j += usage.measured_j * (ratio - 1)
        elif known.power is None:
            unknown += usage.devices
        else:
            computing_s = min(usage.compute_s, usage.present_s)
            parts = parts_of(known.power, usage.present_s, computing_s, usage.radio_s)
            compute_j += parts.compute_j
            idle_j += parts.idle_j
            radio_j += parts.radio_j
            # A power measured at the wall includes the loss, but the radio's share was added.
            lossy_j = parts.radio_j if known.power.at_wall else parts.energy_j
            supply_j += lossy_j * (ratio - 1)
            gaps.update(dict.fromkeys(_gaps(known), usage.devices))
        own = profile.embodied if profile is not None else None
        made_g = None
        if kind is not None:
            made_g = _making(kind, own, usage.present_s, assumptions)
        if kind is None or made_g is None:
            unmade += usage.devices
        else:
            embodied_g += made_g
            if own is None:
                standing_in[kind] += usage.devices
    nbytes = sum(usage.crossing_bytes for usage in usages)
    network_j = nbytes * assumptions.network_j_per_byte.value
    ps = ps or Ps()
    modelled = Basis.MODELLED
    measured_part = [EnergyPart(_MEASURED, measured_j, Basis.MEASURED)] if measured else []
    found = (
        *measured_part,
        EnergyPart("devices, multiplying", compute_j, modelled),
        EnergyPart("devices, waiting", idle_j, modelled),
        EnergyPart("devices, radio", radio_j, modelled),
        EnergyPart("chargers and power supplies", supply_j, modelled),
        EnergyPart("network", network_j, modelled),
        EnergyPart("parameter server", ps.energy_j, ps.basis),
    )
    energy_j = sum(part.energy_j for part in found if part.energy_j is not None)
    devices = sum(usage.devices for usage in usages)
    assumed = []
    if measured:
        assumed.append(f"{measured} of {devices} devices: energy as they measured it themselves")
    assumed += [f"{gaps[gap]} of {devices} devices: {gap.value}" for gap in Gap if gaps[gap]]
    assumed += [
        f"{count} of {devices} devices: made like a typical {kind.value} "
        f"({assumptions.embodied_gco2e[kind].value / 1000:g} kgCO2e), as theirs is not known"
        for kind, count in standing_in.items()
    ]
    if unknown:
        assumed.append(f"{unknown} of {devices} devices: their power is unknown, not counted")
    if unmade:
        assumed.append(f"{unmade} of {devices} devices: making them is unknown, not counted")
    if ps.energy_j is None:
        assumed.append("the parameter server's energy is unknown: not counted")
    assumed.append("making the parameter server: nobody says which machine it is, not counted")
    return Footprint(
        found,
        None if gco2e_per_kwh is None else operational_gco2e(energy_j, gco2e_per_kwh),
        embodied_g,
        devices,
        unknown,
        unmade,
        tuple(assumed),
    )


def cloud_footprint(
    usage: CloudSpell, assumptions: Assumptions, gco2e_per_kwh: float | None
) -> Footprint:
    """Return the energy and carbon of a run in a data centre.

    Args:
        usage: usage of GPUs whose profile states its `compute_w`.
        gco2e_per_kwh: carbon intensity of the data centre; None if unknown.

    Raises:
        ValueError: when the GPU's power is unknown.
    """
    profile, power = usage.profile, usage.profile.power
    if power is None or power.compute_w is None:
        raise ValueError(
            f"the power of {profile.name!r} is not known, so neither is its energy; "
            f"compare with a profile that states compute_w"
        )
    gpu_j = usage.gpus * power.compute_w * usage.time_s
    host_j = gpu_j * assumptions.host_share.value
    overhead_j = (gpu_j + host_j) * (assumptions.pue.value - 1)
    made_g = _making(profile.kind, profile.embodied, usage.time_s * usage.gpus, assumptions)
    assumed = [
        f"the GPU draws {power.compute_w:g} W all the time",
        f"what is around it {assumptions.host_share.value:.0%} of that, "
        f"the building {assumptions.pue.value - 1:.0%} on top (PUE {assumptions.pue.value:g})",
    ]
    if made_g is None:
        assumed.append(f"making {profile.name} is unknown: not counted")
    elif profile.embodied is None:
        typical = assumptions.embodied_gco2e[profile.kind]
        assumed.append(
            f"made like a typical {profile.kind.value} ({typical.value / 1000:g} kgCO2e), "
            f"as its own is not known"
        )
    found = (
        EnergyPart("GPU", gpu_j, Basis.MODELLED),
        EnergyPart("host", host_j, Basis.MODELLED),
        EnergyPart("data centre (PUE)", overhead_j, Basis.MODELLED),
    )
    energy_j = gpu_j + host_j + overhead_j
    return Footprint(
        found,
        None if gco2e_per_kwh is None else operational_gco2e(energy_j, gco2e_per_kwh),
        made_g or 0.0,
        usage.gpus,
        embodied_unknown=usage.gpus if made_g is None else 0,
        assumed=tuple(assumed),
    )


_MEASURED = "devices, as they measured it"


def _power_of(usage: DeviceUsage, profile: DeviceProfile | None, typical: Typical) -> KnownPower:
    """Return the devices' power: from profile or kind, else what their fleet file states."""
    known = KnownPower(None)
    if profile is not None:
        known = typical.power_of(profile)
    elif usage.kind is not None:
        known = typical.power_of_kind(usage.kind, usage.flops_per_s)
    if known.power is None and usage.active_power_w is not None:
        return KnownPower(Power(compute_w=usage.active_power_w), (Gap.STATED,))
    return known


def _supply(kind: DeviceKind, assumptions: Assumptions) -> float:
    figure = assumptions.supply_ratio.get(kind)
    return figure.value if figure is not None else 1.0


def _gaps(known: KnownPower) -> list[Gap]:
    gaps = list(known.assumed)
    if known.power is not None and known.power.idle_w is None:
        gaps.append(Gap.IDLE)
    if known.power is not None and known.power.radio_w is None:
        gaps.append(Gap.RADIO)
    return gaps


def _making(
    kind: DeviceKind, own: Embodied | None, used_s: float, assumptions: Assumptions
) -> float | None:
    """Return the share of the carbon of making devices for their use, in gCO2e; None if unknown."""
    stand_in = assumptions.embodied_gco2e.get(kind)
    lifetime = assumptions.lifetime_years.get(kind)
    years = assumptions.one_lifetime_years
    if years is None:
        years = own.lifetime_years if own is not None else lifetime.value if lifetime else None
    made = own.gco2e if own is not None else stand_in.value if stand_in else None
    if made is None or years is None:
        return None
    return embodied_gco2e(made, used_s, years, assumptions.utilisation.value)
