"""Reads and writes TOML profiles, and looks up the library's profiles, networks and availabilities.

The library's files in `profiles/library/` can be read even from a zipped wheel. Functions that load
an entry by name also accept a path that ends in `.toml`. Figures are in SI units.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Mapping
from enum import Enum
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cleave.errors import not_installed
from cleave.files import write_output
from profiles.availability import Availability, AvailabilityFamily
from profiles.device_profile import (
    SCHEMA,
    DeviceKind,
    DeviceProfile,
    Embodied,
    LinkProfile,
    Origin,
    Text,
)
from profiles.performance import Layout

_T = TypeVar("_T")


def read_profile(file: Path | Traversable, where: str = "") -> DeviceProfile:
    """Read a device profile from a TOML file.

    Args:
        where: name of the file in error messages; empty means the word "profile" and the path.

    Raises:
        ValueError: if the file cannot be read or violates the schema.
    """
    where = where or f"profile {file}"
    table = read_toml(file, where)
    version = table.get("schema")
    if version is None:
        raise ValueError(f"{where} has no `schema` key; add: schema = {SCHEMA}")
    if version != SCHEMA:
        raise ValueError(
            f"{where} has schema {version!r}; this version of cleave reads schema {SCHEMA}"
        )
    for fields, name in ((table, "contention"), (table.get("sustained"), "frequencies")):
        if isinstance(fields, dict):
            fields.pop(name, None)  # earlier versions measured this, but never used it
    return convert(table, DeviceProfile, where)


def read_toml(file: Path | Traversable, where: str) -> dict[str, Any]:
    """Read a TOML file into nested dictionaries and check its numbers.

    Raises:
        ValueError: if the file cannot be read, a number is not finite, or an integer does not fit
            in 64 bits.
    """
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # RecursionError: too deeply nested
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{where} cannot be read: {reason}") from None
    for path, value in _leaves(table, ""):
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{path} of {where} must be a finite number, not {value}")
        if isinstance(value, int) and value.bit_length() > 63:
            raise ValueError(
                f"{path} of {where} has {len(str(value))} digits; integers must fit in 64 bits"
            )
    return table


def convert(table: Mapping[str, Any], kind: type[_T], where: str) -> _T:
    """Convert nested dictionaries from a TOML file to an instance of a schema class.

    Args:
        where: name of the file or table in error messages.

    Raises:
        ValueError: if `table` violates the schema.
    """
    try:
        return msgspec.convert(table, kind, strict=True)
    except msgspec.ValidationError as error:
        raise ValueError(_explain(str(error), table, kind, where)) from None


def _explain(message: str, table: Mapping[str, Any], kind: type[Any], where: str) -> str:
    """Translate an error message of msgspec into a sentence that includes the invalid value."""
    found = re.fullmatch(r"(.*?) - at (?:`key` in )?`\$\.?(.*)`", message, re.DOTALL)
    text, path = (found[1], found[2]) if found else (message, "")
    path = _with_keys(path, table, kind)
    place = f"{path} of {where}" if path else where
    missing = re.fullmatch(r"Object missing required field `(\w+)`", text)
    if missing:
        return f"{place} lacks {missing[1]}"
    unknown = re.fullmatch(r"Object contains unknown field `(.+)`", text)
    if unknown:
        return f"{place} has the unknown field {unknown[1]!r}; check its spelling"
    wrong_word = re.fullmatch(r"Invalid enum value (.+)", text)
    if wrong_word:
        known = ", ".join(member.value for member in _words(path))
        return f"{place} has {wrong_word[1]}; use one of {known}"
    text = text.replace("Expected `", "expected `").replace("`", "")
    value = _value_at(table, path)
    if text.startswith("expected"):
        shown = "" if value is _NOTHING else f" is {value!r};"
        return f"{place}{shown} {text}"
    return f"{place}: {text}"


def _words(path: str) -> type[Enum]:
    """Return the enum class of the field at `path`."""
    return {"kind": DeviceKind, "origin": Origin, "family": AvailabilityFamily}.get(
        path.rpartition(".")[2], Layout
    )


def _with_keys(path: str, table: Mapping[str, Any], kind: type[Any]) -> str:
    """Replace each "[...]" in msgspec's path with the key that causes the validation error."""
    while "[...]" in path:
        before, _, after = path.partition("[...]")
        for key, value in _value_at(table, before).items():
            alone = _replaced(table, before.split("."), {key: value})
            try:
                msgspec.convert(alone, kind, strict=True)
            except msgspec.ValidationError:
                path, table = f"{before}.{key}{after}", alone
                break
        else:
            return path.replace("[...]", ".*")
    return path


