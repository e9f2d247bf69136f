"""Lossless compression of floating-point payloads, and conversion of messages that contain them.

The exponents of a model's values are similar, but signs and fractions are almost random. So only
the exponents are compressed:

1. Each 16-bit element is rotated left by one bit. In an fp32 element, only the upper half, which is
   a bf16 number, is rotated. The upper byte of a rotated bf16 number is the exponent, and the lower
   byte contains the fraction and the sign. The upper byte of a rotated fp16 number also contains
   three bits of the fraction.
2. The upper bytes are compressed with DEFLATE, using Huffman codes only, because a search for
   repetitions is slow and finds none.
3. All other bytes are stored uncompressed.

A chunk's compressed bytes inflate to at most as many bytes as the chunk stores uncompressed, so
decompression bombs are impossible. Zlib and numpy release the GIL, so several threads can process
chunks in parallel. `Coder` keeps the event loop free.
"""

from __future__ import annotations

import asyncio
import os
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeAlias, overload
from weakref import WeakValueDictionary

import numpy as np

from cleave import coding
from cleave.arrays import Array, DType
from cleave.errors import ProtocolError
from cleave.protocol.codec import payload_bytes
from cleave.protocol.limits import CODED_CHUNK, CODED_LEAST_BYTES
from cleave.protocol.messages import Put, PutCoded, Result, ResultCoded

Payload: TypeAlias = bytes | memoryview
Each: TypeAlias = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]  # like `map`
_WORTH: Final = 0.95  # maximum ratio of compressed to plain size worth the time
_SAMPLE: Final = 4096  # approximate number of elements in a sample
_LENGTH_BYTES: Final = 4
_MEMORY_LEVEL: Final = 9  # zlib starts a block every 32768 bytes: fewer headers than at level 8


def encode(payload: Payload, dtype: DType, each: Each = map) -> bytes:
    """Compress little-endian elements, chunk by chunk. The result may be longer than `payload`."""
    words = np.frombuffer(payload, "<u2")
    step = CODED_CHUNK * _words(dtype)
    chunks = [words[at : at + step] for at in range(0, words.size, step)]
    parts: list[bytes] = []
    for coded in each(lambda chunk: _encode_chunk(chunk, dtype), chunks):
        parts += coded
    return b"".join(parts)


def encode_if_shorter(payload: Payload, dtype: DType, each: Each = map) -> bytes | None:
    """Compress a payload. Return None if the payload is short or compression saves too little."""
    if len(payload) < CODED_LEAST_BYTES or _sampled_ratio(payload, dtype) > _WORTH:
        return None
    coded = encode(payload, dtype, each)
    return coded if len(coded) < len(payload) else None


