"""Backends against float64, for every dtype, orientation and odd shape."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave import arrays
from cleave.arrays import Buffer, DType
from cleave.errors import CleaveError, UsageError
from cleave.machine import backends as backends
from cleave.machine.backends import (
    Candidate,
    Compute,
    MatmulBackend,
    NumpyBackend,
    StoredArray,
    TorchBackend,
    execute,
    self_check,
)
from cleave.machine.load import OtherLoad


def _torch(*, by_copies: bool) -> MatmulBackend:
    pytest.importorskip("torch")
    return TorchBackend(by_copies=by_copies)


def _backend(name: str) -> MatmulBackend:
    return NumpyBackend() if name == "numpy" else _torch(by_copies=name == "torch by copies")


# By copies is how devices with memory of their own multiply, here with the CPU in their place.
names = pytest.mark.parametrize("name", ["numpy", "torch", "torch by copies"])
SHAPES = [
    (1, 1, 1),
    (1, 7, 3),
    (5, 1, 9),
    (3, 4, 1),
    (17, 33, 65),
    (2, 3, 300),
    (0, 3, 2),
    (3, 2, 0),
]
IN_OUT = [(d, d) for d in DType] + [(DType.BF16, DType.FP32), (DType.FP16, DType.FP32)]
# Largest relative error of one rounding; fp32 itself is allowed its accumulation.
ROUNDING = {DType.FP32: 2e-6, DType.BF16: 2**-8, DType.FP16: 2**-11}


def _random(rng: np.random.Generator, rows: int, columns: int, dtype: DType) -> Buffer:
    values = rng.standard_normal((rows, columns)).astype(np.float32)
    return Buffer(arrays.narrow(values, dtype), dtype)


def _exact(a: Buffer, b: Buffer) -> Any:
    return a.float32().astype(np.float64) @ b.float32().astype(np.float64)


def _close(out: Buffer, exact: Any, a: Buffer, b: Buffer) -> None:
    """Within the rounding of the result, and of fp32 sums of these magnitudes."""
    sums = np.abs(a.float32().astype(np.float64)) @ np.abs(b.float32().astype(np.float64))
    allowed = ROUNDING[out.dtype] * np.abs(exact) + 2e-6 * sums + 1e-7
    assert (np.abs(out.float32() - exact) <= allowed).all()


@names
@pytest.mark.parametrize(("dtype", "out_dtype"), IN_OUT)
@pytest.mark.parametrize(("transpose_a", "transpose_b"), [*product([False, True], repeat=2)])
def test_products_are_those_of_float64(
    name: str, dtype: DType, out_dtype: DType, transpose_a: bool, transpose_b: bool
) -> None:
    backend = _backend(name)
    rng = np.random.default_rng(3)
    for m, n, k in SHAPES:
        a = _random(rng, k, m, dtype).T if transpose_a else _random(rng, m, k, dtype)
        b = _random(rng, n, k, dtype).T if transpose_b else _random(rng, k, n, dtype)
        out = arrays.empty(m, n, out_dtype)
        backend.matmul(a, b, out)
        _close(out, _exact(a, b), a, b)


@names
@pytest.mark.parametrize("dtype", list(DType))
def test_accumulating_adds_to_what_is_there(name: str, dtype: DType) -> None:
    rng = np.random.default_rng(4)
    a, b = _random(rng, 5, 7, dtype), _random(rng, 7, 3, dtype)
    out = Buffer(np.full((5, 3), 10, np.float32), DType.FP32)
    _backend(name).matmul(a, b, out, accumulate=True)
    np.testing.assert_allclose(out.array, 10 + _exact(a, b), rtol=1e-5, atol=1e-5)


@names
@pytest.mark.parametrize(("dtype", "out_dtype"), IN_OUT)
def test_results_go_into_views(name: str, dtype: DType, out_dtype: DType) -> None:
    """A tile's place in C is a region of it, maybe of a transposed C; its surroundings stay."""
    rng = np.random.default_rng(5)
    a, b = _random(rng, 3, 6, dtype), _random(rng, 6, 4, dtype)
    for transposed in (False, True):
        memory = np.zeros((6, 8), out_dtype.storage)
        view = memory[1:5, 2:5].T if transposed else memory[1:4, 2:6]
        out = Buffer(view, out_dtype)
        _backend(name).matmul(a, b, out)
        _close(out, _exact(a, b), a, b)
        assert np.count_nonzero(memory) == np.count_nonzero(view)


