from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cleave import arrays
from cleave.arrays import Buffer, DType
from cleave.gemm import Span

dtypes = st.sampled_from(DType)
TINY = [0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, 1.1754944e-38, 5.9604645e-08, 2.9802322e-08]
LARGE = [65504.0, 65519.9, 65520.0, 3.4028235e38, -3.4028235e38, np.inf, -np.inf, np.nan, -np.nan]
TIES = [1.00390625, 1.01171875, 1.0039063]  # of bf16, and just above one
SPECIAL = np.array([*TINY, *LARGE, *TIES], np.float32)


def _bits_to_float(bits: Any) -> Any:
    return np.asarray(bits, np.uint32).view(np.float32)


def _torch_bf16(values: Any) -> Any:
    torch = pytest.importorskip("torch")
    return torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()


def _assert_same_bf16(ours: Any, values: Any) -> None:
    """Equal to torch's rounding, bit by bit; NaNs (whose payload is free) are NaNs."""
    nan = np.isnan(values)
    assert np.array_equal(ours[~nan], _torch_bf16(values)[~nan])
    assert np.isnan((ours[nan].astype(np.uint32) << 16).view(np.float32)).all()


def test_every_bf16_pattern_widens_as_in_torch_and_comes_back() -> None:
    torch = pytest.importorskip("torch")
    patterns = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
    wide = Buffer(patterns, DType.BF16).float32()
    theirs = torch.from_numpy(patterns).view(torch.bfloat16).float().numpy()
    assert np.array_equal(wide, theirs, equal_nan=True)
    assert np.array_equal(np.signbit(wide), np.signbit(theirs))
    narrowed = arrays.narrow(wide, DType.BF16)
    nan = np.isnan(wide)
    assert np.array_equal(narrowed[~nan], patterns[~nan])
    assert np.isnan((narrowed[nan].astype(np.uint32) << 16).view(np.float32)).all()


def test_every_fp16_pattern_widens_exactly_and_comes_back() -> None:
    patterns = np.arange(2**16, dtype=np.uint16).reshape(256, 256).view(np.float16)
    wide = Buffer(patterns, DType.FP16).float32()
    assert np.array_equal(wide, patterns.astype(np.float64), equal_nan=True)
    assert np.array_equal(arrays.narrow(wide, DType.FP16), patterns, equal_nan=True)


def test_special_and_random_patterns_and_every_kind_of_nan_narrow_as_in_torch() -> None:
    rng = np.random.default_rng(1)
    mantissas = np.concatenate([[1, 0x7FFF, 0x8000, 0x7FFFFF], rng.integers(1, 2**23, 1000)])
    nans = _bits_to_float(np.concatenate([0x7F800000 | mantissas, 0xFF800000 | mantissas]))
    assert np.isnan(nans).all()
    assert np.isnan(arrays.narrow(nans, DType.FP16)).all()
    drawn = _bits_to_float(rng.integers(0, 2**32, 200_000, dtype=np.uint32))
    values = np.concatenate([SPECIAL, nans, drawn])
    _assert_same_bf16(arrays.narrow(values, DType.BF16), values)


@st.composite
def buffers(draw: st.DrawFn) -> Buffer:
    """Views of every kind: transposed, stepped, reversed, cut out, empty."""
    dtype = draw(dtypes)
    rows, columns = draw(st.integers(0, 12)), draw(st.integers(0, 12))
    array = np.arange(rows * columns).astype(dtype.storage).reshape(rows, columns)
    row_step, column_step = (draw(st.sampled_from([1, 2, 3, -1])) for _ in range(2))
    view = array[draw(st.integers(0, 3)) :: row_step, draw(st.integers(0, 3)) :: column_step]
    return Buffer(view.T if draw(st.booleans()) else view, dtype)


@given(buffers())
def test_packing_any_view_keeps_its_elements(buffer: Buffer) -> None:
    data = buffer.pack()
    assert len(data) == buffer.nbytes == data.nbytes
    again = arrays.unpack(data, *buffer.shape, buffer.dtype)
    assert again.shape == buffer.shape
    assert np.array_equal(again.array, buffer.array)


