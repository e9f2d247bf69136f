"""Lossless compression of floating-point payloads, for the network.

The exponents of a model's numbers are similar, while their signs and fractions are almost random.
So each 16-bit word (of fp32 the upper half, which is a bf16) is rotated left by one bit. Then bf16
has its exponent in the upper byte, and fraction and sign in the lower. Fp16 has its exponent and
the top of its fraction in the upper. The upper bytes are deflated with Huffman codes alone, because
a search for repetitions is slow and finds none; the rest is not compressed. At most as many bytes
are inflated as arrived uncompressed, so decompression bombs are impossible.

`docs/protocol.md` defines the layout. Everything here is pure. Zlib and numpy release the GIL, so
chunks can be processed in several threads.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

import numpy as np

from cleave.arrays import Array, DType
from cleave.errors import ProtocolError
from cleave.protocol.limits import CODED_CHUNK, CODED_LEAST_BYTES

Payload: TypeAlias = bytes | memoryview
Each: TypeAlias = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
"""Maps a function over items: `map`, or a thread pool's."""

_WORTH: Final = 0.95  # of the plain size; above it compression is not worth its time
_SAMPLE: Final = 4096  # elements
_LENGTH_BYTES: Final = 4
_MEMORY_LEVEL: Final = 9  # new codes after 32768 numbers: fewer headers than with 8


def encode(payload: Payload, dtype: DType, each: Each = map) -> bytes:
    """Compress a payload, even if that does not make it shorter.

    Args:
        payload: elements of `dtype`, any number of them.
        dtype: dtype of the elements.
        each: maps a function over the chunks.
    """
    words = np.frombuffer(payload, "<u2")
    step = CODED_CHUNK * _words(dtype)
    chunks = [words[at : at + step] for at in range(0, words.size, step)]
    parts: list[bytes] = []
    for coded in each(lambda chunk: _encode_chunk(chunk, dtype), chunks):
        parts += coded
    return b"".join(parts)


def encode_if_shorter(payload: Payload, dtype: DType, each: Each = map) -> bytes | None:
    """Compress a payload; return None if it is short, or would hardly become shorter."""
    if len(payload) < CODED_LEAST_BYTES or _sampled_ratio(payload, dtype) > _WORTH:
        return None
    coded = encode(payload, dtype, each)
    return coded if len(coded) < len(payload) else None


def decode(coded: Payload, dtype: DType, nbytes: int, each: Each = map) -> memoryview:
    """Decompress a payload.

    Memory for the payload is allocated only after the compressed length was checked: it is more
    than half of the payload's size.

    Args:
        coded: compressed payload from a peer, which may be invalid.
        dtype: dtype of the elements.
        nbytes: size of the payload.
        each: maps a function over the chunks.

    Raises:
        ProtocolError: when it is not the compressed form of such a payload.
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
    """Return the number of 16-bit words in an element; the last has the exponent."""
    return dtype.itemsize // 2


def _encode_chunk(chunk: Array, dtype: DType) -> list[bytes]:
    """Compress at most `CODED_CHUNK` elements, given as 16-bit words."""
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
    """Split a compressed payload into chunks, each with its deflated and its plain part.

    Raises:
        ProtocolError: when its length does not fit a payload of `nbytes` bytes.
    """
    count, left = divmod(nbytes, dtype.itemsize)
    if left:
        raise ProtocolError(f"no {dtype.value} array has {nbytes} bytes")
    chunks = []
    at = 0
    while count > 0:
        begin = at + _LENGTH_BYTES
        middle = begin + int.from_bytes(coded[at:begin], "little")
        at = middle + min(count, CODED_CHUNK) * (dtype.itemsize - 1)
        if at > len(coded):
            raise ProtocolError(
                f"a coded array of {nbytes} bytes is cut off after {len(coded)} bytes"
            )
        chunks.append((coded[begin:middle], coded[middle:at]))
        count -= CODED_CHUNK
    if at < len(coded):
        raise ProtocolError(f"{len(coded) - at} bytes follow the end of a coded array")
    return chunks


def _decode_chunk(parts: tuple[memoryview, memoryview], words: Array, dtype: DType) -> None:
    """Decompress a chunk into its 16-bit words.

    Raises:
        ProtocolError: when the number of exponents is not the number of elements.
    """
    deflated, plain = parts
    upper = words[_words(dtype) - 1 :: _words(dtype)]
    unpacker = zlib.decompressobj()
    try:
        exponents = unpacker.decompress(deflated, upper.size + 1)
    except zlib.error as error:
        raise ProtocolError(f"a coded array cannot be inflated: {error}") from None
    if len(exponents) != upper.size or not unpacker.eof or unpacker.unused_data:
        raise ProtocolError(f"a coded array does not inflate to exactly {upper.size} exponents")
    fractions = np.frombuffer(plain, np.uint8, upper.size).astype(np.uint16)
    upper[:] = np.frombuffer(exponents, np.uint8)
    upper <<= 7
    upper |= fractions >> 1
    upper |= fractions << 15
    if dtype is DType.FP32:
        words[::2] = np.frombuffer(plain, "<u2", offset=upper.size)


def _sampled_ratio(payload: Payload, dtype: DType) -> float:
    """Return the estimated ratio of compressed to plain size, from the entropy of a sample."""
    upper = np.frombuffer(payload, "<u2")[_words(dtype) - 1 :: _words(dtype)]
    sample = (upper[:: max(1, upper.size // _SAMPLE)] >> 7).astype(np.uint8)
    shares = np.bincount(sample) / sample.size
    shares = shares[shares > 0]
    bits = float(-(shares * np.log2(shares)).sum())
    return (dtype.itemsize - 1 + bits / 8) / dtype.itemsize