def _stored(buffer: Buffer, *, as_bytes: bool) -> StoredArray:
    rows, columns = buffer.shape
    # Received payloads are read-only and lie at odd addresses behind their header.
    payload = memoryview(b"\0" + bytes(buffer.pack()))[1:] if as_bytes else buffer
    return StoredArray(rows, columns, buffer.dtype, payload, buffer.nbytes)


@names
@pytest.mark.filterwarnings("error")  # of torch, about payloads that are read-only
@given(data=st.data())
def test_orders_with_any_number_of_pairs(name: str, data: st.DataObject) -> None:
    backend = _backend(name)
    dtype, out_dtype = data.draw(st.sampled_from(IN_OUT))
    m, n = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    depths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    transpose_a, transpose_b, as_bytes = (data.draw(st.booleans()) for _ in range(3))
    rng = np.random.default_rng(sum(depths))
    pairs, exact = [], np.zeros((m, n))
    for k in depths:  # small integers: every sum is exact in every dtype
        a, b = rng.integers(-2, 3, (m, k)), rng.integers(-2, 3, (k, n))
        exact += a @ b
        left, right = (
            Buffer(arrays.narrow(x.astype(np.float32), dtype), dtype)
            for x in (a.T if transpose_a else a, b.T if transpose_b else b)
        )
        pairs.append((_stored(left, as_bytes=as_bytes), _stored(right, as_bytes=as_bytes)))
    order = Compute(1, pairs, transpose_a, transpose_b, m, n, out_dtype, 0)
    result = execute(backend, order)
    assert result.shape == (m, n)
    assert result.dtype is out_dtype
    assert np.array_equal(result.float32(), exact)


# --- the check that a backend must pass ---


@names
def test_right_backends_pass_the_check(name: str) -> None:
    assert self_check(_backend(name)) is None


