"""Fleets by name (`paper-256`) or from a TOML file."""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from profiles.fleet_device import FleetDevice

MAX_DEVICES: Final = 1_000_000
_STRAGGLER_SLOWDOWN = 10

_PAPER = re.compile(r"paper-(\d+)")
_GROUP_KEYS = {f.name for f in fields(FleetDevice)} | {"count"}
_NEEDED = ("flops_per_s", "downlink_bytes_per_s", "uplink_bytes_per_s", "memory_bytes")


def paper_fleet(devices: int, stragglers: float = 0.0) -> list[FleetDevice]:
    """The published fleet, `paper-N` (design, section 4): laptop class, no latency.

    One vector of N uniform draws each, in this order: compute 5-7 TFLOP/s, uplink 5-10 and downlink
    10-100 (1e6 bytes/s), memory 1-3 GB; `numpy.random.default_rng(42)`. Which devices are
    stragglers is drawn after that, from the same generator.

    Args:
        devices: N.
        stragglers: the share of devices whose three rates are divided by ten.

    Raises:
        ValueError: when `devices` is below 1, or `stragglers` no share.
    """
    if devices < 1:
        raise ValueError(f"a fleet of {devices} devices is empty; ask for 1 or more")
    if devices > MAX_DEVICES:
        raise ValueError(f"a fleet of {devices} devices is too large; ask for {MAX_DEVICES:,}")
    rng = np.random.default_rng(42)
    compute = rng.uniform(5e12, 7e12, devices)
    uplink = rng.uniform(5e6, 10e6, devices)
    downlink = rng.uniform(10e6, 100e6, devices)
    memory = rng.uniform(1e9, 3e9, devices)
    fleet = [
        FleetDevice(
            name=f"paper-{i}",
            flops_per_s=float(compute[i]),
            downlink_bytes_per_s=float(downlink[i]),
            uplink_bytes_per_s=float(uplink[i]),
            latency_s=0.0,
            memory_bytes=int(memory[i]),
        )
        for i in range(devices)
    ]
    return _with_stragglers(fleet, stragglers, rng)


def _with_stragglers(
    fleet: list[FleetDevice], share: float, rng: np.random.Generator
) -> list[FleetDevice]:
    if not 0 <= share <= 1:
        raise ValueError(f"a share of {share} stragglers makes no sense; give 0 to 1")
    slow = set(rng.choice(len(fleet), round(share * len(fleet)), replace=False).tolist())
    return [_slowed(device) if i in slow else device for i, device in enumerate(fleet)]


def _slowed(device: FleetDevice) -> FleetDevice:
    return replace(
        device,
        flops_per_s=device.flops_per_s / _STRAGGLER_SLOWDOWN,
        downlink_bytes_per_s=device.downlink_bytes_per_s / _STRAGGLER_SLOWDOWN,
        uplink_bytes_per_s=device.uplink_bytes_per_s / _STRAGGLER_SLOWDOWN,
    )


def find_fleet(name_or_file: str, stragglers: float = 0.0) -> list[FleetDevice]:
    """The fleet that a user means.

    Args:
        name_or_file: `paper-N`, or a TOML file of `[[group]]` tables, each with `name`, `count`
            and the fields of `FleetDevice`.
        stragglers: see `paper_fleet`.

    Raises:
        ValueError: for an unknown name, an unreadable file, unknown keys and impossible values; one
            sentence that names the field and the value.
    """
    named = _PAPER.fullmatch(name_or_file)
    if named:
        return paper_fleet(int(named[1]), stragglers)
    path = Path(name_or_file)
    if path.suffix != ".toml":
        raise ValueError(
            f"there is no fleet {name_or_file!r}; give paper-N (as paper-256) or a .toml file"
        )
    return _with_stragglers(_from_file(path), stragglers, np.random.default_rng(42))


def _from_file(path: Path) -> list[FleetDevice]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"fleet file {path} cannot be read: {reason}") from None
    unknown = sorted(set(table) - {"group"})
    groups = table.get("group", [])
    if unknown or not isinstance(groups, list) or not all(isinstance(g, dict) for g in groups):
        raise ValueError(
            f"fleet file {path} has {unknown[0] if unknown else 'group'!r}, which means nothing "
            f"there; it consists of [[group]] tables"
        )
    fleet = [
        device for number, group in enumerate(groups) for device in _group(path, number, group)
    ]
    if not fleet:
        raise ValueError(f"fleet file {path} has no devices; add a [[group]] with a count")
    return fleet


def _group(path: Path, number: int, group: dict[str, Any]) -> list[FleetDevice]:
    where = f"group {number + 1} of {path}"
    for key in group:
        if key not in _GROUP_KEYS:
            raise ValueError(
                f"{where} has the unknown key {key!r}; known are {', '.join(sorted(_GROUP_KEYS))}"
            )
    for key in _NEEDED:
        if key not in group:
            raise ValueError(f"{where} lacks {key}")
    count = group.get("count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MAX_DEVICES:
        raise ValueError(f"count of {where} is {count!r}; give a number from 0 to {MAX_DEVICES:,}")
    values: dict[str, Any] = {"latency_s": 0.0} | {
        key: value for key, value in group.items() if key not in ("count", "name")
    }
    for key, value in values.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"{key} of {where} is {value!r}; give a number")
        if not math.isfinite(value):
            raise ValueError(f"{key} of {where} is {value}; give a finite number")
    values["memory_bytes"] = int(values["memory_bytes"])
    name = str(group.get("name", f"group{number + 1}"))
    try:
        return [FleetDevice(name=f"{name}-{i}", **values) for i in range(count)]
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
