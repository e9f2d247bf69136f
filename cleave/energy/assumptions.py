"""Assumed figures for the parts of a footprint that were not measured.

`assumptions.toml` contains the figures with their ranges and sources. Figures from Boavizta are in
`embodied.toml`, under Boavizta's licence.
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
    """An assumed number with its plausible range.

    Attributes:
        value: the number used if no measurement exists.
        low, high: the ends of the plausible range.
        unit: unit of `value`, `low` and `high`.
        source: where the numbers come from, as text for the user.
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
        supply_ratio: for each kind of device, energy drawn from the socket divided by energy used
            by the device, at least 1.
        pue: energy of a data centre divided by energy of its machines, at least 1.
        host_share: energy of the host machine, without its GPU, divided by energy of the GPU.
        network_j_per_byte: energy of the network between PS and devices, per byte transferred.
        utilisation: share of a device's lifetime for which the device is in use.
        lifetime_years: for each kind of device, years from purchase to disposal.
        embodied_gco2e: for each kind of device, carbon of manufacturing one device.
        one_lifetime_years: a lifetime for all devices, which replaces `lifetime_years` and the
            lifetimes in profiles; None to use those lifetimes.
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
        """Return a copy of the assumptions in which the network uses no energy.

        Use the copy for devices in the same building as the PS.
        """
        return replace(self, network_j_per_byte=replace(self.network_j_per_byte, value=0.0))


def load_assumptions() -> Assumptions:
    """Load the assumptions from Cleave's own data files."""
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
