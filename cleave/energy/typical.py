"""The power of a device whose profile lacks it: measured figures of other devices of its class.

The figures, one device per entry, and their sources are in `typical.toml`; a class draws the median
of its devices. They are used where a profile has no figure, and each use is reported (`Gap`).
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
    """What is known about a device's power, and what was assumed for the rest.

    Attributes:
        power: None if its power while multiplying is unknown.
        assumed: in the order of `Gap`.
    """

    power: Power | None
    assumed: tuple[Gap, ...] = ()


class Spread(Enum):
    """Which of the measured devices of a class is used; the values are for people."""

    LEAST = "least measured"
    MEDIAN = "median"
    MOST = "most measured"


@dataclass(frozen=True, slots=True)
class ClassPower:
    """What devices of a class draw.

    Attributes:
        power: medians; `idle_w` is None if it was measured on no device.
        devices: the devices that were measured.
        below_flops_per_s: devices this fast or faster are not of this class.
        least, most: like `power`, with the lowest and the highest measured figures.
    """

    power: Power
    devices: tuple[str, ...]
    below_flops_per_s: float
    least: Power
    most: Power

    def at(self, spread: Spread) -> ClassPower:
        """Return the class with another of its measured devices as the figure to use."""
        power = {Spread.LEAST: self.least, Spread.MOST: self.most}.get(spread, self.power)
        return replace(self, power=power)


@dataclass(frozen=True, slots=True)
class Typical:
    """Figures to use where profiles lack them.

    Attributes:
        classes: by kind of device.
        radio_w: what radios draw while they work, by kind.
        cards_w: the most that a laptop's graphics card draws, by profile.
    """

    classes: Mapping[DeviceKind, ClassPower]
    radio_w: Mapping[DeviceKind, float]
    cards_w: Mapping[str, float]

    def at(self, spread: Spread) -> Typical:
        """Return these figures with another of the measured devices of each class."""
        if spread is Spread.MEDIAN:
            return self
        return replace(self, classes={k: found.at(spread) for k, found in self.classes.items()})

    def power_of(self, profile: DeviceProfile) -> KnownPower:
        """Return the profile's own figures, and those of its class where it has none.

        A class's idle power is used for any device of its kind. Its power while multiplying is used
        only for devices as fast as those that were measured, or slower.
        """
        card_w = self.cards_w.get(profile.name)
        return self._power_of(profile.kind, profile.flops_per_s, profile.power, card_w)

    def power_of_kind(self, kind: DeviceKind, flops_per_s: float) -> KnownPower:
        """Return the power of a device of which only the kind and the speed are known."""
        return self._power_of(kind, flops_per_s, None, None)

    def powers_of(self, profiles: Iterable[DeviceProfile]) -> dict[str, KnownPower]:
        """Return the power of each profile, by its name."""
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
    """Load the figures that come with Cleave."""
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
