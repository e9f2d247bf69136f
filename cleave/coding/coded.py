"""Converts plain messages to messages with compressed payloads, and back."""

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
    """Return a message's array in compressed form; None if it should travel uncompressed.

    Args:
        message: the message; its payload may not be packed yet.
        each: maps a function over the chunks.
    """
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:  # integers
        return None
    payload = message.payload
    packed = payload if isinstance(payload, bytes | memoryview) else payload.pack()
    return encode_if_shorter(packed, dtype, each)


@overload
def with_coded(message: Put, coded: bytes) -> PutCoded: ...
@overload
def with_coded(message: Result, coded: bytes) -> ResultCoded: ...
def with_coded(message: Plain, coded: bytes) -> Coded:
    """Return the message that carries the array in compressed form."""
    shape = message.rows, message.columns, message.dtype
    if isinstance(message, Put):
        return PutCoded(message.id, *shape, coded)
    return ResultCoded(message.id, *shape, message.compute_s, coded)


def array_bytes(message: Coded) -> int:
    """Return the decompressed size of a message's array in bytes.

    Raises:
        ProtocolError: when arrays of its dtype are never compressed.
    """
    return message.rows * message.columns * _dtype(message).itemsize


def put_of(message: PutCoded, each: Each = map) -> Put:
    """Decompress a `put_coded` message to a `put`."""
    payload = decode(message.payload, _dtype(message), array_bytes(message), each)
    return Put(message.id, message.rows, message.columns, message.dtype, payload)


def result_of(message: ResultCoded, each: Each = map) -> Result:
    """Decompress a `result_coded` message to a `result`."""
    payload = decode(message.payload, _dtype(message), array_bytes(message), each)
    shape = message.rows, message.columns, message.dtype
    return Result(message.id, *shape, message.compute_s, payload)


def _dtype(message: Coded) -> DType:
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise ProtocolError(f"no {message.dtype!r} array is coded")
    return dtype
