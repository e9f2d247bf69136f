"""Assumed figures of a footprint, with ranges and sources, for what was not measured.

They are in `assumptions.toml`. Boavizta's figures are in `embodied.toml`, under its licence.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from profiles.device_profile import DeviceKind


@dataclass(frozen=True, slots=True)
class Figure:
    """An assumed number.

    Attributes:
        value: the number, used unless something better is known.
        low, high: the ends of its plausible range.
        unit: the unit of all three.
    """

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
        supply_ratio: energy at the socket over energy that the device uses, at least 1.
        pue: energy of the data centre over energy of its machines, at least 1.
        host_share: energy of the machine around a GPU over energy of the GPU.
        network_j_per_byte: energy of the network between PS and devices.
        utilisation: share of its lifetime that a device is in use.
        lifetime_years: years from new until discarded.
        embodied_gco2e: carbon of making the device.
        one_lifetime_years: one lifetime for all, instead of those by kind and in profiles.
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
        """Return the assumptions without network energy, for devices in one house."""
        return replace(self, network_j_per_byte=replace(self.network_j_per_byte, value=0.0))


def load_assumptions() -> Assumptions:
    """Load the assumptions that come with Cleave."""
    table, embodied = _read("assumptions.toml"), _read("embodied.toml")
    return Assumptions(
        supply_ratio=_by_kind(table["supply_ratio"]),
        pue=Figure(**table["pue"]),
        host_share=Figure(**table["host_share"]),
        network_j_per_byte=Figure(**table["network_j_per_byte"]),
        utilisation=Figure(**table["utilisation"]),
        lifetime_years=_by_kind(table["lifetime_years"]),
        embodied_gco2e=_by_kind(table["embodied_gco2e"] | embodied["embodied_gco2e"]),
    )


def _read(name: str) -> dict[str, Any]:
    text = files("cleave.energy").joinpath(name).read_text(encoding="utf-8")
    return tomllib.loads(text)


def _by_kind(table: dict[str, Any]) -> ByKind:
    return {DeviceKind(kind): Figure(**entry) for kind, entry in table.items()}
