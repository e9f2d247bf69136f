"""The fitted model of a device's tile times, and the fit.

For a product of sides a (rows), b (columns), c (depth) with a given layout of its operands:

    seconds = startup + volume abc + out ab + left ac + right bc
              + sum over widths w of (edge_a[w] bc where w does not divide a)
              + sum over widths w of (edge_b[w] ac where w does not divide b)
              + fresh_left ac if the left operand was not multiplied before
              + fresh_right bc if the right operand was not multiplied before
              + wake if the device has been idle

Every coefficient is 0 or more. Without the edges, the throughput saturates in each side,

    2abc / (seconds - startup) = flops_per_s / (1 + a0/a + b0/b + c0/c),    flops_per_s = 2 / volume

with half-saturation sides a0 = right/volume, b0 = left/volume, c0 = out/volume: the costs of
packing the operands and writing the result. The edges are the kernels' cost for sides that are no
multiples of their register tiles; on x86 they reduce errors from 50 to 12 percent. A strip fresh
from a socket is in no cache near the core until its first tile.
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
"""Candidate widths of register tiles; a fit gives irrelevant widths a coefficient of zero."""

_MOST_KNOWN: Final = 65536


class Layout(Enum):
    """Which stored operands enter the product transposed (BLAS letters)."""

    NN = "nn"
    NT = "nt"
    TN = "tn"
    TT = "tt"

    @classmethod
    def of(cls, transpose_a: bool, transpose_b: bool) -> Layout:
        """Return the layout for two transposition flags."""
        return cls(("t" if transpose_a else "n") + ("t" if transpose_b else "n"))


@dataclass(frozen=True, slots=True)
class TimedTile:
    """One measured multiplication.

    Attributes:
        a, b, c: rows, columns, depth.
        layout: storage layout of the operands.
        seconds: median of several measurements.
        strips: strips per side of the measured tile, all newly received on an idle device;
            `seconds` is the mean over the tile's blocks.
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
    """The fitted model of one dtype and layout, with the formula in the module's docstring.

    Attributes:
        startup_s: seconds of any multiplication, however small.
        volume_s, out_s, left_s, right_s: seconds per element of a*b*c, a*b, a*c and b*c.
        edge_a_s, edge_b_s: seconds per element of b*c and a*c, for each of `EDGE_WIDTHS`.
        fresh_left_s, fresh_right_s: seconds per element of an operand not multiplied before.
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
        """Return a model with the same throughput at every shape."""
        return cls(startup_s, 2 / flops_per_s)

    @property
    def flops_per_s(self) -> float:
        """Return the saturated throughput in FLOP/s."""
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
        """Return the predicted seconds of an a x c by c x b product.

        Args:
            a, b, c: rows, columns, depth.
            fresh_left, fresh_right: 1 if the operand was never multiplied before, else 0; for
                several products, the share of those that apply.
            woken: 1 if the device has been idle, else 0, or a share.
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
        """Return the model's prediction of `sample.seconds`."""
        once = 1 / sample.strips  # a strip is new in one of this many products
        return self.seconds(sample.a, sample.b, sample.c, once, once, once * once)

    def scaled(self, factor: float) -> PerformanceModel:
        """Return the model with all times multiplied by `factor`."""
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
    """The prediction error of a fitted model on held-out samples.

    Attributes:
        fitted, held_out: number of samples used for fitting and for judging.
        median_error, p95_error: median and p95 of |predicted / measured - 1| on held-out samples.
    """

    fitted: int
    held_out: int
    median_error: float
    p95_error: float


POOR_ERROR: Final = 0.25
"""Median error above which a model is unreliable; good models have a few percent."""


def fit(samples: Sequence[TimedTile]) -> PerformanceModel:
    """Fit the model to samples of one layout by non-negative least squares of relative errors.

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
    if len(set(strips)) > 1:  # otherwise first and later products of a strip cannot be told apart
        features += [a * c / strips, b * c / strips, 1 / strips**2]
    # Columns span fifteen orders of magnitude; the solver needs comparable ones.
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
    """Fit on four of every five samples, judge on the fifth, then fit on all samples.

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
    """Return a quantile with linear interpolation, as numpy does."""
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


class ComputeModel:
    """The performance models of one device.

    Args:
        models: models by layout and dtype (the protocol's name, or `bf16>fp32` for 16-bit inputs
            with a result in fp32).
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
        """Return the predicted seconds of one product.

        Args:
            dtype, out: dtypes of inputs and result, with the protocol's names.
            layout: layout of the operands.
            a, b, c: rows, columns, depth.
            fresh_left, fresh_right, woken: see `PerformanceModel.seconds`.
        """
        # A GEMM's tiles have few shapes but are looked up millions of times.
        key = (dtype, out, layout, a, b, c, fresh_left, fresh_right, woken)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            found = self.model(dtype, out, layout).seconds(*key[3:])
            self._known[key] = found
        return found

    def model(self, dtype: str, out: str, layout: Layout) -> PerformanceModel:
        """Return the model nearest to the dtype and layout; missing dtypes fall back to fp32."""
        names = [f"{dtype}>{out}", dtype] if out != dtype else [dtype]
        for name in (*names, "fp32"):
            for candidate in (layout, *Layout):
                found = self.models.get((name, candidate))
                if found is not None:
                    return found
        return next(iter(self.models.values()))

    def scaled(self, factor: float) -> ComputeModel:
        """Return the models with all times multiplied by `factor`."""
        return ComputeModel({key: model.scaled(factor) for key, model in self.models.items()})
