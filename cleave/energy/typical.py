"""Assumed values for figures that were not measured, such as the power of a device class.

Typical power is the median of power values measured on devices of the same class, except for
radios and graphics cards. `typical.toml` lists the devices with sources. Reports flag each typical
figure (see `Gap`).

The other figures, their ranges and sources are in `assumptions.toml`. Figures from Boavizta are in
`embodied.toml`, under Boavizta's licence.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from importlib.resources import files
from statistics import median
from typing import Any

import msgspec

from cleave.energy.meter import Gap
from profiles.device_profile import DeviceKind, DeviceProfile, Power


@dataclass(frozen=True, slots=True)
class Figure:
    """An assumed value and its plausible range. Users see `source`, the origin of the value."""

    value: float
    low: float
    high: float
    unit: str
    source: str


ByKind = Mapping[DeviceKind, Figure]


@dataclass(frozen=True, slots=True)
class Assumptions:
    """All assumed figures of a footprint.

    Attributes:
        supply_ratio: energy drawn from the socket divided by energy used by the device, at least 1.
        pue: energy of a data centre divided by energy of its machines, at least 1.
        host_share: energy of the host machine, without its GPU, divided by energy of the GPU.
        network_j_per_byte: energy of the network between PS and devices.
        utilisation: share of a device's lifetime for which the device is in use.
        lifetime_years: years from purchase to disposal.
        embodied_gco2e: carbon of manufacturing one device.
        one_lifetime_years: one lifetime for all devices; None to use the lifetimes in the profiles
            or `lifetime_years`.
    """

    supply_ratio: ByKind
    pue: Figure
    host_share: Figure
    network_j_per_byte: Figure
    utilisation: Figure
    lifetime_years: ByKind
    embodied_gco2e: ByKind
    one_lifetime_years: float | None = None

    def without_network(self) -> Assumptions:
        """Return a copy without network energy, for devices in the same building as the PS."""
        return replace(self, network_j_per_byte=replace(self.network_j_per_byte, value=0.0))


def load_assumptions() -> Assumptions:
    """Load the assumptions from `assumptions.toml` and `embodied.toml`."""
    table = read_figures("assumptions.toml")
    table["embodied_gco2e"] |= read_figures("embodied.toml")["embodied_gco2e"]
    return msgspec.convert(table, Assumptions)


def read_figures(name: str) -> dict[str, Any]:
    """Read the TOML file called `name` in `cleave/energy`."""
    return tomllib.loads(files("cleave.energy").joinpath(name).read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class KnownPower:
    """The power of a device. `power` is None if the power while computing is unknown.

    `assumed` names the figures in `power` that are assumptions, in the order of `Gap`.
    """

    power: Power | None
    assumed: tuple[Gap, ...] = ()


class Spread(Enum):
    """A statistic of the powers measured on a class of devices. Users see the enum values."""

    LEAST = "least measured"
    MEDIAN = "median"
    MOST = "most measured"


@dataclass(frozen=True, slots=True)
class ClassPower:
    """The median, lowest and highest power measured on a class of devices.

    Attributes:
        power: medians. `idle_w` is None if idle power was not measured on any device.
        below_flops_per_s: throughput limit. The power while computing applies to slower devices.
    """

    power: Power
    devices: tuple[str, ...]
    below_flops_per_s: float
    least: Power
    most: Power

    def at(self, spread: Spread) -> ClassPower:
        power = {Spread.LEAST: self.least, Spread.MOST: self.most}.get(spread, self.power)
        return replace(self, power=power)


@dataclass(frozen=True, slots=True)
class Typical:
    """Typical power figures, which replace figures missing from device profiles.

    Attributes:
        radio_w: maps a kind of device to the power of an active radio.
        cards_w: maps the profile name of a laptop to the maximum power of its graphics card.
    """

    classes: Mapping[DeviceKind, ClassPower]
    radio_w: Mapping[DeviceKind, float]
    cards_w: Mapping[str, float]

    def at(self, spread: Spread) -> Typical:
        """Return a copy that uses the lowest, median or highest measured power of each class."""
        if spread is Spread.MEDIAN:
            return self
        return replace(self, classes={k: found.at(spread) for k, found in self.classes.items()})

    def power_of(self, profile: DeviceProfile) -> KnownPower:
        """Return a profile's power, with missing figures replaced by those of the profile's class.

        The idle power of a class applies to all of its devices. The power while computing applies
        only to devices with a throughput below `below_flops_per_s`. Faster devices are assigned the
        power of their graphics card, if known.
        """
        card_w = self.cards_w.get(profile.name)
        return self._power_of(profile.kind, profile.flops_per_s, profile.power, card_w)

    def power_of_kind(self, kind: DeviceKind, flops_per_s: float) -> KnownPower:
        """Return the typical power of a device whose profile is unknown."""
        return self._power_of(kind, flops_per_s, None, None)

    def powers_of(self, profiles: Iterable[DeviceProfile]) -> dict[str, KnownPower]:
        return {profile.name: self.power_of(profile) for profile in profiles}

    def _power_of(
        self, kind: DeviceKind, flops_per_s: float, own: Power | None, card_w: float | None
    ) -> KnownPower:
        found = self.classes.get(kind)
        assumed = []
        own = own or Power()
        compute_w, idle_w, radio_w, at_wall = own.compute_w, own.idle_w, own.radio_w, own.at_wall
        if compute_w is None and found and flops_per_s < found.below_flops_per_s:
            compute_w, at_wall = found.power.compute_w, found.power.at_wall
            assumed.append(Gap[f"TYPICAL_{kind.name}"])
        if compute_w is None and card_w is not None:
            compute_w = card_w
            assumed.append(Gap.TYPICAL_CARD)
        if compute_w is None:
            return KnownPower(None)
        if idle_w is None and found and found.power.idle_w is not None:
            idle_w = found.power.idle_w
            assumed.append(Gap.TYPICAL_IDLE)
        if radio_w is None and kind in self.radio_w:
            radio_w = self.radio_w[kind]
            assumed.append(Gap.TYPICAL_RADIO)
        return KnownPower(Power(idle_w, compute_w, radio_w, at_wall=at_wall), tuple(assumed))


def load_typical() -> Typical:
    """Load the typical power figures from `cleave/energy/typical.toml`."""
    table = read_figures("typical.toml")
    radio = table["radio"]
    return Typical(
        {DeviceKind(kind): _class_power(entry) for kind, entry in table["class"].items()},
        {DeviceKind(kind): radio["radio_w"] for kind in radio["kinds"]},
        {card["profile"]: card["compute_w"] for card in table["card"]},
    )


def _class_power(entry: dict[str, Any]) -> ClassPower:
    measured = entry["measured"]
    idle = [device["idle_w"] for device in measured if "idle_w" in device]
    compute = [device["compute_w"] for device in measured]

    def power(of: Callable[[list[float]], float]) -> Power:
        return Power(
            idle_w=of(idle) if idle else None, compute_w=of(compute), at_wall=entry["at_wall"]
        )

    names = tuple(device["device"] for device in measured)
    return ClassPower(power(median), names, entry["below_flops_per_s"], power(min), power(max))
