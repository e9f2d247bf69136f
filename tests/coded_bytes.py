"""Hostile coded arrays, for the fuzz test and `benchmarks/fuzz.py`."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final

from cleave.arrays import DType
from cleave.coding import decode, encode
from cleave.errors import ProtocolError
from cleave.protocol.limits import CODED_CHUNK

_SIZES: Final = (0, 1, 2, 3, 7, 64, 300)
_LENGTHS: Final = (0, 1, 255, 2**16, 2**31, 2**32 - 1)
_MOST_BYTES: Final = 2**14
_CHUNK_BYTES: Final = {dtype: CODED_CHUNK * dtype.itemsize for dtype in DType}


@dataclass(frozen=True)
class CodedInput:
    """Bytes, and the array that they are said to hold."""

    coded: bytes
    dtype: DType
    nbytes: int


def decoded_array(one: CodedInput) -> str:
    """Decode an input; return what came of it, in words without figures.

    Raises:
        AssertionError: when the array is not what its coded form says.
    """
    try:
        found = bytes(decode(one.coded, one.dtype, one.nbytes))
    except ProtocolError as error:
        return "refused: " + re.sub(r"\d+", "N", str(error))
    assert len(found) == one.nbytes < 2 * len(one.coded) + 1
    assert decode(encode(found, one.dtype), one.dtype, one.nbytes) == found
    return f"{one.dtype.value} of {'no' if not found else 'some'} bytes"


class CodedMutator:
    """Makes inputs for the decoder.

    Args:
        random: where chance comes from.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._corpus: list[CodedInput] = []
        self._seen: set[str] = set()

    def keep(self, one: CodedInput, outcome: str) -> None:
        """Remember an input with an outcome that was not seen before."""
        if outcome not in self._seen:
            self._seen.add(outcome)
            if len(one.coded) < _MOST_BYTES:
                self._corpus.append(one)

    def next(self) -> CodedInput:
        """One input: right, or changed in its bytes, its lengths or what is said of it."""
        random = self._random
        one = random.choice(self._corpus) if self._corpus and random.random() < 0.3 else self._new()
        for _ in range(random.choice((0, 1, 1, 1, 2, 4))):
            one = self._changed(one)
        return one

    def _new(self) -> CodedInput:
        random = self._random
        dtype = random.choice([*DType])
        nbytes = random.choice(_SIZES) * dtype.itemsize
        data = random.randbytes(nbytes) if random.random() < 0.5 else bytes(nbytes)
        if random.random() < 0.7:
            return CodedInput(encode(data, dtype), dtype, nbytes)
        count = nbytes // dtype.itemsize
        return CodedInput(self._chunk(count) + bytes(count * (dtype.itemsize - 1)), dtype, nbytes)

    def _chunk(self, count: int) -> bytes:
        """A stream with a length before it: other formats, sizes, strategies and dictionaries."""
        random = self._random
        form = random.choice((15, 15, 15, 9, -15, 31))  # zlib's, without its head, gzip's
        dictionary: dict[str, Any] = (
            {"zdict": b"abc"} if form in (9, 15) and random.random() < 0.1 else {}
        )
        packer = zlib.compressobj(
            level=random.choice((0, 1, 9)),
            wbits=form,
            strategy=random.choice((zlib.Z_DEFAULT_STRATEGY, zlib.Z_HUFFMAN_ONLY, zlib.Z_FIXED)),
            **dictionary,
        )
        size = random.choice((count, count, count, count + 1, max(0, count - 1), 2**16))
        stream = packer.compress(bytes(size)) + packer.flush()
        if random.random() < 0.1:
            stream += stream
        return len(stream).to_bytes(4, "little") + stream

    def _changed(self, one: CodedInput) -> CodedInput:
        random, mixed = self._random, bytearray(one.coded)
        at = random.randrange(len(mixed) + 1)
        match random.randrange(9):
            case 0 if mixed:
                mixed[at % len(mixed)] ^= 1 << random.randrange(8)
            case 1 if mixed:
                mixed[at % len(mixed)] = random.randrange(256)
            case 2:
                mixed[at:at] = random.randbytes(random.randrange(1, 6))
            case 3:
                del mixed[at : at + random.randrange(1, 6)]
            case 4:
                mixed[0:4] = random.choice(_LENGTHS).to_bytes(4, "little")
            case 5:
                mixed += self._chunk(random.choice(_SIZES))
            case 6:
                return replace(one, dtype=random.choice([*DType]))
            case 7:
                more = random.choice((-4, -2, -1, 1, 2, 4, 2**40, _CHUNK_BYTES[one.dtype]))
                return replace(one, nbytes=max(0, one.nbytes + more))
            case _:
                del mixed[at:]
        return replace(one, coded=bytes(mixed))
