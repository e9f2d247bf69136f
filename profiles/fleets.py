"""Look-up of fleets by name (`paper-256`, `home-mix`, `phones-4g-500`) or by TOML file."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np

from profiles.availability import Availability, Durations
from profiles.fleet_device import FleetDevice
from profiles.fleet_file import MAX_DEVICES, read_fleet, slowed
from profiles.library import availability_names, load_availability

_SIZED = re.compile(r"(.+)-(\d{1,18})")
_DEFAULT_DEVICES = 256
_LEAST_S, _MOST_S = 0.1, 1e9  # range that `Durations` accepts


def paper_fleet(devices: int, stragglers: float = 0.0) -> list[FleetDevice]:
    """Return the fleet of the Cleave paper, `paper-N` (docs/emulation.md).

    Devices are in the laptop class, and their links have no latency. `numpy.random.default_rng(42)`
    draws four vectors of N uniform values in this order: compute of 5-7 TFLOP/s, uplink of 5-10
    MB/s, downlink of 10-100 MB/s, and memory of 1-3 GB. It then draws the stragglers.

    Args:
        devices: N, the number of devices.
        stragglers: share of devices whose compute and link rates are divided by ten, 0 to 1.

    Raises:
        ValueError: when `devices` is below 1 or above `MAX_DEVICES`, or `stragglers` is outside 0
            to 1.
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
    return [slowed(device) if i in slow else device for i, device in enumerate(fleet)]


def fleet_names() -> list[str]:
    """Return the names of the built-in fleets, to which users may append a size (`paper-256`)."""
    found = (entry.name for entry in (files("profiles") / "library" / "fleets").iterdir())
    return ["paper", *sorted(n.removesuffix(".toml") for n in found if n.endswith(".toml"))]


def size_in(name: str) -> int | None:
    """Return the number of devices in a built-in fleet's name: 256 for `paper-256`.

    Return None if the name has no size, or no built-in fleet has this name.
    """
    sized = _SIZED.fullmatch(name)
    return int(sized[2]) if sized and sized[1] in fleet_names() else None


def find_fleet(
    name_or_file: str,
    stragglers: float = 0.0,
    *,
    devices: int | None = None,
    dtype: str = "fp32",
    seed: int = 42,
) -> list[FleetDevice]:
    """Return the devices of a built-in fleet or of a fleet file.

    Args:
        name_or_file: built-in name with a size (`paper-256`, `home-mix-500`), built-in name without
            a size, or path of a TOML file (`profiles.fleet_file`).
        stragglers: share of devices whose compute and link rates are divided by ten, 0 to 1.
        devices: number of devices, divided among the groups of a fleet file in proportion to their
            counts. None uses the size in the name or the counts in the file.
        dtype: dtype of the throughput that each device reports.
        seed: seed for the draws of links and stragglers. The fleet `paper` always uses 42.

    Raises:
        ValueError: when the name is unknown, the file is unreadable, a key is unknown or a value is
            impossible. The message names the field and the value.
    """
    if devices is not None and not 1 <= devices <= MAX_DEVICES:
        raise ValueError(
            f"a fleet of {devices} devices makes no sense; ask for 1 to {MAX_DEVICES:,}"
        )
    if name_or_file.endswith(".toml"):
        path = Path(name_or_file)
        fleet = read_fleet(path, f"fleet file {path}", devices, dtype, seed)
        return _with_stragglers(fleet, stragglers, np.random.default_rng(seed))
    known = fleet_names()
    name, size = name_or_file, devices
    stated = size_in(name)
    if name not in known and stated is not None:
        name, size = name.rpartition("-")[0], stated
        if devices is not None and devices != size:
            raise ValueError(
                f"fleet {name_or_file!r} has {size} devices and {devices} were asked for; "
                f"give one of the two numbers"
            )
    if name not in known:
        near = difflib.get_close_matches(name_or_file, known, n=2, cutoff=0.6)
        hint = f" (near is {' and '.join(near)})" if near else ""
        raise ValueError(
            f"there is no fleet {name_or_file!r}{hint}; give one of {', '.join(known)} with a size "
            f"(as paper-256), or a .toml file"
        )
    if name == "paper":
        return paper_fleet(_DEFAULT_DEVICES if size is None else size, stragglers)
    file = files("profiles") / "library" / "fleets" / f"{name}.toml"
    if size is not None and not 1 <= size <= MAX_DEVICES:
        raise ValueError(f"a fleet of {size} devices makes no sense; ask for 1 to {MAX_DEVICES:,}")
    fleet = read_fleet(file, f"fleet {name!r}", size, dtype, seed)
    return _with_stragglers(fleet, stragglers, np.random.default_rng(seed))


def with_churn(fleet: Sequence[FleetDevice], churn: str) -> list[FleetDevice]:
    """Return copies of the devices that join and leave according to `churn`.

    Args:
        fleet: devices, whose own availability is replaced.
        churn: library name of an availability (`volunteer`), path of a TOML file, or mean seconds
            of sessions and gaps. `600:120` stands for exponentially distributed sessions of 600 s
            and gaps of 120 s.

    Raises:
        ValueError: when `churn` has none of these forms.
    """
    if churn.endswith(".toml") or churn in availability_names():
        availability = load_availability(churn).availability
    else:
        availability = _sessions_and_gaps(churn)
    return [replace(device, availability=availability) for device in fleet]


def _sessions_and_gaps(churn: str) -> Availability:
    """Parse mean seconds of sessions and gaps (`600:120`), or of sessions only (`600`)."""
    numbers = re.fullmatch(r"([\d.]+)(?::([\d.]+))?", churn)
    try:
        if numbers is None:
            raise ValueError
        session_s, gap_s = float(numbers[1]), float(numbers[2] or 0)
        # Sessions shorter than a join would cause many events but no usable device.
        if not (_LEAST_S <= session_s <= _MOST_S and (not gap_s or _LEAST_S <= gap_s <= _MOST_S)):
            raise ValueError
    except ValueError:
        raise ValueError(
            f"a churn of {churn!r} makes no sense; give mean seconds of sessions and gaps, each "
            f"{_LEAST_S:g} or more, as 600:120, or one of {', '.join(availability_names())}, or a "
            f".toml file"
        ) from None
    return Availability(Durations(session_s), Durations(gap_s) if gap_s else None)
