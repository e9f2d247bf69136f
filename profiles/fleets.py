"""Fleets by name (`paper-256`, `home-mix`, `phones-4g-500`) or from TOML files.

In a fleet file, each `[[group]]` table describes similar devices. A group names a device profile, a
network from which links are drawn, and an availability, each by a library name or the path of a
TOML file. A group may also set any numeric field of `FleetDevice`:

    [[group]]
    profile = "iphone-13-pro"
    count = 20
    network = "home"
    availability = "overnight"
    stragglers = 0.1
    line = { name = "household", devices = 4, network = "home" }

Links are drawn from distributions with the network's quantiles. The logarithms of the downlink and
uplink rates have an assumed correlation of 0.7. Groups with the same `line.name` share lines. Each
line gets `line.devices` devices before the next line is drawn.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from profiles import library
from profiles.availability import Availability, Durations
from profiles.device_profile import DeviceProfile, LinkProfile
from profiles.fleet_device import FleetDevice, SharedBottleneck
from profiles.library import availability_names, convert, load_availability, read_toml
from profiles.performance import Layout

_T = TypeVar("_T")
_SIZED = re.compile(r"(.+)-(\d{1,18})")
_DEFAULT_DEVICES = 256
_LEAST_S, _MOST_S = 0.1, 1e9  # range that `Durations` accepts


def paper_fleet(devices: int, stragglers: float = 0.0) -> list[FleetDevice]:
    """Return the Cleave paper's fleet `paper-N`, with N = `devices` (docs/emulation.md).

    Devices are in the laptop class, and their links have no latency. `numpy.random.default_rng(42)`
    draws four vectors of N uniform values in this order: compute of 5-7 TFLOP/s, uplink of 5-10
    MB/s, downlink of 10-100 MB/s, and memory of 1-3 GB. It then draws the stragglers.

    Args:
        stragglers: share (0 to 1) of devices whose compute and link rates are divided by ten.

    Raises:
        ValueError: if `devices` is not from 1 to `MAX_DEVICES`, or `stragglers` not from 0 to 1.
    """
    if devices < 1:
        raise ValueError(f"a fleet of {devices} devices is empty; use 1 or more")
    if devices > MAX_DEVICES:
        raise ValueError(f"a fleet of {devices} devices is too large; use at most {MAX_DEVICES:,}")
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
        raise ValueError(f"the share of stragglers must be between 0 and 1, not {share}")
    slow = set(rng.choice(len(fleet), round(share * len(fleet)), replace=False).tolist())
    return [slowed(device) if i in slow else device for i, device in enumerate(fleet)]


def fleet_names() -> list[str]:
    """Return the names of the built-in fleets, to which users may append a size (`paper-256`)."""
    found = (entry.name for entry in (files("profiles") / "library" / "fleets").iterdir())
    return ["paper", *sorted(n.removesuffix(".toml") for n in found if n.endswith(".toml"))]


def size_in(name: str) -> int | None:
    """Return the size in a built-in fleet's name, such as 256 for `paper-256`; None if absent."""
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
            a size, or path of a TOML file.
        stragglers: share (0 to 1) of devices whose compute and link rates are divided by ten.
        devices: number of devices, divided among the groups of a fleet file in proportion to their
            counts. None means the size in the name or the counts in the file.
        dtype: dtype to which the `flops_per_s` of each device applies.
        seed: seed for the draws of links and stragglers. The fleet `paper` always uses 42.

    Raises:
        ValueError: if the name is unknown, the file is unreadable, a key is unknown or a value is
            impossible.
    """
    if devices is not None and not 1 <= devices <= MAX_DEVICES:
        raise ValueError(f"a fleet cannot have {devices} devices; use 1 to {MAX_DEVICES:,}")
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
                f"fleet {name_or_file!r} has {size} devices, but {devices} were requested; use "
                "only one of the two numbers"
            )
    if name not in known:
        near = difflib.get_close_matches(name_or_file, known, n=2, cutoff=0.6)
        hint = f" (similar: {' and '.join(near)})" if near else ""
        raise ValueError(
            f"there is no fleet {name_or_file!r}{hint}; use one of {', '.join(known)} with a size "
            "(such as paper-256), or a .toml file"
        )
    if name == "paper":
        return paper_fleet(_DEFAULT_DEVICES if size is None else size, stragglers)
    file = files("profiles") / "library" / "fleets" / f"{name}.toml"
    if size is not None and not 1 <= size <= MAX_DEVICES:
        raise ValueError(f"a fleet cannot have {size} devices; use 1 to {MAX_DEVICES:,}")
    fleet = read_fleet(file, f"fleet {name!r}", size, dtype, seed)
    return _with_stragglers(fleet, stragglers, np.random.default_rng(seed))


def with_churn(fleet: Sequence[FleetDevice], churn: str) -> list[FleetDevice]:
    """Return copies of the fleet's devices with the availability that `churn` describes.

    Args:
        churn: library name of an availability (`volunteer`), path of a TOML file, or mean lengths
            in seconds of exponentially distributed sessions and gaps, such as `600:120`.

    Raises:
        ValueError: if `churn` has none of these forms, or the TOML file is invalid.
    """
    if churn.endswith(".toml") or churn in availability_names():
        availability = load_availability(churn).availability
    else:
        availability = _sessions_and_gaps(churn)
    return [replace(device, availability=availability) for device in fleet]


def _sessions_and_gaps(churn: str) -> Availability:
    """Parse the mean lengths of sessions and gaps in seconds (`600:120`), or of sessions only."""
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
            f"churn {churn!r} is invalid; use mean seconds of sessions and gaps, each {_LEAST_S:g} "
            f"or more, such as 600:120, or one of {', '.join(availability_names())}, or a .toml "
            "file"
        ) from None
    return Availability(Durations(session_s), Durations(gap_s) if gap_s else None)


MAX_DEVICES: Final = 1_000_000
STRAGGLER_SLOWDOWN: Final = 10  # divisor of a straggler's rates, as in the Cleave paper's fleets

_NUMBERS = {f.name for f in fields(FleetDevice)} - {
    *("name", "profile", "compute", "thermal", "bottleneck", "availability")
}
_NAMED = {"profile", "network", "availability", "line"}
_GROUP_KEYS = _NUMBERS | _NAMED | {"name", "count", "stragglers"}
_NEEDED = ("flops_per_s", "downlink_bytes_per_s", "uplink_bytes_per_s", "memory_bytes")
_BELIEVABLE: Final = {
    "flops_per_s": ("FLOP/s", 1e6, 1e17),
    "graph_flops_per_s": ("FLOP/s", 1e6, 1e17),
    "downlink_bytes_per_s": ("bytes per second", 100, 1e12),
    "uplink_bytes_per_s": ("bytes per second", 100, 1e12),
    "memory_bytes": ("bytes", 2**24, 1e14),
    "latency_s": ("seconds", 0, 60),
    "jitter_s": ("seconds", 0, 60),
    "drift_sigma": ("(standard deviation of logarithms)", 0, 5),
    "drift_interval_s": ("seconds", 0.01, 1e6),
    "active_power_w": ("watts", 0, 1e5),
}
"""Unit, minimum and maximum. A value outside this range probably has another unit."""
_FILE_KEYS = {"group", "title", "notes"}
_LONGEST_NAME: Final = 100
_CORRELATION = 0.7
_WIDEST_Z = 2.3263  # limits draws to the range from the 1 % to the 99 % quantile


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `line` table of a group, which describes lines that several devices share.

    Attributes:
        name: common name of the lines. Groups with the same line name share the lines.
        devices: number of devices per line.
        network: name of the network from which line rates are drawn; empty if the table gives
            rates.
        downlink_bytes_per_s, uplink_bytes_per_s: total rates of all devices on one line.

    Raises:
        ValueError: if the table has both a network and rates, or neither, or an impossible value.
    """

    name: str
    devices: int
    network: str = ""
    downlink_bytes_per_s: float = 0.0
    uplink_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ValueError(f"line.devices must be 1 or more, not {self.devices}")
        given = self.downlink_bytes_per_s > 0 and self.uplink_bytes_per_s > 0
        if bool(self.network) == given:
            raise ValueError(
                f"line {self.name!r} needs either a network, or downlink_bytes_per_s and "
                f"uplink_bytes_per_s above zero"
            )
        for key in ("downlink_bytes_per_s", "uplink_bytes_per_s"):
            _check_believable(f"line.{key}", getattr(self, key), *_BELIEVABLE[key])