class _Watch:
    """A clock that goes when a backend says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class _Faulty(NumpyBackend):
    """Right but for what a test breaks."""

    def __init__(
        self,
        invalidate: Callable[[Buffer], Buffer] = lambda out: out,
        *,
        widened: Callable[[Any], Any] = lambda x: x,
        name: str = "faulty",
        takes_s: float = 0.001,
        takes_16_bits_s: float = 0.001,
        watch: _Watch | None = None,
    ) -> None:
        self.name = name
        self._spoil = invalidate
        self._widened = widened
        self._takes_s = {DType.FP32: takes_s}
        self._takes_16_bits_s = takes_16_bits_s
        self._watch = watch or _Watch()

    def matmul(self, a: Buffer, b: Buffer, out: Buffer, *, accumulate: bool = False) -> None:
        self._watch.now_s += self._takes_s.get(a.dtype, self._takes_16_bits_s)
        a, b = (
            Buffer(self._widened(x.array), x.dtype) if x.dtype is DType.FP32 else x for x in (a, b)
        )
        super().matmul(a, b, out, accumulate=accumulate)
        out.array[...] = self._spoil(out).array


def _spoiled(dtype: DType, factor: float) -> Callable[[Buffer], Buffer]:
    """Multiplies results of one dtype."""

    def invalidate(out: Buffer) -> Buffer:
        if out.dtype is not dtype:
            return out
        return Buffer(arrays.narrow(out.float32() * np.float32(factor), dtype), dtype)

    return invalidate


class _Forgets(NumpyBackend):
    """Does not add to what is there."""

    def matmul(self, a: Buffer, b: Buffer, out: Buffer, *, accumulate: bool = False) -> None:
        super().matmul(a, b, out)


def _tf32(values: Any) -> Any:
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x1000) & np.uint32(0xFFFFE000)).view(np.float32)


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        *((_Faulty(_spoiled(dtype, 1.05)), dtype.value) for dtype in DType),
        (_Faulty(widened=_tf32), "fp32 products as fp32 are wrong"),
        (_Faulty(_spoiled(DType.BF16, float("nan"))), "nan"),
        (_Forgets(), "added to fp32"),
    ],
)
def test_a_wrong_backend_is_found(backend: MatmulBackend, said: str) -> None:
    assert said in str(self_check(backend))


# --- choosing ---


def test_choosing_among_what_is_here() -> None:
    assert backends.choose("numpy").backend.name == "numpy"
    here = [each.make().name for each in backends.candidates()]
    assert backends.choose("auto").backend.name in here
    with pytest.raises(UsageError, match=r"unknown backend 'abacus'; use one of .*mps"):
        backends.choose("abacus")


def _candidate(name: str, backend: MatmulBackend) -> Candidate:
    return Candidate(name, lambda: backend)


def _broken() -> MatmulBackend:
    raise RuntimeError("the driver is too old")


def _all(watch: _Watch) -> list[Candidate]:
    return [
        _candidate("numpy", _Faulty(name="slow", takes_s=0.003, watch=watch)),
        _candidate("torch:mps", _Faulty(_spoiled(DType.BF16, 1.05), watch=watch)),
        _candidate("torch:cpu", _Faulty(name="fast", watch=watch)),
        Candidate("torch:cuda", _broken),
    ]


@pytest.mark.slow
def test_the_fastest_that_is_right_is_chosen_and_others_are_named() -> None:
    said: list[str] = []
    available = _all(watch := _Watch())
    speed = backends.choose("auto", available=available, notify=said.append, clock=watch)
    assert speed.backend.name == "fast"
    assert len(said) == 2
    assert "torch:mps is not used: its bf16 products" in said[0]
    assert "torch:cuda is not used: RuntimeError: the driver is too old" in said[1]


def test_the_speed_of_a_first_burst_is_not_taken_for_what_lasts() -> None:
    class Tires(_Faulty):
        done = 0

        def matmul(self, a: Buffer, b: Buffer, out: Buffer, *, accumulate: bool = False) -> None:
            self.done += 1
            self._takes_s[DType.FP32] = 0.001 if self.done < 20 else 0.01
            super().matmul(a, b, out, accumulate=accumulate)

    watch = _Watch()
    found = backends.measure(Tires(watch=watch), 8, clock=watch).flops_per_s
    assert 2 * 8**3 / 0.01 <= found < 2 * 2 * 8**3 / 0.01


def test_the_best_of_several_measurements_counts_on_a_busy_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch, durations = _Watch(), iter([0.01, 0.2, 0.2, 0.2, *[0.01] * 30, *[0.2] * 10])

    def run() -> None:
        watch.now_s += next(durations)

    monkeypatch.setattr(OtherLoad, "disturbs", lambda _: True)
    assert backends.sustained_s(run, clock=watch) == pytest.approx(0.01)
    monkeypatch.setattr(OtherLoad, "disturbs", lambda _: False)
    assert backends.sustained_s(run, clock=watch) == pytest.approx(0.2)


@pytest.mark.slow
def test_slow_bf16_counts() -> None:
    watch = _Watch()
    slow = _Faulty(name="slow", takes_s=0.003, watch=watch)
    slower = _Faulty(name="slow with 16 bits", takes_16_bits_s=0.3, watch=watch)
    available = [_candidate("numpy", slower), _candidate("torch:cpu", slow)]
    assert backends.choose("auto", available=available, clock=watch).backend is slow


@pytest.mark.parametrize(
    ("name", "chosen"), [("torch", "fast"), ("torch:cpu", "fast"), ("numpy", "slow")]
)
def test_only_what_was_asked_for_is_tried(name: str, chosen: str) -> None:
    available = _all(watch := _Watch())
    assert backends.choose(name, available=available, clock=watch).backend.name == chosen


@pytest.mark.parametrize(("name", "why"), [("mps", "bf16"), ("torch:cuda", "too old")])
def test_a_backend_that_does_not_work_is_an_error_when_asked_for(name: str, why: str) -> None:
    with pytest.raises(CleaveError, match=f"{why}.*--backend"):
        backends.choose(name, available=_all(_Watch()))


def test_a_backend_that_is_not_here() -> None:
    with pytest.raises(UsageError, match=r"torch:xpu needs xpu, which torch.*here are numpy"):
        backends.choose("xpu", available=_all(_Watch()))
    with pytest.raises(UsageError, match=r"needs torch, which is not installed.*numpy"):
        backends.choose("torch", available=_all(_Watch())[:1])
