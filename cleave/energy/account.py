"""The energy and carbon of a run on a fleet, or on a GPU in a data centre.

    fleet:        E = sum E_device supply + network b + E_ps
    data centre:  E = PUE (1 + host_share) P t           a GPU of power P for t seconds

`meter` computes E_device. `supply` is energy drawn from the socket divided by energy used by the
device. It is 1 if the power was measured at the socket. `network` is joules per byte, and b is the
number of bytes sent over the network. *Attributed* carbon includes the run's share of the carbon
of manufacturing the devices. *Sunk cost* carbon excludes this share, because the devices existed
before the run. The formulae follow arXiv 2507.01803.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cleave.energy.grid import embodied_gco2e, operational_gco2e
from cleave.energy.meter import Basis, Gap, gaps_of, parts_of
from cleave.energy.typical import Assumptions, KnownPower, Typical
from profiles.device_profile import DeviceKind, DeviceProfile, Embodied, Power


@dataclass(frozen=True, slots=True)
class DeviceUsage:
    """The usage of all devices with the same profile. Times, bytes and joules are totals.

    Attributes:
        profile: profile name that the devices report; may be empty or unknown.
        present_s: time for which the devices were connected.
        radio_s: time spent receiving plus time spent sending.
        active_power_w: power above idle while computing, from the fleet file; used if neither
            profile nor kind determines a power.
        measured_j: energy that the devices measured themselves; None without a measurement.
        network_bytes: bytes that crossed the network; None means `down_bytes + up_bytes`. A byte
            between two devices is both sent and received, but crosses the network once.
        kind: the kind that the devices report; used if the profile is unknown.
        flops_per_s: throughput of the fastest device. The kind's typical power while computing is
            used only for low throughputs.
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
        """Return the device kind in the profile, or the reported kind if the profile is unknown."""
        profile = profiles.get(self.profile)
        return profile.kind if profile is not None else self.kind

    @property
    def crossing_bytes(self) -> float:
        """Return the number of bytes that crossed the network. Each byte is counted once."""
        both = self.down_bytes + self.up_bytes
        return both if self.network_bytes is None else self.network_bytes


@dataclass(frozen=True, slots=True)
class CloudUsage:
    """The usage of a GPU in a data centre. The GPU computes for `time_s` seconds."""

    profile: DeviceProfile
    time_s: float


@dataclass(frozen=True, slots=True)
class EnergyPart:
    """The energy of one part of a footprint, such as the network.

    Attributes:
        energy_j: energy of the part; None if unknown. Totals exclude unknown energy.
    """

    name: str
    energy_j: float | None
    basis: Basis


@dataclass(frozen=True, slots=True)
class Footprint:
    """The energy and carbon of a run.

    Attributes:
        gco2e_per_kwh: carbon intensity of the run's electricity; None if unknown.
        embodied_gco2e: the run's share of manufacturing carbon, as far as known.
        devices_unknown: number of devices whose energy is unknown.
        embodied_unknown: number of devices whose manufacturing carbon is unknown.
        assumed: descriptions of the assumptions, shown to the user.
    """

    parts: tuple[EnergyPart, ...]
    gco2e_per_kwh: float | None
    embodied_gco2e: float
    devices: int
    devices_unknown: int = 0
    embodied_unknown: int = 0
    assumed: tuple[str, ...] = ()

    @property
    def energy_j(self) -> float:
        """Return the total energy in joules, without the parts whose energy is unknown."""
        return sum(part.energy_j for part in self.parts if part.energy_j is not None)

    @property
    def operational_gco2e(self) -> float | None:
        """Return the carbon of the run's electricity in gCO2e; None if unknown."""
        if self.gco2e_per_kwh is None or not self.known:
            return None
        return operational_gco2e(self.energy_j, self.gco2e_per_kwh)

    @property
    def complete(self) -> bool:
        """Return True if the energy of every device is known."""
        return self.devices_unknown == 0

    @property
    def known(self) -> bool:
        """Return False if no part's energy is known, so that the total means nothing."""
        return self.energy_j > 0 or (self.devices > 0 and self.complete)

    @property
    def attributed_gco2e(self) -> float | None:
        """Return the run's carbon in gCO2e, including a manufacturing share; None if unknown."""
        operational = self.operational_gco2e
        return None if operational is None else operational + self.embodied_gco2e