def read_fleet(
    file: Path | Traversable, where: str, devices: int | None, dtype: str, seed: int
) -> list[FleetDevice]:
    """Read a fleet file and draw its devices.

    Args:
        where: name of the file in error messages.
        devices: number of devices; None to use the counts in the file.
        dtype: dtype to which the `flops_per_s` of each device applies.

    Raises:
        ValueError: if the file is unreadable, has no devices, or has an unknown key or an
            impossible value.
    """
    table = read_toml(file, where)
    unknown = sorted(set(table) - _FILE_KEYS)
    groups = table.get("group", [])
    if unknown or not isinstance(groups, list) or not all(isinstance(g, dict) for g in groups):
        raise ValueError(
            f"{where} has the invalid entry {unknown[0] if unknown else 'group'!r}; "
            f"it must consist of [[group]] tables"
        )
    places = [f"group {i + 1} of {where.removeprefix('fleet file ')}" for i in range(len(groups))]
    counts = [_count(place, group) for place, group in zip(places, groups, strict=True)]
    if devices is not None and any(counts):
        counts = _in_proportion(counts, devices)
    rng = np.random.default_rng(seed)
    lines = _Lines(rng)
    fleet: list[FleetDevice] = []
    for number, (place, group, count) in enumerate(zip(places, groups, counts, strict=True)):
        fleet += _Group(place, number, group, dtype).devices(count, rng, lines)
    if not fleet:
        raise ValueError(f"{where} has no devices; add a [[group]] with a count")
    return fleet


