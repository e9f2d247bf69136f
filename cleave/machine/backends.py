"""Matrix multiplication backends, and the choice of the fastest installed backend."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import numpy as np

from cleave import arrays
from cleave.arrays import Buffer, DType
from cleave.errors import CleaveError, UsageError, to_install
from cleave.machine.load import OtherLoad


@dataclass(slots=True)
class StoredArray:
    """A floating-point array stored on a device. Emulated backends set `used` on the first use.

    `uploaded` is the array in the memory of the processor that runs graphs, in the form in which it
    was first used.
    """

    rows: int
    columns: int
    dtype: DType
    payload: Any
    nbytes: int
    used: bool = False
    uploaded: Any = None


@dataclass(slots=True)
class Compute:
    """A request to multiply pairs of stored arrays and sum the products."""

    run: int
    pairs: list[tuple[StoredArray, StoredArray]]
    transpose_a: bool
    transpose_b: bool
    rows: int
    columns: int
    out: DType
    flops: int

    @property
    def result_bytes(self) -> int:
        return self.rows * self.columns * self.out.itemsize


class MatmulBackend(Protocol):
    """Interface for a library that multiplies matrices on one kind of processor."""

    @property
    def name(self) -> str: ...

    def matmul(self, a: Buffer, b: Buffer, out: Buffer, *, accumulate: bool = False) -> None:
        """Compute out = a @ b, or out += a @ b if `accumulate` is set.

        Args:
            a, b: operands of the same dtype, shapes (m, k) and (k, n), any strides.
            out: receives the result, shape (m, n). Its dtype is the operands' dtype or fp32, and
                must be fp32 if `accumulate` is set.
        """


class NumpyBackend:
    """Multiplies matrices with numpy. Upcasts 16-bit operands and rounds each result once."""

    name = "numpy"

    def matmul(self, a: Buffer, b: Buffer, out: Buffer, *, accumulate: bool = False) -> None:
        left, right = a.float32(), b.float32()
        if accumulate:
            out.array[...] += left @ right
        elif out.dtype is DType.FP32:
            np.matmul(left, right, out=out.array)
        else:
            out.array[...] = arrays.narrow(left @ right, out.dtype)


class TorchBackend:
    """Multiplies matrices with torch.

    On the CPU, torch writes directly to `out`. For other devices, operands and results are copied
    from and to host memory.

    Args:
        by_copies: whether to copy even on the CPU, for tests without an accelerator.

    Raises:
        ImportError: if torch is not installed.
    """

    def __init__(self, device: str = "cpu", *, by_copies: bool = False) -> None:
        import torch

        self.name = "torch" if device == "cpu" else f"torch:{device}"
        self._torch = torch
        self._device = torch.device(device)
        self._by_copies = by_copies or device != "cpu"
        # Received arrays are read-only, and torch warns about the first read-only array. The
        # backend never writes to operands, so trigger the warning here and suppress it.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.from_numpy(np.frombuffer(b"\0", np.uint8))
        if device == "cuda":  # full fp32: no TF32, and sums in fp32
            torch.backends.cuda.matmul.allow_tf32 = False
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        elif device == "xpu":
            torch.set_float32_matmul_precision("highest")

    def matmul(self, a: Buffer, b: Buffer, out: Buffer, *, accumulate: bool = False) -> None:
        torch = self._torch
        left, right, target = (arrays.to_torch(x) for x in (a, b, out))
        with torch.inference_mode():
            if self._by_copies:
                left, right = left.to(self._device), right.to(self._device)
            if out.dtype is not a.dtype:  # torch cannot multiply 16-bit operands to fp32 on a CPU
                left, right = left.float(), right.float()
            if self._by_copies:
                product = torch.mm(left, right).cpu()
                if accumulate:
                    target.add_(product)
                else:
                    target.copy_(product)
            elif accumulate:
                torch.addmm(target, left, right, out=target)
            else:
                torch.mm(left, right, out=target)


def torch_devices() -> list[str]:
    """Return the names of the devices that torch can use, or [] if torch cannot be imported."""
    try:
        import torch
    except (ImportError, OSError):  # not installed, or one of its libraries is missing
        return []
    there = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "xpu": torch.xpu.is_available(),
    }
    return ["cpu", *(device for device, is_there in there.items() if is_there)]


def as_buffer(array: StoredArray) -> Buffer:
    """Return a stored array as a buffer that shares the array's memory."""
    if isinstance(array.payload, Buffer):
        return array.payload
    return arrays.unpack(array.payload, array.rows, array.columns, array.dtype)