@dataclass(frozen=True, slots=True)
class Ps:
    """The energy of the parameter server. `energy_j` is None if unknown."""

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
        usages: usage of the devices, grouped by profile.
        profiles: maps the name of a profile to the profile.
        typical: typical power, used for devices whose profile specifies no power.
        gco2e_per_kwh: carbon intensity of electricity for devices, network and PS; None if unknown.
        ps: energy of the PS; None if unknown.
    """
    compute_j = idle_j = radio_j = supply_j = measured_j = embodied_g = 0.0
    unknown = unmade = measured = 0
    gaps: Counter[Gap] = Counter()
    standing_in: Counter[DeviceKind] = Counter()
    for usage in usages:
        profile = profiles.get(usage.profile)
        kind = usage.kind_by(profiles)
        known = _power_of(usage, profile, typical)
        supply = assumptions.supply_ratio.get(kind) if kind is not None else None
        ratio = supply.value if supply is not None else 1.0
        if usage.measured_j is not None:
            measured += usage.devices
            measured_j += usage.measured_j
            supply_j += usage.measured_j * (ratio - 1)
        elif known.power is None:
            unknown += usage.devices
        else:
            parts = parts_of(known.power, usage.present_s, usage.compute_s, usage.radio_s)
            compute_j += parts.compute_j
            idle_j += parts.idle_j
            radio_j += parts.radio_j
            # Power measured at the socket includes the loss of the power supply. The radio's power
            # does not include this loss.
            lossy_j = parts.radio_j if known.power.at_wall else parts.energy_j
            supply_j += lossy_j * (ratio - 1)
            gaps.update(dict.fromkeys(gaps_of(known.power, known.assumed), usage.devices))
        own = profile.embodied if profile is not None else None
        made_g = _making(kind, own, usage.present_s, assumptions) if kind is not None else None
        if kind is None or made_g is None:
            unmade += usage.devices
        else:
            embodied_g += made_g
            if own is None:
                standing_in[kind] += usage.devices
    nbytes = sum(usage.crossing_bytes for usage in usages)
    ps = ps or Ps()
    devices = sum(usage.devices for usage in usages)
    modelled_j: dict[str, float | None] = {
        "devices, multiplying": compute_j,
        "devices, waiting": idle_j,
        "devices, radio": radio_j,
    }
    if unknown and unknown + measured == devices:
        modelled_j = dict.fromkeys(modelled_j)
    modelled_j["chargers and power supplies"] = None if unknown and unknown == devices else supply_j
    modelled_j["network"] = nbytes * assumptions.network_j_per_byte.value
    found = [
        EnergyPart(name, joules, Basis.UNKNOWN if joules is None else Basis.MODELLED)
        for name, joules in modelled_j.items()
    ]
    found.append(EnergyPart("parameter server", ps.energy_j, ps.basis))
    assumed = []
    if measured:
        found.insert(0, EnergyPart("devices, measured by themselves", measured_j, Basis.MEASURED))
        assumed.append(f"{measured} of {devices} devices: energy measured by the devices")
    assumed += [f"{gaps[gap]} of {devices} devices: {gap.value}" for gap in Gap if gaps[gap]]
    assumed += [
        f"{count} of {devices} devices: made like a typical {kind.value} "
        f"({assumptions.embodied_gco2e[kind].value / 1000:g} kgCO2e), because theirs is unknown"
        for kind, count in standing_in.items()
    ]
    if unknown:
        assumed.append(f"{unknown} of {devices} devices: power unknown, not counted")
    if unmade:
        assumed.append(f"{unmade} of {devices} devices: carbon of making unknown, not counted")
    if ps.energy_j is None:
        assumed.append("the parameter server's energy is unknown, and not counted")
    assumed.append("making the parameter server is not counted, because its model is unknown")
    return Footprint(
        tuple(found), gco2e_per_kwh, embodied_g, devices, unknown, unmade, tuple(assumed)
    )


def cloud_footprint(
    usage: CloudUsage, assumptions: Assumptions, gco2e_per_kwh: float | None
) -> Footprint:
    """Return the energy and carbon of a run in a data centre.

    Raises:
        ValueError: if the profile of the GPU does not specify `compute_w`.
    """
    profile, power = usage.profile, usage.profile.power
    if power is None or power.compute_w is None:
        raise ValueError(
            f"the power of {profile.name!r} is unknown, and so is its energy; "
            f"compare with a profile that has compute_w"
        )
    gpu_j = power.compute_w * usage.time_s
    host_j = gpu_j * assumptions.host_share.value
    overhead_j = (gpu_j + host_j) * (assumptions.pue.value - 1)
    made_g = _making(profile.kind, profile.embodied, usage.time_s, assumptions)
    assumed = [
        f"the GPU draws {power.compute_w:g} W all the time",
        f"its host adds {assumptions.host_share.value:.0%}, and the building "
        f"{assumptions.pue.value - 1:.0%} of the total (PUE {assumptions.pue.value:g})",
    ]
    if made_g is None:
        assumed.append(f"carbon of making {profile.name} unknown, not counted")
    elif profile.embodied is None:
        typical = assumptions.embodied_gco2e[profile.kind]
        assumed.append(
            f"made like a typical {profile.kind.value} ({typical.value / 1000:g} kgCO2e), "
            f"because its own is unknown"
        )
    found = (
        EnergyPart("GPU", gpu_j, Basis.MODELLED),
        EnergyPart("host", host_j, Basis.MODELLED),
        EnergyPart("data centre (PUE)", overhead_j, Basis.MODELLED),
    )
    return Footprint(
        found,
        gco2e_per_kwh,
        made_g or 0.0,
        1,
        embodied_unknown=1 if made_g is None else 0,
        assumed=tuple(assumed),
    )


def _power_of(usage: DeviceUsage, profile: DeviceProfile | None, typical: Typical) -> KnownPower:
    """Return a device's power from its profile or kind, or else from the fleet file."""
    known = KnownPower(None)
    if profile is not None:
        known = typical.power_of(profile)
    elif usage.kind is not None:
        known = typical.power_of_kind(usage.kind, usage.flops_per_s)
    if known.power is None and usage.active_power_w is not None:
        return KnownPower(Power(compute_w=usage.active_power_w), (Gap.STATED,))
    return known


def _making(
    kind: DeviceKind, own: Embodied | None, used_s: float, assumptions: Assumptions
) -> float | None:
    """Return a run's share of a device's manufacturing carbon in gCO2e; None if unknown.

    `own` is the figure from the device's profile. If None, the typical figure of the kind is used.
    """
    stand_in = assumptions.embodied_gco2e.get(kind)
    lifetime = assumptions.lifetime_years.get(kind)
    years = assumptions.one_lifetime_years
    if years is None:
        years = own.lifetime_years if own is not None else lifetime.value if lifetime else None
    made = own.gco2e if own is not None else stand_in.value if stand_in else None
    if made is None or years is None:
        return None
    return embodied_gco2e(made, used_s, years, assumptions.utilisation.value)
