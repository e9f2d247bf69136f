"""Coding is exact to the bit for any numbers, and refuses whatever is not its own."""

from __future__ import annotations

import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.arrays import Array, DType, narrow
from cleave.coding import decode, encode, encode_if_shorter
from cleave.errors import ProtocolError
from cleave.protocol.limits import CODED_CHUNK, CODED_LEAST_BYTES

dtypes = st.sampled_from(DType)
CODED_BITS = {DType.BF16: 0.70, DType.FP16: 0.90, DType.FP32: 0.86}


def of_length(data: bytes, dtype: DType) -> bytes:
    """The longest part that is whole elements."""
    return data[: len(data) // dtype.itemsize * dtype.itemsize]


def normal(count: int, dtype: DType, seed: int = 0) -> bytes:
    """Numbers like those of a model."""
    values = np.random.default_rng(seed).standard_normal(count, np.float32) * 0.02
    return narrow(values, dtype).tobytes()


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16])
def test_every_pattern_of_16_bits_comes_back(dtype: DType) -> None:
    data = np.arange(2**16, dtype="<u2").tobytes()
    assert decode(encode(data, dtype), dtype, len(data)) == data


@given(st.binary(max_size=4000), dtypes, st.integers(0, 7))
def test_bytes_may_lie_anywhere(data: bytes, dtype: DType, offset: int) -> None:
    data = of_length(data, dtype)
    shifted = memoryview(bytes(offset) + data)[offset:]
    coded = encode(shifted, dtype)
    assert coded == encode(data, dtype)
    assert decode(memoryview(bytes(offset) + coded)[offset:], dtype, len(data)) == data


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_chunks_can_be_coded_in_threads(dtype: DType, more: int) -> None:
    data = normal(2 * CODED_CHUNK + more, dtype)
    with ThreadPoolExecutor(2) as pool:
        coded = encode(data, dtype, pool.map)
        assert decode(coded, dtype, len(data), pool.map) == data
    assert coded == encode(data, dtype)


@pytest.mark.parametrize("dtype", DType)
def test_a_model_takes_fewer_bytes(dtype: DType) -> None:
    data = normal(2**17, dtype)
    coded = encode_if_shorter(data, dtype)
    assert coded is not None
    assert len(coded) < CODED_BITS[dtype] * len(data)
    assert decode(coded, dtype, len(data)) == data


@pytest.mark.parametrize("dtype", DType)
def test_what_would_not_be_shorter_is_not_coded(dtype: DType) -> None:
    assert encode_if_shorter(Random(1).randbytes(4 * CODED_LEAST_BYTES), dtype) is None
    assert encode_if_shorter(bytes(CODED_LEAST_BYTES - dtype.itemsize), dtype) is None
    assert encode_if_shorter(b"", dtype) is None


# --- what a peer may send instead ---


@given(st.integers(1, 300), dtypes, st.data())
def test_a_changed_byte_is_refused_or_an_element_of_its_own(
    count: int, dtype: DType, draw: st.DataObject
) -> None:
    """Exponents have a checksum, which few changes pass; what travels plain means what it says."""
    data = normal(count, dtype)
    coded = bytearray(encode(data, dtype))
    at = draw.draw(st.integers(0, len(coded) - 1))
    coded[at] ^= draw.draw(st.integers(1, 255))
    plain = len(coded) - count * (dtype.itemsize - 1)
    bits = f"<u{dtype.itemsize}"
    try:
        found = np.frombuffer(decode(bytes(coded), dtype, len(data)), bits)
    except ProtocolError:
        return
    before = np.frombuffer(data, bits)
    changed = np.flatnonzero(found != before)
    if at >= plain:
        assert len(changed) == 1
    else:  # Adler-32 is no proof: some changes of several exponents keep it
        sums = [zlib.adler32(_exponents(bits_of, dtype)) for bits_of in (found, before)]
        assert sums[0] == sums[1]