def _replaced(table: Mapping[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    """Return a copy of nested dictionaries in which the value at `path` is replaced."""
    key, *rest = path
    return {**table, key: _replaced(table[key], rest, value) if rest else value}


_NOTHING = object()


def _value_at(table: Any, path: str) -> Any:
    value = table
    for key in re.findall(r"[^.\[\]]+", path):
        try:
            value = value[int(key)] if isinstance(value, list) else value[key]
        except (KeyError, IndexError, ValueError, TypeError):
            return _NOTHING
    return value


def _leaves(value: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        joined = [(f"{path}.{key}" if path else str(key), inner) for key, inner in value.items()]
    elif isinstance(value, list):
        joined = [(f"{path}[{i}]", inner) for i, inner in enumerate(value)]
    else:
        return [(path, value)]
    return [leaf for inner_path, inner in joined for leaf in _leaves(inner, inner_path)]


def write_profile(profile: DeviceProfile, path: Path) -> None:
    """Write a device profile to a TOML file atomically.

    Raises:
        ValueError: if the package tomli-w is missing, or the file cannot be written.
    """
    try:
        import tomli_w
    except ImportError:
        raise ValueError(not_installed("writing a profile", "tomli-w", "profile")) from None
    text = tomli_w.dumps(msgspec.to_builtins(profile))  # omits what is None
    try:
        write_output(path, _compact(text).encode())
    except OSError as error:
        raise ValueError(f"profile {path} cannot be written: {error.strerror}") from None


def _compact(text: str) -> str:
    """Put each sample in a TOML document on one line. tomli-w puts each number on its own line."""
    item = r'\s+(?:[-+.\w]+|"\w*")'  # matches numbers and words, but no strings with commas
    return re.sub(
        rf"\[(?:{item},)+\s*\]",
        lambda m: "[" + ", ".join(re.findall(r"[^\s,\[\]]+", m[0])) + "]",
        text,
    )


_SUFFIX = ".toml"


class _Named(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An entry of the library.

    `assumed` contains one line per unknown figure: the assumed value and its justification.
    """

    name: Text
    title: Text
    source: Text
    notes: str = ""
    assumed: tuple[Text, ...] = ()


class NamedLink(_Named, frozen=True, kw_only=True):
    """A network. `link` contains the quantiles from which the links of devices are drawn."""

    link: LinkProfile


class NamedAvailability(_Named, frozen=True, kw_only=True):
    """The availability of a population of devices."""

    availability: Availability


class _EmbodiedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Schema of a file that lists embodied carbon by profile name. The file has its own licence."""

    attribution: Text
    licence: Text
    url: Text
    embodied: dict[str, Embodied]


def profile_names() -> list[str]:
    """Return the sorted names of the library's device profiles."""
    return _names("devices")


def load_profile(name_or_path: str) -> DeviceProfile:
    """Load a device profile from the library or from a TOML file.

    Raises:
        ValueError: if the name is unknown, or the file is unreadable or violates the schema.
    """
    if name_or_path.endswith(_SUFFIX):
        return read_profile(Path(name_or_path))
    _check_known(name_or_path, "devices", "profile", "list them with: cleave profile list")
    profile = read_profile(
        _folder("devices") / (name_or_path + _SUFFIX), f"profile {name_or_path!r} of the library"
    )
    if profile.embodied is None:
        where = "the embodied carbon of the library"
        table = read_toml(_folder("embodied") / "boavizta.toml", where)
        found = convert(table, _EmbodiedFile, where).embodied.get(name_or_path)
        profile = msgspec.structs.replace(profile, embodied=found)
    return profile


def load_profiles() -> dict[str, DeviceProfile]:
    """Load all device profiles of the library and return them by name."""
    return {name: load_profile(name) for name in profile_names()}


def load_network(name_or_path: str) -> NamedLink:
    """Load a network from the library or from a TOML file.

    Raises:
        ValueError: if the name is unknown, or the file is unreadable or violates the schema.
    """
    return _load(name_or_path, "networks", "network", NamedLink)


def availability_names() -> list[str]:
    """Return the sorted names of the library's availabilities."""
    return _names("availability")


def load_availability(name_or_path: str) -> NamedAvailability:
    """Load an availability from the library or from a TOML file.

    Raises:
        ValueError: if the name is unknown, or the file is unreadable or violates the schema.
    """
    return _load(name_or_path, "availability", "availability", NamedAvailability)


def _load(name_or_path: str, folder: str, what: str, kind: type[_T]) -> _T:
    if name_or_path.endswith(_SUFFIX):
        where = f"{what} {name_or_path}"
        return convert(read_toml(Path(name_or_path), where), kind, where)
    _check_known(name_or_path, folder, what, f"use one of {', '.join(_names(folder))}")
    where = f"{what} {name_or_path!r} of the library"
    return convert(read_toml(_folder(folder) / (name_or_path + _SUFFIX), where), kind, where)


def _check_known(name: str, folder: str, what: str, how_to_list: str) -> None:
    names = _names(folder)
    if name in names:
        return
    near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    close = f" (similar: {', '.join(near)})" if near else ""
    raise ValueError(
        f"there is no {what} {name!r} in the library{close}; {how_to_list}, or use a file that "
        f"ends in {_SUFFIX}"
    )


def _names(folder: str) -> list[str]:
    found = (entry.name for entry in _folder(folder).iterdir())
    return sorted(name.removesuffix(_SUFFIX) for name in found if name.endswith(_SUFFIX))


def _folder(name: str) -> Traversable:
    return files("profiles") / "library" / name


# Upper bounds, to reject impossible energy reports. They lie above measurements and power supply
# ratings: phones draw up to 18 W in bursts (notebookcheck), laptop power supplies deliver up to
# 330 W and desktop power supplies up to 1600 W, and a DGX A100 draws 6.5 kW.
_MOST_W = {
    DeviceKind.PHONE: 25.0,
    DeviceKind.TABLET: 60.0,
    DeviceKind.LAPTOP: 330.0,
    DeviceKind.SBC: 150.0,
    DeviceKind.DESKTOP: 1600.0,
    DeviceKind.SERVER: 10_000.0,
    DeviceKind.CLOUD_GPU: 10_000.0,
}
_STRANGER_W = 1600.0  # a device without a known profile is assumed to be a desktop, not a server

SLACK_S = 30.0  # maximum time by which energy reports may be ahead of the PS's clock, in seconds


def most_w(profile: str) -> float:
    """Return a device's maximum plausible power in watts. Unknown profiles count as desktops."""
    return _by_profile().get(profile, _STRANGER_W)


def believable_j(energy_j: float, profile: str, present_s: float) -> bool:
    """Return True if it is plausible that a device has used `energy_j` since it connected.

    Args:
        energy_j: energy in joules that the device reports; any number, even NaN.
        profile: profile name that the device reports; any string.
        present_s: time in seconds since the device connected.
    """
    return 0 <= energy_j <= most_w(profile) * (present_s + SLACK_S)


@cache
def _by_profile() -> dict[str, float]:
    return {
        name: max(_MOST_W[profile.kind], (profile.power.compute_w or 0.0) if profile.power else 0.0)
        for name, profile in load_profiles().items()
    }
