"""The part of protobuf's encoding that ONNX models need: fields read in place, and written.

A message is a sequence of fields. Each has a number and a value: an integer, or bytes, which may be
an embedded message. The message's schema, not the bytes, tells which it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, TypeAlias

Field: TypeAlias = tuple[int, int | memoryview]
"""A field's number and value; fixed-length values, such as floats, are bytes here."""

_VARINT: Final = 0
_BYTES: Final = 2
_FIXED: Final = {1: 8, 5: 4}  # bytes by wire type
_LONGEST_VARINT: Final = 10  # bytes, for 64 bits
_WORD: Final = 2**64
_LARGEST_NUMBER: Final = 2**29 - 1  # readers disagree about larger field numbers


class ProtobufError(ValueError):
    """The bytes are not a message."""


def fields(message: memoryview) -> Iterator[Field]:
    """Yield a message's fields in order. Values are views of the message: nothing is copied.

    Raises:
        ProtobufError: when the bytes are not fields, or are groups, which only old formats have.
    """
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, wire = key >> 3, key & 7
        if not 0 < number <= _LARGEST_NUMBER:
            raise ProtobufError(f"a field at byte {at} has the number {number}")
        if wire == _VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if wire == _BYTES:
            length, at = _varint(message, at)
        elif wire in _FIXED:
            length = _FIXED[wire]
        else:
            raise ProtobufError(f"field {number} at byte {at} is of an unknown kind, {wire}")
        if length > len(message) - at:
            raise ProtobufError(f"field {number} at byte {at} ends after its message")
        yield number, message[at : at + length]
        at += length


def integers(value: int | memoryview) -> Iterator[int]:
    """Yield the unsigned integers of a repeated field: a single integer or a packed list.

    Raises:
        ProtobufError: when the bytes are not integers.
    """
    if isinstance(value, int):
        yield value
        return
    at = 0
    while at < len(value):
        found, at = _varint(value, at)
        yield found


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Return an unsigned 64-bit integer, and the index after its end."""
    if at < len(message) and (first := message[at]) < 0x80:  # the most frequent case
        return first, at + 1
    found = 0
    for place, byte in enumerate(message[at : at + _LONGEST_VARINT]):
        found |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return found % _WORD, at + place + 1
    raise ProtobufError(f"an integer at byte {at} does not end")


def integer(number: int, value: int) -> bytes:
    """Write an integer field, from -2^63 to 2^64 - 1."""
    return _written(number << 3 | _VARINT) + _written(value % _WORD)


def content(number: int, *parts: bytes | str) -> bytes:
    """Write a text, bytes or message field; the parts are joined."""
    held = b"".join(part.encode() if isinstance(part, str) else part for part in parts)
    return _written(number << 3 | _BYTES) + _written(len(held)) + held


def _written(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
