"""Converts messages with uncompressed payloads to messages with compressed payloads, and back."""

from __future__ import annotations

from typing import Final, TypeAlias, overload

from cleave.arrays import DType
from cleave.coding.exponents import Each, decode, encode_if_shorter
from cleave.errors import ProtocolError
from cleave.protocol.messages import Put, PutCoded, Result, ResultCoded

Plain: TypeAlias = Put | Result
Coded: TypeAlias = PutCoded | ResultCoded

_DTYPES: Final = {dtype.value: dtype for dtype in DType}


def coded_payload(message: Plain, each: Each = map) -> bytes | None:
    """Return the compressed payload of a message.

    Args:
        message: a message with an uncompressed payload, which may be `Packable`.
        each: maps a function over the payload's chunks (see `Each`).

    Returns:
        The compressed payload; None if the dtype is not floating-point, or if compression would not
            save enough bytes.
    """
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:  # only floating-point arrays are compressed
        return None
    payload = message.payload
    packed = payload if isinstance(payload, bytes | memoryview) else payload.pack()
    return encode_if_shorter(packed, dtype, each)


@overload
def with_coded(message: Put, coded: bytes) -> PutCoded: ...
@overload
def with_coded(message: Result, coded: bytes) -> ResultCoded: ...
def with_coded(message: Plain, coded: bytes) -> Coded:
    """Return `put_coded` for a `put`, or `result_coded` for a `result`.

    Args:
        message: the message with the uncompressed payload.
        coded: the compressed payload.
    """
    shape = message.rows, message.columns, message.dtype
    if isinstance(message, Put):
        return PutCoded(message.id, *shape, coded)
    return ResultCoded(message.id, *shape, message.compute_s, coded)


def array_bytes(message: Coded) -> int:
    """Return the size of a message's payload after decompression, in bytes.

    Raises:
        ProtocolError: when the message's dtype is not floating-point.
    """
    return message.rows * message.columns * _dtype(message).itemsize


def put_of(message: PutCoded, each: Each = map) -> Put:
    """Convert a `put_coded` message to a `put` by decompressing its payload.

    Raises:
        ProtocolError: when the payload is not valid.
    """
    payload = decode(message.payload, _dtype(message), array_bytes(message), each)
    return Put(message.id, message.rows, message.columns, message.dtype, payload)


def result_of(message: ResultCoded, each: Each = map) -> Result:
    """Convert a `result_coded` message to a `result` by decompressing its payload.

    Raises:
        ProtocolError: when the payload is not valid.
    """
    payload = decode(message.payload, _dtype(message), array_bytes(message), each)
    shape = message.rows, message.columns, message.dtype
    return Result(message.id, *shape, message.compute_s, payload)


def _dtype(message: Coded) -> DType:
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise ProtocolError(f"no {message.dtype!r} array is coded")
    return dtype