def _exponents(elements: Array, dtype: DType) -> bytes:
    """What is deflated of them."""
    shift = 7 + 16 * (dtype.itemsize // 2 - 1)
    return ((elements >> shift) & 0xFF).astype(np.uint8).tobytes()


@given(st.integers(1, 300), dtypes, st.data())
def test_other_lengths_are_refused(count: int, dtype: DType, draw: st.DataObject) -> None:
    data = normal(count, dtype)
    coded = encode(data, dtype)
    cut = draw.draw(st.integers(0, len(coded) - 1))
    for wrong in (coded[:cut], coded + bytes(1), coded + coded):
        with pytest.raises(ProtocolError):
            decode(wrong, dtype, len(data))
    said = draw.draw(st.one_of(st.integers(0, 2 * len(data)), st.integers(0, 2**127)))
    if said != len(data):
        with pytest.raises(ProtocolError):
            decode(coded, dtype, said)


def coded_by(deflated: bytes, count: int, plain: int) -> bytes:
    """A coded form with these exponents."""
    return len(deflated).to_bytes(4, "little") + deflated + bytes(count * plain)


@pytest.mark.parametrize("dtype", DType)
def test_exponents_are_as_many_as_elements(dtype: DType) -> None:
    plain = dtype.itemsize - 1
    for exponents in (b"", b"abc", b"abcde", bytes(10**6)):
        with pytest.raises(ProtocolError, match="exactly 4 exponents"):
            decode(coded_by(zlib.compress(exponents), 4, plain), dtype, 4 * dtype.itemsize)
    for deflated in (zlib.compress(b"abcd") + b"x", zlib.compress(b"abcd")[:-1]):
        with pytest.raises(ProtocolError, match="exactly 4 exponents"):
            decode(coded_by(deflated, 4, plain), dtype, 4 * dtype.itemsize)


@st.composite
def _streams(draw: st.DrawFn) -> bytes:
    """Streams of some bytes in zlib's format and others, one or several, cut or whole."""
    packer = zlib.compressobj(
        draw(st.integers(0, 9)), wbits=draw(st.sampled_from([15, 9, -15, 31]))
    )
    stream = packer.compress(bytes(draw(st.integers(0, 8)))) + packer.flush()
    stream *= draw(st.integers(1, 2))
    return stream[: draw(st.integers(0, len(stream)))]


@given(
    st.binary(max_size=40) | st.builds(coded_by, _streams(), st.integers(0, 8), st.integers(0, 3)),
    dtypes,
    st.integers(0, 40) | st.sampled_from([2**40, CODED_CHUNK * 4]),
)
def test_any_bytes_are_an_array_or_an_error(coded: bytes, dtype: DType, nbytes: int) -> None:
    try:
        found = bytes(decode(coded, dtype, nbytes))
    except ProtocolError:
        return
    assert len(found) == nbytes <= 2 * len(coded)
    assert decode(encode(found, dtype), dtype, nbytes) == found


def test_a_dictionary_and_other_formats_are_refused() -> None:
    with_dictionary = zlib.compressobj(zdict=b"abcd")
    raw = zlib.compressobj(wbits=-15)
    gzip = zlib.compressobj(wbits=31)
    for packer in (with_dictionary, raw, gzip):
        deflated = packer.compress(b"abcd") + packer.flush()
        with pytest.raises(ProtocolError, match="cannot be inflated"):
            decode(coded_by(deflated, 4, 1), DType.BF16, 8)


@cache
def _bomb() -> bytes:
    """128 MiB of zeros in an eighth of a megabyte."""
    packer = zlib.compressobj(9)
    return b"".join(packer.compress(bytes(2**20)) for _ in range(128)) + packer.flush()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DType)
def test_a_bomb_takes_no_memory(dtype: DType) -> None:
    """128 MiB in little, for as many elements as are said, and for four."""
    bomb = _bomb()
    for count, said in ((4, 4), (4, 2**27), (CODED_CHUNK, CODED_CHUNK)):
        coded = coded_by(bomb, count, dtype.itemsize - 1)
        tracemalloc.start()
        try:
            with pytest.raises(ProtocolError):
                decode(coded, dtype, said * dtype.itemsize)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 100_000 + len(coded) + 4 * count * dtype.itemsize
