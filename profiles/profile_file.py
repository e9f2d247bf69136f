"""Reads and writes profile files, which are TOML, and checks them against the profile schema."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from cleave.errors import not_installed
from cleave.files import write_output
from profiles.availability import AvailabilityFamily
from profiles.device_profile import SCHEMA, DeviceKind, DeviceProfile, Origin
from profiles.performance import Layout

_T = TypeVar("_T")


class Readable(Protocol):
    """A file whose text can be read, such as a path or a resource of the `profiles` package."""

    def read_text(self, encoding: str) -> str: ...


def read_profile(file: Path | Readable, where: str = "") -> DeviceProfile:
    """Read a device profile from a TOML file.

    Args:
        file: a TOML file.
        where: name of the file in error messages; empty means the word "profile" and the path.

    Raises:
        ValueError: when the file cannot be read or violates the schema. The message is one
            sentence that names the field and the value.
    """
    where = where or f"profile {file}"
    table = read_toml(file, where)
    version = table.get("schema")
    if version is None:
        raise ValueError(f"{where} lacks schema; a profile begins with: schema = {SCHEMA}")
    if version != SCHEMA:
        raise ValueError(
            f"{where} has schema {version!r}; this version of cleave reads schema {SCHEMA}"
        )
    return convert(table, DeviceProfile, where)


def read_toml(file: Path | Readable, where: str) -> dict[str, Any]:
    """Read a TOML file into nested dictionaries, and check its numbers.

    Raises:
        ValueError: when the file cannot be read, a number is not finite, or an integer needs more
            than 64 bits.
    """
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # tomllib lets Python's errors through
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{where} cannot be read: {reason}") from None
    for path, value in _leaves(table, ""):
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{path} of {where} is {value}; give a finite number")
        if isinstance(value, int) and value.bit_length() > 63:
            raise ValueError(f"{path} of {where} has {len(str(value))} digits; give fewer")
    return table


def convert(table: Mapping[str, Any], kind: type[_T], where: str) -> _T:
    """Convert nested dictionaries to an instance of a schema class.

    Args:
        table: content of a TOML file or of a table in it.
        kind: schema class, such as `DeviceProfile`.
        where: name of the file or table in error messages.

    Raises:
        ValueError: when `table` violates the schema. The message is one sentence that names the
            field and the value.
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
    """Replace each "[...]" in a path of msgspec by the actual dictionary key.

    The key is found by converting the dictionary with one key at a time.
    """
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
        ValueError: when the package tomli-w is missing, or the file cannot be written.
    """
    try:
        import tomli_w
    except ImportError:
        raise ValueError(not_installed("writing a profile", "tomli-w", "profile")) from None
    values = _without_none(msgspec.to_builtins(profile))
    text = tomli_w.dumps({"schema": SCHEMA, **values})
    try:
        write_output(path, _compact(text).encode())
    except OSError as error:
        raise ValueError(f"profile {path} cannot be written: {error.strerror}") from None


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return [_without_none(v) for v in value] if isinstance(value, list | tuple) else value


def _compact(text: str) -> str:
    """Put each sample of a TOML text on one line; tomli-w puts every number on its own line."""
    item = r'\s+(?:[-+.\w]+|"\w*")'  # matches numbers and words, but no text with commas
    return re.sub(
        rf"\[(?:{item},)+\s*\]",
        lambda m: "[" + ", ".join(re.findall(r"[^\s,\[\]]+", m[0])) + "]",
        text,
    )