def decode(coded: Payload, dtype: DType, nbytes: int, each: Each = map) -> memoryview:
    """Decompress a payload from an untrusted peer.

    The length of `coded` is checked before memory is allocated. A valid compressed payload is
    longer than half of `nbytes`, so short messages cannot cause large allocations.

    Raises:
        ProtocolError: if `coded` is not a compressed payload of `nbytes` bytes.
    """
    chunks = _chunks(memoryview(coded), dtype, nbytes)
    words = np.empty(nbytes // 2, "<u2")
    step = CODED_CHUNK * _words(dtype)
    targets = [words[at : at + step] for at in range(0, words.size, step)]
    for _ in each(
        lambda both: _decode_chunk(both[0], both[1], dtype), zip(chunks, targets, strict=True)
    ):
        pass
    return words.view(np.uint8).data


def _words(dtype: DType) -> int:
    """Return the number of 16-bit words in an element. The last word contains the exponent."""
    return dtype.itemsize // 2


def _encode_chunk(chunk: Array, dtype: DType) -> list[bytes]:
    """Compress one chunk, an array of 16-bit words. Return the parts of the result in order."""
    upper = chunk[_words(dtype) - 1 :: _words(dtype)]
    packer = zlib.compressobj(
        method=zlib.DEFLATED, memLevel=_MEMORY_LEVEL, strategy=zlib.Z_HUFFMAN_ONLY
    )
    deflated = packer.compress((upper >> 7).astype(np.uint8).data) + packer.flush()
    fractions = ((upper << 1) | (upper >> 15)).astype(np.uint8)
    parts = [len(deflated).to_bytes(_LENGTH_BYTES, "little"), deflated, fractions.tobytes()]
    if dtype is DType.FP32:
        parts.append(chunk[::2].tobytes())
    return parts


def _chunks(coded: memoryview, dtype: DType, nbytes: int) -> list[tuple[memoryview, memoryview]]:
    """Split a compressed payload into the deflated part and the uncompressed part of each chunk."""
    count, left = divmod(nbytes, dtype.itemsize)
    if left:
        raise ProtocolError(f"the length of a {dtype.value} array cannot be {nbytes} bytes")
    chunks = []
    at = 0
    while count > 0:
        begin = at + _LENGTH_BYTES
        middle = begin + int.from_bytes(coded[at:begin], "little")
        at = middle + min(count, CODED_CHUNK) * (dtype.itemsize - 1)
        if at > len(coded):
            raise ProtocolError(
                f"the compressed data of an array of {nbytes} bytes ends after {len(coded)} bytes"
            )
        chunks.append((coded[begin:middle], coded[middle:at]))
        count -= CODED_CHUNK
    if at < len(coded):
        raise ProtocolError(f"{len(coded) - at} bytes follow the end of a compressed array")
    return chunks


def _decode_chunk(parts: tuple[memoryview, memoryview], words: Array, dtype: DType) -> None:
    deflated, plain = parts
    upper = words[_words(dtype) - 1 :: _words(dtype)]
    unpacker = zlib.decompressobj()
    try:
        exponents = unpacker.decompress(deflated, upper.size + 1)
    except zlib.error as error:
        raise ProtocolError(f"a compressed array cannot be inflated: {error}") from None
    if len(exponents) != upper.size or not unpacker.eof or unpacker.unused_data:
        raise ProtocolError(f"a compressed array must inflate to exactly {upper.size} exponents")
    fractions = np.frombuffer(plain, np.uint8, upper.size).astype(np.uint16)
    upper[:] = np.frombuffer(exponents, np.uint8)
    upper <<= 7
    upper |= fractions >> 1
    upper |= fractions << 15
    if dtype is DType.FP32:
        words[::2] = np.frombuffer(plain, "<u2", offset=upper.size)


def _sampled_ratio(payload: Payload, dtype: DType) -> float:
    """Estimate the ratio of compressed to plain size from the entropy of sampled exponents."""
    upper = np.frombuffer(payload, "<u2")[_words(dtype) - 1 :: _words(dtype)]
    sample = (upper[:: max(1, upper.size // _SAMPLE)] >> 7).astype(np.uint8)
    shares = np.bincount(sample) / sample.size
    shares = shares[shares > 0]
    bits = float(-(shares * np.log2(shares)).sum())
    return (dtype.itemsize - 1 + bits / 8) / dtype.itemsize


Plain: TypeAlias = Put | Result
Coded: TypeAlias = PutCoded | ResultCoded

_DTYPES: Final = {dtype.value: dtype for dtype in DType}


def coded_payload(message: Plain, each: Each = map) -> bytes | None:
    """Compress a floating-point payload. Return None for other dtypes or small savings."""
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
    """Convert a `put` to a `put_coded`, or a `result` to a `result_coded`, with payload `coded`."""
    shape = message.rows, message.columns, message.dtype
    if isinstance(message, Put):
        return PutCoded(message.id, *shape, coded)
    return ResultCoded(message.id, *shape, message.compute_s, coded)


def array_bytes(message: Coded) -> int:
    """Return the size of a message's decompressed payload in bytes."""
    return message.rows * message.columns * _dtype(message).itemsize


def put_of(message: PutCoded, each: Each = map) -> Put:
    """Convert a `put_coded` to a `put`. Raise ProtocolError if the payload is not valid."""
    return Put(message.id, message.rows, message.columns, message.dtype, _plain(message, each))


def result_of(message: ResultCoded, each: Each = map) -> Result:
    """Convert a `result_coded` to a `result`. Raise ProtocolError if the payload is not valid."""
    shape = message.rows, message.columns, message.dtype
    return Result(message.id, *shape, message.compute_s, _plain(message, each))


def _plain(message: Coded, each: Each) -> memoryview:
    return decode(message.payload, _dtype(message), array_bytes(message), each)


def _dtype(message: Coded) -> DType:
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise ProtocolError(f"an array of dtype {message.dtype!r} cannot be compressed")
    return dtype


class SharedArray:
    """An array sent in `put` messages. The first call to `coded` compresses the array."""

    def __init__(self, put: Put, pool: ThreadPoolExecutor) -> None:
        self.payload = put.payload
        self._put = put
        self._pool = pool
        self._coding: asyncio.Task[bytes | None] | None = None

    async def coded(self) -> bytes | None:
        """Return the compressed array; None if the array should be sent uncompressed."""
        if self._coding is None:
            compressed = asyncio.to_thread(coding.coded_payload, self._put, self._pool.map)
            self._coding = asyncio.create_task(compressed)
        return await asyncio.shield(self._coding)  # cancelling one sender must not cancel this task


class Coder:
    """Compresses and decompresses payloads for all sessions, in background threads."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1, "cleave-coding")
        self._shared: WeakValueDictionary[int, SharedArray] = WeakValueDictionary()

    def shared(self, put: Put) -> SharedArray | None:
        """Return the `SharedArray` of a payload; None if the payload is too small to compress."""
        if payload_bytes(put.payload) < CODED_LEAST_BYTES:
            return None
        array = self._shared.get(id(put.payload))
        if array is None:  # SharedArray keeps the payload alive, so the payload's id stays unique
            array = self._shared[id(put.payload)] = SharedArray(put, self._pool)
        return array

    async def put(self, put: Put, array: SharedArray) -> Put | PutCoded:
        """Return a message with the compressed array, or `put` to send the array uncompressed."""
        found = await array.coded()
        return put if found is None else coding.with_coded(put, found)

    async def result(self, message: ResultCoded) -> Result:
        """Decompress a device's `result_coded` message. Raise ProtocolError if it is invalid."""
        if payload_bytes(message.payload) < CODED_LEAST_BYTES:
            return coding.result_of(message)
        return await asyncio.to_thread(coding.result_of, message, self._pool.map)

    def close(self) -> None:
        """Stop the compression threads and cancel queued compressions."""
        self._pool.shutdown(wait=False, cancel_futures=True)
