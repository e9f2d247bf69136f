"""Reads and writes the part of protobuf's encoding that ONNX models need.

A message is a sequence of fields. A field has a number and a value, which is an integer or bytes.
The bytes may be a text or an embedded message. The encoding does not distinguish these; only the
message's schema does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, TypeAlias

Field: TypeAlias = tuple[int, int | memoryview]
"""A field's number and value. A fixed-length value, such as a float, is given as bytes."""

_VARINT: Final = 0
_BYTES: Final = 2
_FIXED: Final = {1: 8, 5: 4}  # size in bytes of each fixed-length wire type
_LONGEST_VARINT: Final = 10  # bytes in the encoding of a 64-bit integer
_WORD: Final = 2**64
_LARGEST_NUMBER: Final = 2**29 - 1  # readers disagree about larger field numbers


class ProtobufError(ValueError):
    """The bytes are not a valid protobuf message."""


def fields(message: memoryview) -> Iterator[Field]:
    """Yield the fields of a message in order. Values that are bytes are views of the message.

    Raises:
        ProtobufError: when the message is not valid, or contains a group, which is a deprecated
            kind of field.
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
    """Yield the unsigned integers in the value of a repeated integer field.

    Args:
        value: a single integer, or the bytes of a packed list of integers.

    Raises:
        ProtobufError: when the bytes are not a packed list of integers.
    """
    if isinstance(value, int):
        yield value
        return
    at = 0
    while at < len(value):
        found, at = _varint(value, at)
        yield found


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Decode the unsigned 64-bit varint at index `at`.

    Returns:
        The integer, and the index after its last byte.
    """
    if at < len(message) and (first := message[at]) < 0x80:  # the most frequent case
        return first, at + 1
    found = 0
    for place, byte in enumerate(message[at : at + _LONGEST_VARINT]):
        found |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return found % _WORD, at + place + 1
    raise ProtobufError(f"an integer at byte {at} does not end")


def integer(number: int, value: int) -> bytes:
    """Encode an integer field.

    Args:
        number: field number.
        value: an integer from -2^63 to 2^64 - 1.
    """
    return _written(number << 3 | _VARINT) + _written(value % _WORD)


def content(number: int, *parts: bytes | str) -> bytes:
    """Encode a text, bytes or message field.

    Args:
        number: field number.
        parts: parts of the field's value, which are concatenated.
    """
    held = b"".join(part.encode() if isinstance(part, str) else part for part in parts)
    return _written(number << 3 | _BYTES) + _written(len(held)) + held


def _written(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