def execute(backend: MatmulBackend, order: Compute) -> Buffer:
    """Return the sum of the pairs' products, accumulated in fp32 and rounded to `order.out`."""
    pairs = []
    for stored_a, stored_b in order.pairs:
        a, b = as_buffer(stored_a), as_buffer(stored_b)
        pairs.append((a.T if order.transpose_a else a, b.T if order.transpose_b else b))
    if len(pairs) == 1:
        out = arrays.empty(order.rows, order.columns, order.out)
        backend.matmul(*pairs[0], out)
        return out
    total = arrays.empty(order.rows, order.columns, DType.FP32)
    for i, (a, b) in enumerate(pairs):
        backend.matmul(a, b, total, accumulate=i > 0)
    return Buffer(arrays.narrow(total.array, order.out), order.out)


@dataclass(frozen=True, slots=True)
class Speed:
    """A matrix multiplication backend and its measured throughput in FLOP/s."""

    backend: MatmulBackend
    flops_per_s: float


SUSTAINED_S: Final = 0.3  # duration of a measurement of the speed that plans use, in seconds
_COMPARED_S: Final = 0.05  # duration of a measurement that only compares backends, in seconds
_FEWEST: Final = 3  # minimum number of timed repetitions, however long they take
_MOST_TRIES: Final = 2  # number of measurements while other programs use the processors


