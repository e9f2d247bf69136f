"""Typical power for devices whose profile lacks it, measured on other devices of the class.

`typical.toml` has one entry per measured device, with sources. A class draws the median of its
devices. Each use of a typical figure is reported (`Gap`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from importlib.resources import files
from statistics import median
from typing import Any

from cleave.energy.meter import Gap
from profiles.device_profile import DeviceKind, DeviceProfile, Power


@dataclass(frozen=True, slots=True)
class KnownPower:
    """The power of a device, and the assumptions in it.

    Attributes:
        power: the power; None if it is unknown while multiplying.
        assumed: the assumptions, in the order of `Gap`.
    """

    power: Power | None
    assumed: tuple[Gap, ...] = ()


class Spread(Enum):
    """The choice among a class's measured figures; the values are for people."""

    LEAST = "least measured"
    MEDIAN = "median"
    MOST = "most measured"


@dataclass(frozen=True, slots=True)
class ClassPower:
    """The power of a class of devices.

    Attributes:
        power: medians; `idle_w` is None if no device's idle power was measured.
        devices: the measured devices.
        below_flops_per_s: throughput from which a device does not belong to the class.
        least, most: like `power`, with the lowest and the highest measured figures.
    """

    power: Power
    devices: tuple[str, ...]
    below_flops_per_s: float
    least: Power
    most: Power

    def at(self, spread: Spread) -> ClassPower:
        """Return the class with its lowest, median or highest measured power."""
        power = {Spread.LEAST: self.least, Spread.MOST: self.most}.get(spread, self.power)
        return replace(self, power=power)


@dataclass(frozen=True, slots=True)
class Typical:
    """Figures to use if profiles lack them.

    Attributes:
        classes: power of each class, by kind of device.
        radio_w: power of an active radio, by kind.
        cards_w: maximum power of a laptop's graphics card, by profile.
    """

    classes: Mapping[DeviceKind, ClassPower]
    radio_w: Mapping[DeviceKind, float]
    cards_w: Mapping[str, float]

    def at(self, spread: Spread) -> Typical:
        """Return these figures with the lowest, median or highest power of each class."""
        if spread is Spread.MEDIAN:
            return self
        return replace(self, classes={k: found.at(spread) for k, found in self.classes.items()})

    def power_of(self, profile: DeviceProfile) -> KnownPower:
        """Return the profile's own figures, completed with those of its class.

        A class's idle power applies to any device of its kind. Its power while multiplying applies
        only to devices below `below_flops_per_s`.
        """
        card_w = self.cards_w.get(profile.name)
        return self._power_of(profile.kind, profile.flops_per_s, profile.power, card_w)

    def power_of_kind(self, kind: DeviceKind, flops_per_s: float) -> KnownPower:
        """Return the power of a device from its kind and throughput alone."""
        return self._power_of(kind, flops_per_s, None, None)

    def powers_of(self, profiles: Iterable[DeviceProfile]) -> dict[str, KnownPower]:
        return {profile.name: self.power_of(profile) for profile in profiles}

    def _power_of(
        self, kind: DeviceKind, flops_per_s: float, own: Power | None, card_w: float | None
    ) -> KnownPower:
        found = self.classes.get(kind)
        assumed = []
        compute_w = own.compute_w if own is not None else None
        at_wall = own is not None and own.at_wall
        if compute_w is None and found and flops_per_s < found.below_flops_per_s:
            compute_w, at_wall = found.power.compute_w, found.power.at_wall
            assumed.append(_COMPUTE[kind])
        if compute_w is None and card_w is not None:
            compute_w = card_w
            assumed.append(Gap.TYPICAL_CARD)
        if compute_w is None:
            return KnownPower(None)
        idle_w = own.idle_w if own is not None else None
        if idle_w is None and found and found.power.idle_w is not None:
            idle_w = found.power.idle_w
            assumed.append(Gap.TYPICAL_IDLE)
        radio_w = own.radio_w if own is not None else None
        if radio_w is None and kind in self.radio_w:
            radio_w = self.radio_w[kind]
            assumed.append(Gap.TYPICAL_RADIO)
        return KnownPower(Power(idle_w, compute_w, radio_w, at_wall=at_wall), tuple(assumed))


_COMPUTE = {
    DeviceKind.PHONE: Gap.TYPICAL_PHONE,
    DeviceKind.LAPTOP: Gap.TYPICAL_LAPTOP,
    DeviceKind.SBC: Gap.TYPICAL_SBC,
}


def load_typical() -> Typical:
    """Load the typical figures that come with Cleave."""
    text = files("cleave.energy").joinpath("typical.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
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