def slowed(device: FleetDevice) -> FleetDevice:
    """Return a copy of the device with compute and link rates divided by `STRAGGLER_SLOWDOWN`."""
    rates = ("flops_per_s", "graph_flops_per_s", "downlink_bytes_per_s", "uplink_bytes_per_s")
    given = {name: rate for name in rates if (rate := getattr(device, name))}
    compute = device.compute.scaled(STRAGGLER_SLOWDOWN) if device.compute else None
    slow = {name: rate / STRAGGLER_SLOWDOWN for name, rate in given.items()}
    return replace(device, **slow, compute=compute)


def _count(place: str, group: Mapping[str, Any]) -> int:
    count = group.get("count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MAX_DEVICES:
        raise ValueError(
            f"count of {place} must be a number from 0 to {MAX_DEVICES:,}, not {count!r}"
        )
    return count


def _in_proportion(counts: Sequence[int], devices: int) -> list[int]:
    """Scale the counts so that their sum is `devices` (largest remainder method)."""
    exact = [devices * count / sum(counts) for count in counts]
    whole = [math.floor(share) for share in exact]
    order = sorted(range(len(counts)), key=lambda i: (whole[i] - exact[i], i))
    for i in order[: devices - sum(whole)]:
        whole[i] += 1
    return whole


class _Lines:
    """The shared lines of a fleet. A line's rates are drawn when its first device is added."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._members: dict[str, int] = {}
        self._made: dict[str, SharedBottleneck] = {}

    def next(self, line: Line, place: str) -> SharedBottleneck:
        member = self._members.get(line.name, 0)
        self._members[line.name] = member + 1
        name = f"{line.name}-{member // line.devices}"
        if name not in self._made:
            down, up = line.downlink_bytes_per_s, line.uplink_bytes_per_s
            if line.network:
                down, up, _ = draw_link(_link(line.network, place), self._rng)
            self._made[name] = SharedBottleneck(name, down, up, line.devices)
        return self._made[name]


class _Group:
    """A validated `[[group]]` table of a fleet file, used to draw devices."""

    def __init__(self, place: str, number: int, group: dict[str, Any], dtype: str) -> None:
        self._place = place
        for key in group:
            if key not in _GROUP_KEYS:
                raise ValueError(
                    f"{place} has the unknown key {key!r}; "
                    f"valid keys are {', '.join(sorted(_GROUP_KEYS))}"
                )
        values: dict[str, Any] = {"latency_s": 0.0}
        profile = None
        self._link = _link(group["network"], place) if "network" in group else None
        if "profile" in group:
            profile = _loaded(library.load_profile, "profile", group["profile"], place)
            values |= of_profile(profile, dtype)
            self._link = self._link or profile.link
        for key in _NUMBERS & group.keys():
            values[key] = _number(key, group[key], place)
            if key in _BELIEVABLE:
                _check_believable(f"{key} of {place}", values[key], *_BELIEVABLE[key])
        if "flops_per_s" in group:
            values["compute"] = None  # an explicit throughput replaces the profile's model
            values["graph_flops_per_s"] = group.get("graph_flops_per_s")
        self._fixed = _NUMBERS & group.keys()
        for key in _NEEDED:
            drawn = self._link is not None and key.endswith("link_bytes_per_s")
            if key not in values and not drawn:
                hint = "; add it, or a network" if key.endswith("link_bytes_per_s") else ""
                raise ValueError(f"{place} lacks {key}{hint}")
        values["memory_bytes"] = int(values["memory_bytes"])
        self._line = convert(group["line"], Line, place) if "line" in group else None
        self._stragglers = _number("stragglers", group.get("stragglers", 0.0), place)
        if not 0 <= self._stragglers <= 1:
            raise ValueError(
                f"stragglers of {place} must be a share from 0 to 1, not {self._stragglers:g}"
            )
        given = group.get("availability")
        if given is not None:
            if isinstance(given, dict):
                available = convert(given, Availability, f"availability of {place}")
            else:
                named = _loaded(load_availability, "availability", given, place)
                available = named.availability
            if not available.always:
                values["availability"] = available
        self._name = group.get("name", profile.name if profile else f"group{number + 1}")
        if not isinstance(self._name, str) or not 0 < len(self._name) <= _LONGEST_NAME:
            raise ValueError(
                f"name of {place} must be a string of 1 to {_LONGEST_NAME} characters, not "
                f"{self._name!r:.100}"
            )
        self._values = values

    def devices(self, count: int, rng: np.random.Generator, lines: _Lines) -> list[FleetDevice]:
        """Draw the links of `count` devices and return the devices."""
        slow = set(rng.choice(count, round(self._stragglers * count), replace=False).tolist())
        made = []
        for i in range(count):
            values = dict(self._values)
            if self._link is not None:
                names = ("downlink_bytes_per_s", "uplink_bytes_per_s", "latency_s")
                drawn = zip(names, draw_link(self._link, rng), strict=True)
                values |= {k: v for k, v in drawn if k not in self._fixed}
            if self._line is not None:
                values["bottleneck"] = lines.next(self._line, self._place)
            try:
                device = FleetDevice(name=f"{self._name}-{i}", **values)
            except ValueError as error:
                raise ValueError(f"{self._place}: {error}") from None
            made.append(slowed(device) if i in slow else device)
        return made


def of_profile(profile: DeviceProfile, dtype: str) -> dict[str, Any]:
    """Return a profile's keyword arguments for `FleetDevice`, without the name and the link rates.

    `dtype` is the dtype of `flops_per_s`. If the profile lacks this dtype, `ComputeModel.model`
    chooses a replacement.
    """
    compute = profile.compute_model()
    values: dict[str, Any] = {
        "flops_per_s": compute.model(dtype, dtype, Layout.NN).flops_per_s,
        "memory_bytes": profile.memory.bytes,
        "profile": profile.name,
        "compute": compute,
    }
    if profile.graphs is not None:
        values["graph_flops_per_s"] = profile.graphs.in_dtype(dtype)
    if profile.sustained is not None and profile.sustained.thermal is not None:
        values["thermal"] = profile.sustained.thermal
    if profile.power is not None:
        values["active_power_w"] = profile.power.active_w
    if profile.availability is not None and not profile.availability.always:
        values["availability"] = profile.availability
    return values


def draw_link(link: LinkProfile, rng: np.random.Generator) -> tuple[float, float, float]:
    """Draw a link: downlink and uplink rates in bytes/s, and the one-way latency in seconds."""
    z = rng.standard_normal(3)
    z[1] = _CORRELATION * z[0] + math.sqrt(1 - _CORRELATION**2) * z[1]
    down_z, up_z, trip_z = (float(v) for v in np.clip(z, -_WIDEST_Z, _WIDEST_Z))
    return (
        max(100.0, link.downlink_bytes_per_s.at(down_z)),
        max(100.0, link.uplink_bytes_per_s.at(up_z)),
        link.round_trip_s.at(trip_z) / 2,
    )


def _link(network: Any, place: str) -> LinkProfile:
    if isinstance(network, dict):
        return convert(network, LinkProfile, f"network of {place}")
    return _loaded(library.load_network, "network", network, place).link


def _loaded(load: Callable[[str], _T], key: str, value: Any, place: str) -> _T:
    """Load a library entry by name or file. `place` is the group's name in error messages."""
    try:
        if not isinstance(value, str) or not value:
            raise ValueError(f"{key} of {place} must be a name or a .toml file, not {value!r}")
        return load(value)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def _number(key: str, value: Any, place: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{key} of {place} must be a number, not {value!r}")
    return value


def _check_believable(what: str, value: float, unit: str, least: float, most: float) -> None:
    if value > 0 and not least <= value <= most:
        raise ValueError(f"{what} must be from {least:g} to {most:g} {unit}, not {value:g}")