@given(buffers(), st.integers(1, 5))
def test_unpacking_reads_bytes_at_odd_addresses(buffer: Buffer, offset: int) -> None:
    message = b"\0" * offset + bytes(buffer.pack())
    again = arrays.unpack(memoryview(message)[offset:], *buffer.shape, buffer.dtype)
    assert np.array_equal(again.array, buffer.array)
    assert np.array_equal(again.float32(), buffer.float32())


@given(st.integers(0, 9), st.integers(0, 9), dtypes, st.integers(-8, 8))
def test_unpacking_wants_the_exact_length(rows: int, columns: int, dtype: DType, off: int) -> None:
    right = rows * columns * dtype.itemsize
    data = bytes(max(0, right + off))
    if len(data) == right:
        assert arrays.unpack(data, rows, columns, dtype).shape == (rows, columns)
    else:
        with pytest.raises(ValueError, match="matrix is"):
            arrays.unpack(data, rows, columns, dtype)


def test_packing_what_is_contiguous_copies_nothing() -> None:
    buffer = arrays.empty(4, 6, DType.FP32)
    buffer.array[...] = 0
    data = buffer.pack()
    rows = buffer.region(Span(1, 3), Span(0, 6)).pack()
    buffer.array[...] = 1
    assert np.array_equal(np.frombuffer(data, np.float32), np.ones(24))
    assert np.array_equal(np.frombuffer(rows, np.float32), np.ones(12))


def test_unpacking_and_regions_are_views() -> None:
    data = bytearray(24)
    buffer = arrays.unpack(memoryview(data), 2, 3, DType.FP32)
    buffer.region(Span(1, 2), Span(1, 3)).array[...] = 7
    assert np.frombuffer(data, np.float32).tolist() == [0, 0, 0, 0, 7, 7]
    assert buffer.T.T.array.base is not None
    assert np.shares_memory(buffer.T.array, buffer.array)


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.zeros((2, 2), np.float64), DType.FP32),
        (np.zeros((2, 2), np.float16), DType.BF16),
        (np.zeros(4, np.float32), DType.FP32),
        (np.zeros((1, 2, 2), np.float32), DType.FP32),
    ],
)
def test_a_buffer_says_what_it_needs(array: Any, dtype: DType) -> None:
    with pytest.raises(ValueError, match="needs a 2-D"):
        Buffer(array, dtype)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("transposed", [False, True])
def test_from_torch_shares_memory(name: str, transposed: bool) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6, dtype=getattr(torch, name)).reshape(2, 3).requires_grad_()
    view = tensor.T if transposed else tensor
    buffer = arrays.from_torch(view)
    assert buffer.shape == tuple(view.shape)
    assert np.array_equal(buffer.float32(), view.detach().float().numpy())
    assert buffer.array.ctypes.data == tensor.data_ptr()
    with torch.no_grad():
        tensor[1, 2] = 9
    assert buffer.float32().max() == 9
    back = arrays.to_torch(buffer)
    assert back.dtype == tensor.dtype
    back[0, 0] = 5
    assert tensor[0, 0].item() == 5


@pytest.mark.parametrize("name", ["float64", "int32", "uint16"])
def test_dtypes_that_do_not_travel_are_refused(name: str) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="cannot be offloaded"):
        arrays.from_torch(torch.zeros(2, 2, dtype=getattr(torch, name)))


@given(hnp.arrays(np.float32, st.integers(0, 40), elements=st.floats(width=32)), dtypes)
def test_the_largest_magnitude_is_that_of_all_elements(values: Any, dtype: DType) -> None:
    """Also where all have one sign, and where some are NaN or infinite."""
    held = arrays.narrow(values.reshape(1, -1), dtype)
    wide = np.abs(Buffer(held, dtype).float32())
    wanted = float(wide.max(initial=0.0))
    for data in (held, held.tobytes(), memoryview(b"x" + held.tobytes())[1:]):
        found = arrays.largest(data, dtype)
        assert found == wanted or (np.isnan(found) and np.isnan(wanted))
