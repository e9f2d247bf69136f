"""How long a device takes to multiply a tile: a fitted model, and the fit.

For a product of sides a (rows), b (columns), c (depth) with its operands laid out in a given way:

    seconds = startup + volume abc + out ab + left ac + right bc
              + sum over widths w of (edge_a[w] bc where w does not divide a)
              + sum over widths w of (edge_b[w] ac where w does not divide b)
              + fresh_left ac where the left operand was not multiplied before
              + fresh_right bc where the right one was not
              + wake where the device has been idle

Every coefficient is 0 or more. Without the edges, the throughput saturates in each side,

    2abc / (seconds - startup) = flops_per_s / (1 + a0/a + b0/b + c0/c),    flops_per_s = 2 / volume

with half-saturation sides a0 = right/volume, b0 = left/volume, c0 = out/volume: what packing the
operands and writing the result cost. The edges are what kernels pay for sides that their registers
do not divide; on x86 they are the difference between errors of 50 and of 12 percent. A strip that
just came over a socket lies in no cache near the core; the tiles after the first find it there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Final

import msgspec

from cleave.errors import not_installed

EDGE_WIDTHS: Final = (2, 4, 8, 16, 32, 48)
"""Widths of register tiles that are tried; a fit leaves those at zero that do not matter."""

_MOST_KNOWN: Final = 65536


class Layout(Enum):
    """Which stored operands enter the product transposed (BLAS letters)."""

    NN = "nn"
    NT = "nt"
    TN = "tn"
    TT = "tt"

    @classmethod
    def of(cls, transpose_a: bool, transpose_b: bool) -> Layout:
        """Return the layout of a run, from its transposition flags."""
        return cls(("t" if transpose_a else "n") + ("t" if transpose_b else "n"))


@dataclass(frozen=True, slots=True)
class TimedTile:
    """One measured multiplication.

    Attributes:
        a, b, c: rows, columns, depth.
        layout: how the operands were stored.
        seconds: the median of several measurements.
        strips: `seconds` is the mean over the blocks of a tile with this many strips per side, all
            newly received, on a device that was idle before.
    """

    a: int
    b: int
    c: int
    layout: Layout
    seconds: float
    strips: int = 1


_Cost = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
_EdgeCosts = Annotated[
    tuple[_Cost, ...], msgspec.Meta(min_length=len(EDGE_WIDTHS), max_length=len(EDGE_WIDTHS))
]


class PerformanceModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fitted model of one dtype and layout; see the module's text for the formula.

    Attributes:
        startup_s: seconds of any multiplication, however small.
        volume_s, out_s, left_s, right_s: per element of a*b*c, a*b, a*c and b*c.
        edge_a_s, edge_b_s: for `EDGE_WIDTHS`, per element of b*c and a*c.
        fresh_left_s, fresh_right_s: per element of an operand that was not multiplied before.
        wake_s: additional seconds on a device that has been idle: cold caches, a sleeping thread.
    """

    startup_s: _Cost
    volume_s: Annotated[float, msgspec.Meta(gt=0, le=1.0)]
    out_s: _Cost = 0.0
    left_s: _Cost = 0.0
    right_s: _Cost = 0.0
    edge_a_s: _EdgeCosts = (0.0,) * len(EDGE_WIDTHS)
    edge_b_s: _EdgeCosts = (0.0,) * len(EDGE_WIDTHS)
    fresh_left_s: _Cost = 0.0
    fresh_right_s: _Cost = 0.0
    wake_s: _Cost = 0.0

    @classmethod
    def saturated(cls, flops_per_s: float, startup_s: float = 0.0) -> PerformanceModel:
        """Return the model of a device with one known throughput, the same at every shape."""
        return cls(startup_s, 2 / flops_per_s)

    @property
    def flops_per_s(self) -> float:
        """Return the saturated throughput, FLOP/s."""
        return 2 / self.volume_s

    def seconds(
        self,
        a: int,
        b: int,
        c: int,
        fresh_left: float = 0.0,
        fresh_right: float = 0.0,
        woken: float = 0.0,
    ) -> float:
        """Return the predicted time of an a x c by c x b product.

        Args:
            a, b, c: rows, columns, depth.
            fresh_left, fresh_right: whether the operand was never multiplied before: 0, 1, or the
                share of several products for which it holds.
            woken: whether the device has been idle, as 0, 1 or a share.
        """
        total = self.startup_s + self.volume_s * a * b * c
        left_s = self.left_s + fresh_left * self.fresh_left_s
        right_s = self.right_s + fresh_right * self.fresh_right_s
        total += self.out_s * a * b + left_s * a * c + right_s * b * c + woken * self.wake_s
        for width, edge_a, edge_b in zip(EDGE_WIDTHS, self.edge_a_s, self.edge_b_s, strict=True):
            if edge_a and a % width:
                total += edge_a * b * c
            if edge_b and b % width:
                total += edge_b * a * c
        return total

    def expected(self, sample: TimedTile) -> float:
        """Return what `sample.seconds` should be by the model."""
        once = 1 / sample.strips  # each strip meets as many strips of the other side
        return self.seconds(sample.a, sample.b, sample.c, once, once, once * once)

    def scaled(self, factor: float) -> PerformanceModel:
        """Return the model of a device that takes `factor` times as long for everything."""
        return PerformanceModel(
            self.startup_s * factor,
            self.volume_s * factor,
            self.out_s * factor,
            self.left_s * factor,
            self.right_s * factor,
            tuple(edge * factor for edge in self.edge_a_s),
            tuple(edge * factor for edge in self.edge_b_s),
            self.fresh_left_s * factor,
            self.fresh_right_s * factor,
            self.wake_s * factor,
        )


class FitReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How well a fitted model predicts samples it was not fitted on.

    Attributes:
        fitted, held_out: how many samples were fitted on, and how many judged.
        median_error, p95_error: of |predicted / measured - 1| over the held-out ones.
    """

    fitted: int
    held_out: int
    median_error: float
    p95_error: float


POOR_ERROR: Final = 0.25
"""A median error above which a model is not to be relied on; of good ones it is a few percent."""


def fit(samples: Sequence[TimedTile]) -> PerformanceModel:
    """Fit the model to samples of one layout: non-negative least squares of relative errors.

    Raises:
        ValueError: when there are too few samples, or scipy is missing.
    """
    import numpy as np

    try:
        from scipy.optimize import nnls
    except ImportError:
        raise ValueError(not_installed("fitting a profile", "scipy", "profile")) from None
    if len(samples) < 8:
        raise ValueError(f"{len(samples)} samples are too few to fit a model; measure at least 8")
    names = ("a", "b", "c", "seconds", "strips")
    a, b, c, seconds, strips = (
        np.array([getattr(s, name) for s in samples], float) for name in names
    )
    features = [np.ones_like(a), a * b * c, a * b, a * c, b * c]
    features += [b * c * (a % width > 0) for width in EDGE_WIDTHS]
    features += [a * c * (b % width > 0) for width in EDGE_WIDTHS]
    if len(set(strips)) > 1:  # else nothing tells a strip's first product from the others
        features += [a * c / strips, b * c / strips, 1 / strips**2]
    # Scaled to comparable columns, which the solver needs: they span fifteen orders of magnitude.
    matrix = np.stack(features, 1) / seconds[:, None]
    scale = np.maximum(np.abs(matrix).max(0), 1e-300)
    weights = [float(w) for w in nnls(matrix / scale, np.ones_like(seconds))[0] / scale]
    if weights[1] <= 0:  # the samples are too small to show any throughput
        weights[1] = float((seconds / (a * b * c)).min())
    startup, volume, out, left, right, *edges = weights
    count = len(EDGE_WIDTHS)
    edge_a, edge_b, first = edges[:count], edges[count : 2 * count], edges[2 * count :]
    return PerformanceModel(startup, volume, out, left, right, tuple(edge_a), tuple(edge_b), *first)


def fit_and_judge(samples: Sequence[TimedTile]) -> tuple[PerformanceModel, FitReport]:
    """Fit on four of every five samples, judge on the fifth, then fit on all.

    Raises:
        ValueError: see `fit`.
    """
    ordered = sorted(samples, key=lambda s: (s.a * s.b * s.c, s.a, s.b, s.c))
    held_out = ordered[2::5]
    kept = [s for i, s in enumerate(ordered) if i % 5 != 2]
    judged = fit(kept)
    errors = sorted(abs(judged.expected(s) / s.seconds - 1) for s in held_out)
    report = FitReport(len(kept), len(errors), _quantile(errors, 0.5), _quantile(errors, 0.95))
    return fit(samples), report


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between the neighbours, as numpy does."""
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


class ComputeModel:
    """The models of one device, by dtype and layout, for the tiles that it may get.

    Args:
        models: by dtype (the protocol's name, or `bf16>fp32` for 16-bit inputs with a result in
            fp32) and layout.
    """

    def __init__(self, models: Mapping[tuple[str, Layout], PerformanceModel]) -> None:
        if not models:
            raise ValueError("a device needs a performance model for one dtype at least")
        self.models = dict(models)
        self._known: dict[tuple[str, str, Layout, int, int, int, bool, bool, bool], float] = {}

    def seconds(
        self,
        dtype: str,
        out: str,
        layout: Layout,
        a: int,
        b: int,
        c: int,
        fresh_left: bool = False,
        fresh_right: bool = False,
        woken: bool = False,
    ) -> float:
        """Return the predicted time of one product.

        Args:
            dtype, out: of the inputs and of the result, as the protocol names them.
            layout: how the operands lie.
            a, b, c: rows, columns, depth.
            fresh_left, fresh_right, woken: see `PerformanceModel.seconds`.
        """
        # The tiles of one GEMM have a handful of shapes, asked for a million times.
        key = (dtype, out, layout, a, b, c, fresh_left, fresh_right, woken)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            found = self.model(dtype, out, layout).seconds(*key[3:])
            self._known[key] = found
        return found

    def model(self, dtype: str, out: str, layout: Layout) -> PerformanceModel:
        """Return the model nearest to the dtype and layout; dtypes that a device lacks use fp32."""
        names = [f"{dtype}>{out}", dtype] if out != dtype else [dtype]
        for name in (*names, "fp32"):
            for candidate in (layout, *Layout):
                found = self.models.get((name, candidate))
                if found is not None:
                    return found
        return next(iter(self.models.values()))

    def scaled(self, factor: float) -> ComputeModel:
        """Return the models of a device that takes `factor` times as long for everything."""
        return ComputeModel({key: model.scaled(factor) for key, model in self.models.items()})