def sustained_s(
    run: Callable[[], object],
    least_s: float = SUSTAINED_S,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the mean duration of `run` in seconds, over at least `least_s` seconds.

    The mean covers all repetitions. A single repetition may run at a burst speed that the CPU
    quota, the turbo clock or the temperature does not allow for long. While other programs use the
    processors, the shorter of two means counts.
    """
    run()  # warm-up: starts threads and loads kernels
    best_s = float("inf")
    for _ in range(_MOST_TRIES):
        others = OtherLoad()
        best_s = min(best_s, _mean_s(run, least_s, clock))
        if not others.disturbs():
            break
    return best_s


def _mean_s(run: Callable[[], object], least_s: float, clock: Callable[[], float]) -> float:
    start_s, took_s, count = clock(), 0.0, 0
    while count < _FEWEST or took_s < least_s:
        run()
        took_s, count = clock() - start_s, count + 1
    return took_s / count


def measure(
    backend: MatmulBackend,
    side: int = 512,
    dtype: DType = DType.FP32,
    clock: Callable[[], float] = time.perf_counter,
    *,
    least_s: float = SUSTAINED_S,
) -> Speed:
    """Measure the throughput that a backend sustains, in FLOP/s (see `sustained_s`).

    Args:
        side: number of rows and columns of the square operands.
        least_s: minimum total duration of the timed multiplications, in seconds.
    """
    rng = np.random.default_rng(0)
    a, b = (
        Buffer(arrays.narrow(rng.standard_normal((side, side), np.float32), dtype), dtype)
        for _ in range(2)
    )
    out = arrays.empty(side, side, dtype)
    took_s = sustained_s(lambda: backend.matmul(a, b, out), least_s, clock)
    return Speed(backend, 2 * side**3 / max(took_s, 1e-9))


# Maximum relative error of a result: from rounding for 16-bit dtypes, from summation for fp32.
_ROUNDING: Final = {DType.FP32: 2e-6, DType.BF16: 2**-8, DType.FP16: 2**-11}

_CHECKED_SHAPES: Final = ((17, 33, 65), (3, 1, 7), (5, 3, 4096))
"""Rows, columns and depth of the tested multiplications: odd sizes, a single column, and sums that
are so long that 16-bit accumulation gives wrong results."""


def self_check(backend: MatmulBackend) -> str | None:
    """Describe the first wrong matrix product of a backend; return None if all are right.

    The products are compared with fp64 results, for all dtypes and accumulation modes, and with at
    most one operand transposed. This detects backends that silently compute with reduced precision,
    such as TF32 or 16-bit sums.
    """
    rng = np.random.default_rng(1)
    results = [(dtype, dtype, False) for dtype in DType]
    results += [(dtype, DType.FP32, accumulate) for dtype in DType for accumulate in (False, True)]
    for dtype, out_dtype, accumulate in results:
        for m, n, k in _CHECKED_SHAPES:
            for transpose_a, transpose_b in ((False, False), (True, False), (False, True)):
                a, b = (
                    Buffer(arrays.narrow(rng.standard_normal(shape, np.float32) + 1, dtype), dtype)
                    for shape in (
                        (k, m) if transpose_a else (m, k),
                        (n, k) if transpose_b else (k, n),
                    )
                )
                a, b = a.T if transpose_a else a, b.T if transpose_b else b
                out = Buffer(np.full((m, n), accumulate, out_dtype.storage), out_dtype)
                backend.matmul(a, b, out, accumulate=accumulate)
                left, right = a.float32().astype(np.float64), b.float32().astype(np.float64)
                exact = left @ right + accumulate
                sums = np.abs(left) @ np.abs(right) + accumulate
                allowed = _ROUNDING[out_dtype] * np.abs(exact) + 2e-6 * sums
                wrong = np.abs(out.float32() - exact) / allowed
                if not (wrong <= 1).all():  # NaN also counts as wrong
                    verb = "added to" if accumulate else "as"
                    return (
                        f"its {dtype.value} products {verb} {out_dtype.value} are wrong: "
                        f"{wrong.max():.0f} times the rounding error of these dtypes"
                    )
    return None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend that is available on this machine. `name` is its full name (`torch:cuda`)."""

    name: str
    make: Callable[[], MatmulBackend]


SHORT_NAMES: Final = {"cuda": "torch:cuda", "mps": "torch:mps", "xpu": "torch:xpu"}
NAMES: Final = ("auto", "cpu", "numpy", "torch", "torch:cpu", *SHORT_NAMES.values())
_ON_CPU: Final = ("numpy", "torch:cpu")


def candidates(*, torch: bool = True) -> list[Candidate]:
    """Return the backends available on this machine, or only numpy if `torch` is false."""
    devices = torch_devices() if torch else []
    return [
        Candidate("numpy", NumpyBackend),
        *(Candidate(f"torch:{device}", partial(TorchBackend, device)) for device in devices),
    ]


def known_name(name: str) -> str:
    """Return a backend's full name (`torch:cuda` for `cuda`); raise UsageError if unknown."""
    name = SHORT_NAMES.get(name, name)
    if name not in NAMES:
        raise UsageError(
            f"unknown backend {name!r}; use one of {', '.join((*NAMES, *SHORT_NAMES))}"
        )
    return name


def choose(
    name: str = "auto",
    *,
    available: Sequence[Candidate] | None = None,
    notify: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Speed:
    """Return the fastest backend that passes `self_check`, with its measured fp32 throughput.

    The measurement includes copies between host and device memory. The fastest backend takes the
    least total time for one fp32 and one bf16 multiplication. Both dtypes count, because numpy may
    be faster in fp32 but ten times slower in bf16.

    Args:
        name: `auto`, `cpu` (numpy or torch), `numpy`, `torch` (on any device), `torch:DEVICE`, or
            `cuda`, `mps`, `xpu`.
        available: candidates. None considers all backends available on this machine.
        notify: called with a message for each candidate that fails or computes wrong results.

    Raises:
        UsageError: if `name` is unknown or the backend is not available.
        CleaveError: if no available backend works.
    """
    name = known_name(name)
    if available is None:
        available = candidates(torch=name != "numpy")
    wanted = [
        c
        for c in available
        if name in ("auto", c.name, c.name.partition(":")[0])
        or (name == "cpu" and c.name in _ON_CPU)
    ]
    if not wanted:
        raise UsageError(_absent(name, available))
    speeds, faults = [], []
    for candidate in wanted:
        try:
            backend = candidate.make()
            fault = self_check(backend)
            if fault is None:
                speeds.append(measure(backend, clock=clock, least_s=_COMPARED_S))
        except Exception as error:  # noqa: BLE001 - a driver may raise anything; try other backends
            fault = f"{type(error).__name__}: {error}"
        if fault is not None:
            faults.append(f"the backend {candidate.name} is not used: {fault}")
            notify(faults[-1])
    if not speeds:
        raise CleaveError(f"{'; '.join(faults)}; choose another with --backend")
    if len(speeds) > 1:
        speeds.sort(key=lambda speed: _time_in_both(speed, clock))
    return measure(speeds[0].backend, clock=clock)


def _time_in_both(speed: Speed, clock: Callable[[], float]) -> float:
    """Return the time in seconds that one fp32 FLOP and one bf16 FLOP take together."""
    in_bf16 = measure(speed.backend, dtype=DType.BF16, clock=clock, least_s=_COMPARED_S)
    return 1 / speed.flops_per_s + 1 / in_bf16.flops_per_s


def _absent(name: str, available: Sequence[Candidate]) -> str:
    if not any(candidate.name.startswith("torch") for candidate in available):
        return (
            f"the backend {name} needs torch, which is not installed here; "
            f"install it with: {to_install('train')}, or use --backend numpy"
        )
    device = name.partition(":")[2]
    there = ", ".join(candidate.name for candidate in available)
    return f"the backend {name} needs {device}, which torch does not find; here are {there}"
