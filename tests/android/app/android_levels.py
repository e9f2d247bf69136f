"""Since which API level Android has a class, field or method: what D8's own database says.

It knows everything by a 32-bit hash of its name and exact types, so what has another type is not
found. A few thousand whose hashes are not unique are missing in the table that is read here.
"""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from typing import Final

from tests.android.app.class_files import Use, parameters_of

_SERIALIZED: Final = 23
"""Bytes of Java's serialization before an array's length."""


class AndroidLevels:
    """The database in `bundletool.jar`."""

    def __init__(self, bundletool: Path) -> None:
        with zipfile.ZipFile(bundletool) as archive:
            hashes = archive.read("api_database/api_database_hash_lookup.ser")
            levels = archive.read("api_database/api_database_api_level.ser")
        (count,) = struct.unpack_from(">i", hashes, _SERIALIZED)
        keys = struct.unpack_from(f">{count}i", hashes, _SERIALIZED + 4)
        self._levels = dict(zip(keys, levels[_SERIALIZED + 4 :], strict=True))

    def of(self, use: Use) -> int | None:
        """The level, or None for what is not found."""
        return self._levels.get(_hash(use))


def _hash(use: Use) -> int:
    owner = _text_hash(f"L{use.owner};")
    if not use.name:
        return owner
    name = _text_hash(use.name)
    if not use.descriptor.startswith("("):
        return _int32(owner + 7 * _text_hash(use.descriptor) + 31 * name)
    parameters, result = parameters_of(use.descriptor)
    letters = "".join("L" if kind[0] in "[L" else kind for kind in (result, *parameters))
    types = 1
    for parameter in parameters:
        types = _int32(31 * types + _text_hash(parameter))
    prototype = _int32(7 * _text_hash(letters) + 13 * _text_hash(result) + 31 * types)
    return _int32(7 * owner + 29 * prototype + 31 * name)


def _text_hash(text: str) -> int:
    value = 1
    for byte in (*text.encode(), 0):
        value = _int32(31 * value + (byte - 256 if byte > 127 else byte))
    return _int32(7 * len(text) + value)


def _int32(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31
