"""Reading the vectors of `tests/vectors`."""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Any

import pytest

from cleave.protocol import messages
from cleave.protocol.messages import ByeCode, ErrorCode, Message, Role

FOLDER = Path(__file__).parent.parent / "vectors"
TYPES: dict[str, type[Any]] = {cls.TYPE: cls for cls in typing.get_args(messages.Message)}
HAS_PAYLOAD = ("put", "put_coded", "graph", "result", "result_coded")

Vector = dict[str, Any]


def load(name: str) -> list[Vector]:
    """The vectors of a file."""
    document = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    vectors: list[Vector] = document["vectors"]
    return vectors


def each(name: str) -> pytest.MarkDecorator:
    """One test for each vector of a file."""
    cases = [pytest.param(vector, id=vector["name"]) for vector in load(name)]
    return pytest.mark.parametrize("vector", cases)


def octets(value: Any) -> bytes:
    """Bytes as the vectors write them: hex, hex repeated, or a list of such."""
    if isinstance(value, str):
        return bytes.fromhex(value)
    if isinstance(value, list):
        return b"".join(octets(part) for part in value)
    return bytes.fromhex(value["hex"]) * int(value["times"])


def plain(value: Any) -> Any:
    """A value as the vectors write it: integers beyond 2**53 come as text."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        if set(value) == {"$int"}:
            return int(value["$int"])
        return {key: plain(item) for key, item in value.items()}
    return value


def message(vector: Vector) -> Message:
    """The message that a vector describes."""
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in plain(vector["fields"]).items()
    }
    code = ByeCode if vector["type"] == "bye" else ErrorCode
    for name, kind in (("role", Role), ("code", code)):
        if name in values:
            values[name] = kind(values[name])
    if "payload" in vector:
        values["payload"] = octets(vector["payload"])
    made: Message = TYPES[vector["type"]](**values)
    return made
