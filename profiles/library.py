"""Look-up of device profiles, networks and availabilities in the built-in library.

The library's files in `profiles/library/` can be read even inside a zipped wheel. Every function
that takes a library name also takes a path that ends in `.toml`. Figures are in SI units: FLOP/s,
bytes, bytes/s, seconds, watts, and grams of CO2 equivalent.
"""

from __future__ import annotations

import difflib
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TypeVar

import msgspec

from profiles.availability import Availability
from profiles.device_profile import DeviceProfile, Embodied, LinkProfile, Text
from profiles.profile_file import convert, read_profile, read_toml

_T = TypeVar("_T")
_SUFFIX = ".toml"


class NamedLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A network from which the links of devices are drawn.

    Attributes:
        name: identifier by which fleet files refer to the network.
        title: human-readable name.
        link: quantiles of link rates and round-trip times across devices.
        source: publication or measurement from which the figures come.
        notes: measurement conditions and caveats for users of the network.
        assumed: one line for each unknown figure, with the assumed value and its justification.
    """

    name: Text
    title: Text
    link: LinkProfile
    source: Text
    notes: str = ""
    assumed: tuple[Text, ...] = ()


class NamedAvailability(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The availability of a population of devices.

    Attributes:
        name: identifier by which fleet files refer to the availability.
        title: human-readable name.
        availability: distributions of sessions and gaps, and hours of the day.
        source: publication or measurement from which the figures come.
        notes: measurement conditions and caveats for users of the availability.
        assumed: one line for each unknown figure, with the assumed value and its justification.
    """

    name: Text
    title: Text
    availability: Availability
    source: Text
    notes: str = ""
    assumed: tuple[Text, ...] = ()


class _EmbodiedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file that maps profile names to embodied carbon, and states the licence of the figures."""

    attribution: Text
    licence: Text
    url: Text
    embodied: dict[str, Embodied]


def profile_names() -> list[str]:
    """Return the sorted names of the library's device profiles."""
    return _names("devices")


def load_profile(name_or_path: str) -> DeviceProfile:
    """Load a device profile from the library or from a TOML file.

    Args:
        name_or_path: name of a profile in the library, or a path that ends in `.toml`.

    Raises:
        ValueError: when the name is unknown, or the file is unreadable or violates the schema. The
            message is one sentence for users.
    """
    if name_or_path.endswith(_SUFFIX):
        return read_profile(Path(name_or_path))
    _check_known(name_or_path, "devices", "profile", "list them with: cleave profile list")
    profile = read_profile(
        _folder("devices") / (name_or_path + _SUFFIX), f"profile {name_or_path!r} of the library"
    )
    if profile.embodied is None:
        found = _separate_embodied().get(name_or_path)
        profile = msgspec.structs.replace(profile, embodied=found)
    return profile


def load_profiles() -> dict[str, DeviceProfile]:
    """Load all device profiles of the library into a dictionary with profile names as keys."""
    return {name: load_profile(name) for name in profile_names()}


def network_names() -> list[str]:
    """Return the sorted names of the library's networks."""
    return _names("networks")


def load_network(name_or_path: str) -> NamedLink:
    """Load a network from the library or from a TOML file.

    Args:
        name_or_path: name of a network in the library, or a path that ends in `.toml`.

    Raises:
        ValueError: when the name is unknown, or the file is unreadable or violates the schema.
    """
    return _load(name_or_path, "networks", "network", NamedLink)


def availability_names() -> list[str]:
    """Return the sorted names of the library's availabilities."""
    return _names("availability")


def load_availability(name_or_path: str) -> NamedAvailability:
    """Load an availability from the library or from a TOML file.

    Args:
        name_or_path: name of an availability in the library, or a path that ends in `.toml`.

    Raises:
        ValueError: when the name is unknown, or the file is unreadable or violates the schema.
    """
    return _load(name_or_path, "availability", "availability", NamedAvailability)


def _load(name_or_path: str, folder: str, what: str, kind: type[_T]) -> _T:
    if name_or_path.endswith(_SUFFIX):
        where = f"{what} {name_or_path}"
        return convert(read_toml(Path(name_or_path), where), kind, where)
    _check_known(name_or_path, folder, what, f"known are {', '.join(_names(folder))}")
    where = f"{what} {name_or_path!r} of the library"
    return convert(read_toml(_folder(folder) / (name_or_path + _SUFFIX), where), kind, where)


def _check_known(name: str, folder: str, what: str, how_to_list: str) -> None:
    names = _names(folder)
    if name in names:
        return
    near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    close = f" (near are {', '.join(near)})" if near else ""
    raise ValueError(
        f"there is no {what} {name!r} in the library{close}; {how_to_list}, "
        f"or give a file that ends in {_SUFFIX}"
    )


def _names(folder: str) -> list[str]:
    found = (entry.name for entry in _folder(folder).iterdir())
    return sorted(name.removesuffix(_SUFFIX) for name in found if name.endswith(_SUFFIX))


def _folder(name: str) -> Traversable:
    return files("profiles") / "library" / name


def _separate_embodied() -> dict[str, Embodied]:
    """Read the embodied carbon of each profile from a separate file, as its licence requires."""
    where = "the embodied carbon of the library"
    table = read_toml(_folder("embodied") / "boavizta.toml", where)
    return convert(table, _EmbodiedFile, where).embodied
