"""Keeps account of every GEMM: each element placed once, and the right number."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from cleave.arrays import Buffer, DType, empty
from cleave.fleet.product import GemmFuture, Output
from cleave.fleet.runtime import Runtime
from cleave.machine.backends import MatmulBackend
from cleave.scheduler.tiles.tasks import GemmTask

_UNIT = 2.0**-24
_OUT_UNIT = {DType.FP32: 0.0, DType.BF16: 2.0**-8, DType.FP16: 2.0**-11}


@dataclass
class Ledger:
    """What was found so far.

    Attributes:
        gemms: looked at.
        placed: results put in their places.
        miscounted: elements that did not get each multiply-add exactly once.
        beyond: elements further from the plain product than rounding explains.
        different: elements that are not those of the reference backend, to the bit.
        worst: the largest error, as a share of its bound.
    """

    gemms: int = 0
    placed: int = 0
    miscounted: int = 0
    beyond: int = 0
    different: int = 0
    worst: float = 0.0
    _depths: dict[int, npt.NDArray[np.int32]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def opened(self, out: Buffer) -> None:
        """A GEMM is to be assembled in `out`."""
        with self._lock:
            self._depths[id(out)] = np.zeros(out.shape, np.int32)

    def place(self, out: Buffer, task: GemmTask) -> None:
        """A result was put in its place."""
        block = task.block
        with self._lock:
            self.placed += 1
            depths = self._depths[id(out)]
            depths[block.m.start : block.m.stop, block.n.start : block.n.stop] += block.k.size

    def finished(self, future: GemmFuture, reference: MatmulBackend | None) -> None:
        """A GEMM is complete: count, and compare.

        Args:
            future: of the GEMM.
            reference: must give the same bits; None where only the rounding bound holds.
        """
        with self._lock:
            depths = self._depths.pop(id(future.out))
        self.gemms += 1
        self.miscounted += int((depths != future.job.gemm.k).sum())
        a, b = future.a.matrix, future.b.matrix
        error, bound = rounding(a, b, future.out)
        self.beyond += int((~(error <= bound)).sum())  # so that NaN is beyond
        self.worst = max(self.worst, float((error / bound).max(initial=0)))
        if reference is not None:
            expected = empty(*future.out.shape, future.out.dtype)
            reference.matmul(a, b, expected)
            bits = f"u{expected.dtype.itemsize}"
            ours = np.ascontiguousarray(future.out.array).view(bits)
            self.different += int((ours != expected.array.view(bits)).sum())


def rounding(a: Buffer, b: Buffer, product: Buffer) -> tuple[Any, Any]:
    """How far each element is from the plain product, and how far it may be.

    The bound holds for a sum of K products in fp32 in any order, in any number of parts (Higham,
    Accuracy and Stability, section 3.1): K u / (1 - K u) times the sum of magnitudes; then for the
    rounding of the result. Only underflow adds to it, at most a smallest number for each product.
    """
    left, right = a.float32(), b.float32()
    exact = left.astype(np.float64) @ right.astype(np.float64)
    steps = (a.shape[1] + 1) * _UNIT
    # Magnitudes in fp32: their own rounding is within the one step more, up to a depth of 4095.
    bound = steps / (1 - steps) * (np.abs(left) @ np.abs(right)).astype(np.float64)
    bound += _OUT_UNIT[product.dtype] * (np.abs(exact) + bound) + a.shape[1] * 2.0**-149
    return np.abs(product.float32() - exact), bound


def audit(runtime: Runtime, ledger: Ledger, reference: MatmulBackend | None = None) -> None:
    """Have the results of a runtime looked at before training gets them.

    Args:
        runtime: whose.
        ledger: where to write what is found.
        reference: see `Ledger.finished`.
    """
    wait = runtime.wait

    def audited(future: GemmFuture, timeout_s: float | None = None) -> bool:
        done = wait(future, timeout_s)
        if done and not future.error:
            ledger.finished(future, reference)
        return done

    runtime.wait = audited  # type: ignore[method-assign]


@contextmanager
def placements(ledger: Ledger) -> Iterator[None]:
    """While active, live fleets of this process count in a ledger what they place."""

    class Counted(Output):
        def __init__(self, out: Buffer) -> None:
            super().__init__(out)
            ledger.opened(out)

        def place(self, task: GemmTask, payload: Any) -> None:
            super().place(task, payload)
            ledger.place(self.out, task)

    counted: Callable[[Buffer], Output] = Counted
    with patch("cleave.fleet.runtime.Output", counted):
        yield
