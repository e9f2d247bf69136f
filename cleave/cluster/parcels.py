"""Messages between a worker and its endpoint about steps by stages; each object is sent once.

Devices keep a graph or frozen weight as long as they get the same object. So both sides number the
graphs and arrays sent. A known object is sent as its number, and the receiver looks up that very
object. Bytes travel as numpy arrays, which Ray does not copy on a node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from typing import Any, Final

import numpy as np

from cleave.arrays import Array
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.work import StageGraph

_SMALL_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Parcel:
    """A reference to a graph or an array.

    Attributes:
        number: number of the object on both sides.
        content: object itself; None if it was sent before.
        part_rows: rows of each of its parts, if any.
    """

    number: int
    content: StageGraph | StageArray | None
    part_rows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PlainBytes:
    """Received bytes, or bytes to send."""

    array: Array


class Packer:
    """Replaces graphs and arrays by references."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[int, StageGraph | StageArray]] = {}
        self._next = 0

    def pack(self, value: Any) -> Any:
        """Return a value with all graphs and arrays replaced by references."""
        return _replaced(value, self._packed)

    def forget_others(self, value: Any) -> list[int]:
        """Forget objects that are not in a value; return their numbers, for the other side."""
        kept: set[int] = set()

        def note(each: Any) -> Any:
            if isinstance(each, StageGraph | StageArray):
                kept.add(id(each))
            return each

        _replaced(value, note)
        gone = [key for key in self._sent if key not in kept]
        return [self._sent.pop(key)[0] for key in gone]

    @property
    def sent(self) -> dict[int, StageGraph | StageArray]:
        """Return the sent objects, by number."""
        return dict(self._sent.values())

    def _packed(self, value: Any) -> Any:
        if not isinstance(value, StageGraph | StageArray):
            return _as_plain(value)
        if (known := self._sent.get(id(value))) is not None:
            return Parcel(known[0], None)
        number, self._next = self._next, self._next + 1
        self._sent[id(value)] = number, value
        if isinstance(value, StageGraph):
            return Parcel(number, value)
        rows = tuple(part.rows for part in value.parts)
        content = replace(value, payload=_as_plain(value.payload), parts=())
        return Parcel(number, content, rows)


class Unpacker:
    """Restores the values that a `Packer` replaced."""

    def __init__(self) -> None:
        self._held: dict[int, StageGraph | StageArray] = {}

    def unpack(self, value: Any) -> Any:
        """Return a value with its graphs and arrays; a number always yields the same object."""
        return _replaced(value, self._unpacked)

    def forget(self, numbers: Sequence[int]) -> None:
        """Forget objects that will not be referenced again."""
        for number in numbers:
            self._held.pop(number, None)

    def names(self) -> Callable[[Any], Any]:
        """Return a function that replaces objects known to the other side by references."""
        numbers = {id(value): number for number, value in self._held.items()}

        def named(value: Any) -> Any:
            if isinstance(value, StageArray) and id(value) in numbers:
                return Parcel(numbers[id(value)], None)
            if isinstance(value, StageArray):
                return replace(value, payload=_as_plain(value.payload), parts=())
            return _as_plain(value)

        return named

    def _unpacked(self, value: Any) -> Any:
        if isinstance(value, PlainBytes):
            return value.array.data
        if not isinstance(value, Parcel):
            return value
        if value.content is None:
            return self._held[value.number]
        made = value.content
        if isinstance(made, StageArray):
            made = replace(made, payload=self._unpacked(made.payload))
            made = replace(made, parts=tuple(_parts(made, value.part_rows)))
        self._held[value.number] = made
        return made


def sent_back(value: Any, unpacker: Unpacker) -> Any:
    """Return an outcome as the endpoint sends it, with references to the worker's own objects."""
    return _replaced(value, unpacker.names())


def received_back(value: Any, packer: Packer) -> Any:
    """Return an outcome as the worker reads it, with references resolved."""
    held = packer.sent

    def found(each: Any) -> Any:
        if isinstance(each, Parcel):
            return held[each.number]
        if isinstance(each, PlainBytes):
            return each.array.data
        if isinstance(each, StageArray) and isinstance(each.payload, PlainBytes):
            return replace(each, payload=each.payload.array.data)
        return each

    return _replaced(value, found)


def _as_plain(value: Any) -> Any:
    if isinstance(value, memoryview) or (isinstance(value, bytes) and len(value) > _SMALL_BYTES):
        return PlainBytes(np.frombuffer(value, np.uint8))
    return value


def _parts(whole: StageArray, rows: tuple[int, ...]) -> list[StageArray]:
    """Return the parts of an array as views of its elements."""
    found, first = [], 0
    for count in rows:
        part = whole.payload
        row_bytes = whole.nbytes // whole.rows
        if isinstance(part, memoryview):
            part = part.cast("B")[first * row_bytes : (first + count) * row_bytes]
        else:
            buffer: Any = part
            part = replace(buffer, array=buffer.array[first : first + count])
        found.append(replace(whole, rows=count, payload=part, parts=()))
        first += count
    return found


def _replaced(value: Any, swap: Callable[[Any], Any]) -> Any:
    """Return a value in which `swap` was applied recursively."""
    if (other := swap(value)) is not value or isinstance(value, StageGraph | StageArray):
        return other
    if isinstance(value, Parcel | PlainBytes | Enum | str | bytes | int | float | None):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        changed = {}
        for field in fields(value):
            before = getattr(value, field.name)
            after = _replaced(before, swap)
            if after is not before:
                changed[field.name] = after
        return replace(value, **changed) if changed else value
    if isinstance(value, Mapping):
        return {key: _replaced(each, swap) for key, each in value.items()}
    if isinstance(value, list | tuple):
        made = [_replaced(each, swap) for each in value]
        return made if isinstance(value, list) else tuple(made)
    return value
