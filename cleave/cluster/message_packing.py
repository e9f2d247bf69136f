"""Pack messages between a worker and its endpoint during a step by stages.

Each graph or array is sent once. Later messages refer to it by number, so the endpoint reuses the
same Python object. Devices keep a graph or a frozen weight only as long as this object is reused.
Bytes are sent as numpy arrays, which Ray does not copy between processes on one node.
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
class ObjectReference:
    """A reference that replaces a graph or an array in a message."""

    number: int  # identifies the object to the worker and the endpoint
    content: StageGraph | StageArray | None  # None if the object was sent before
    part_rows: tuple[int, ...] = ()  # number of rows of each part, if an array is split


@dataclass(frozen=True, slots=True)
class PlainBytes:
    """A byte string in a message, stored as a numpy array of uint8."""

    array: Array


class Packer:
    """Packs the worker's messages by replacing graphs and arrays with references."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[int, StageGraph | StageArray]] = {}
        self._next = 0

    def pack(self, value: Any) -> Any:
        """Return a copy of `value` in which references replace all graphs and arrays."""
        return _replaced(value, self._packed)

    def forget_others(self, value: Any) -> list[int]:
        """Forget sent graphs and arrays that `value` does not contain. Return their numbers."""
        kept: set[int] = set()

        def note(each: Any) -> Any:
            if isinstance(each, StageGraph | StageArray):
                kept.add(id(each))
            return each

        _replaced(value, note)
        gone = [key for key in self._sent if key not in kept]
        return [self._sent.pop(key)[0] for key in gone]

    def received_back(self, value: Any) -> Any:
        """Unpack an outcome in the worker. References become the arrays that the worker sent."""
        held = dict(self._sent.values())

        def found(each: Any) -> Any:
            if isinstance(each, ObjectReference):
                return held[each.number]
            if isinstance(each, PlainBytes):
                return each.array.data
            if isinstance(each, StageArray) and isinstance(each.payload, PlainBytes):
                return replace(each, payload=each.payload.array.data)
            return each

        return _replaced(value, found)

    def _packed(self, value: Any) -> Any:
        if not isinstance(value, StageGraph | StageArray):
            return _as_plain(value)
        if (known := self._sent.get(id(value))) is not None:
            return ObjectReference(known[0], None)
        number, self._next = self._next, self._next + 1
        self._sent[id(value)] = number, value
        if isinstance(value, StageGraph):
            return ObjectReference(number, value)
        rows = tuple(part.rows for part in value.parts)
        content = replace(value, payload=_as_plain(value.payload), parts=())
        return ObjectReference(number, content, rows)


class Unpacker:
    """Unpacks messages at the endpoint by replacing references with graphs and arrays."""

    def __init__(self) -> None:
        self._held: dict[int, StageGraph | StageArray] = {}

    def unpack(self, value: Any) -> Any:
        """Return a copy of `value` in which graphs and arrays replace all references."""
        return _replaced(value, self._unpacked)

    def forget(self, numbers: Sequence[int]) -> None:
        """Forget the objects in `numbers`, which the worker will not reference again."""
        for number in numbers:
            self._held.pop(number, None)

    def sent_back(self, value: Any) -> Any:
        """Pack an outcome for the worker. Arrays that the worker sent become references."""
        numbers = {id(held): number for number, held in self._held.items()}

        def named(each: Any) -> Any:
            if isinstance(each, StageArray) and id(each) in numbers:
                return ObjectReference(numbers[id(each)], None)
            if isinstance(each, StageArray):
                return replace(each, payload=_as_plain(each.payload), parts=())
            return _as_plain(each)

        return _replaced(value, named)

    def _unpacked(self, value: Any) -> Any:
        if isinstance(value, PlainBytes):
            return value.array.data
        if not isinstance(value, ObjectReference):
            return value
        if value.content is None:
            return self._held[value.number]
        made = value.content
        if isinstance(made, StageArray):
            made = replace(made, payload=self._unpacked(made.payload))
            made = replace(made, parts=tuple(_parts(made, value.part_rows)))
        self._held[value.number] = made
        return made


def _as_plain(value: Any) -> Any:
    if isinstance(value, memoryview) or (isinstance(value, bytes) and len(value) > _SMALL_BYTES):
        return PlainBytes(np.frombuffer(value, np.uint8))
    return value


def _parts(whole: StageArray, rows: tuple[int, ...]) -> list[StageArray]:
    """Split an array into consecutive views. `rows` is the number of rows of each view."""
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
    """Return a copy of `value`, with `swap` applied to the value and all nested values.

    `swap` is not applied inside graphs, inside arrays, or inside values that it has replaced.
    """
    if (other := swap(value)) is not value or isinstance(value, StageGraph | StageArray):
        return other
    if isinstance(value, ObjectReference | PlainBytes | Enum | str | bytes | int | float | None):
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
