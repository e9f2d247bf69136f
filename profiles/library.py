"""The library of published profiles, networks and availabilities, by name.

Its files are in `profiles/library/`. They are read in place, also inside a wheel that was never
unpacked. Wherever a name is expected, a file may be given instead: a path that ends in `.toml`.
Figures are in SI units: FLOP/s, bytes, bytes/s, seconds, watts, grams of CO2 equivalent.
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
    """A network that devices may be on.

    Attributes:
        name: what fleets call it.
        title: what people call it.
        link: its rates in bytes/s and its round trips in seconds, spread over its devices.
        source: of its figures.
        notes: conditions that users should know.
        assumed: one line for each figure that is unknown: what was assumed instead, and why.
    """

    name: Text
    title: Text
    link: LinkProfile
    source: Text
    notes: str = ""
    assumed: tuple[Text, ...] = ()


class NamedAvailability(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When the devices of some population are available.

    Attributes:
        name: what fleets call it.
        title: what people call it.
        availability: sessions and gaps in seconds, hours of the day.
        source: of its figures.
        notes: conditions that users should know.
        assumed: one line for each figure that is unknown: what was assumed instead, and why.
    """

    name: Text
    title: Text
    availability: Availability
    source: Text
    notes: str = ""
    assumed: tuple[Text, ...] = ()


class _EmbodiedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Embodied carbon under a licence of its own, by profile name."""

    attribution: Text
    licence: Text
    url: Text
    embodied: dict[str, Embodied]


def profile_names() -> list[str]:
    """Return the names of the device profiles of the library, sorted."""
    return _names("devices")


def load_profile(name_or_path: str) -> DeviceProfile:
    """Load a device profile.

    Args:
        name_or_path: a name in the library, or a path that ends in `.toml`.

    Raises:
        ValueError: for an unknown name, and for a file that cannot be read or does not follow the
            schema; one sentence that names what is wrong.
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
    """Load every device profile of the library, by name; for code that looks up many names."""
    return {name: load_profile(name) for name in profile_names()}


def network_names() -> list[str]:
    """Return the names of the networks of the library, sorted."""
    return _names("networks")


def load_network(name_or_path: str) -> NamedLink:
    """Load a network; see `load_profile` for the argument and for what it raises."""
    return _load(name_or_path, "networks", "network", NamedLink)


def availability_names() -> list[str]:
    """Return the names of the availabilities of the library, sorted."""
    return _names("availability")


def load_availability(name_or_path: str) -> NamedAvailability:
    """Load an availability; see `load_profile` for the argument and for what it raises."""
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
    """Figures that may not be mixed with the others: their licence asks for a file of their own."""
    where = "the embodied carbon of the library"
    table = read_toml(_folder("embodied") / "boavizta.toml", where)
    return convert(table, _EmbodiedFile, where).embodied
