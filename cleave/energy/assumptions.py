"""Assumed figures for the parts of a footprint that were not measured.

The figures, ranges and sources are in `assumptions.toml`. Figures from Boavizta are in
`embodied.toml`, under Boavizta's licence.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

import msgspec

from profiles.device_profile import DeviceKind


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
