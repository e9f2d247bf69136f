"""How long a device takes to multiply a tile: a fitted model, and the fit.

For a product of sides a (rows), b (columns), c (depth) with its operands laid out in a given way:

    seconds = startup + volume abc + out ab + left ac + right bc
              + sum over widths w of (edge_a[w] bc where w does not divide a)
              + sum over widths w of (edge_b[w] ac where w does not divide b)

Every coefficient is 0 or more. Leaving the edges out, the throughput saturates in each side,

    2abc / (seconds - startup) = flops_per_s / (1 + a0/a + b0/b + c0/c),    flops_per_s = 2 / volume

with half-saturation sides a0 = right/volume, b0 = left/volume, c0 = out/volume: what packing the
operands and writing the result cost. The edges are what kernels pay for sides that their registers
do not divide; on x86 they are the difference between errors of 50 and of 12 percent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Final

import msgspec

EDGE_WIDTHS: Final = (2, 4, 8, 16, 32, 48)
"""Widths of register tiles that are tried; a fit leaves those at zero that do not matter."""

_MOST_KNOWN: Final = 65536


class Layout(Enum):
    """Which operands enter the product transposed, as they are stored (BLAS letters)."""

    NN = "nn"
    NT = "nt"
    TN = "tn"
    TT = "tt"

    @classmethod
    def of(cls, transpose_a: bool, transpose_b: bool) -> Layout:
        """The layout of a run of the protocol."""
        return cls(("t" if transpose_a else "n") + ("t" if transpose_b else "n"))


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured multiplication.

    Attributes:
        a, b, c: rows, columns, depth.
        layout: how the operands lay.
        seconds: the median of several.
    """

    a: int
    b: int
    c: int
    layout: Layout
    seconds: float


_Cost = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
_EdgeCosts = Annotated[
    tuple[_Cost, ...], msgspec.Meta(min_length=len(EDGE_WIDTHS), max_length=len(EDGE_WIDTHS))
]


class PerformanceModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fitted model of one dtype and layout; see the module's text for the formula.

    Attributes:
        startup_s: of any multiplication, however small.
        volume_s, out_s, left_s, right_s: per element of a*b*c, a*b, a*c and b*c.
        edge_a_s, edge_b_s: for `EDGE_WIDTHS`, per element of b*c and a*c.
    """

    startup_s: _Cost
    volume_s: Annotated[float, msgspec.Meta(gt=0, le=1.0)]
    out_s: _Cost = 0.0
    left_s: _Cost = 0.0
    right_s: _Cost = 0.0
    edge_a_s: _EdgeCosts = (0.0,) * len(EDGE_WIDTHS)
    edge_b_s: _EdgeCosts = (0.0,) * len(EDGE_WIDTHS)

    @classmethod
    def saturated(cls, flops_per_s: float, startup_s: float = 0.0) -> PerformanceModel:
        """A device of which one throughput is known: the same at every shape."""
        return cls(startup_s, 2 / flops_per_s)

    @property
    def flops_per_s(self) -> float:
        """Saturated throughput, FLOP/s."""
        return 2 / self.volume_s

    def seconds(self, a: int, b: int, c: int) -> float:
        """Predicted time of an a x c by c x b product."""
        total = self.startup_s + self.volume_s * a * b * c
        total += self.out_s * a * b + self.left_s * a * c + self.right_s * b * c
        for width, edge_a, edge_b in zip(EDGE_WIDTHS, self.edge_a_s, self.edge_b_s, strict=True):
            if edge_a and a % width:
                total += edge_a * b * c
            if edge_b and b % width:
                total += edge_b * a * c
        return total

    def scaled(self, factor: float) -> PerformanceModel:
        """The model of a device that takes `factor` times as long for everything."""
        return PerformanceModel(
            self.startup_s * factor,
            self.volume_s * factor,
            self.out_s * factor,
            self.left_s * factor,
            self.right_s * factor,
            tuple(edge * factor for edge in self.edge_a_s),
            tuple(edge * factor for edge in self.edge_b_s),
        )


class FitReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How well a fitted model predicts samples it was not fitted on.

    Attributes:
        fitted, held_out: how many samples.
        median_error, p95_error: of |predicted / measured - 1| over the held-out ones.
    """

    fitted: int
    held_out: int
    median_error: float
    p95_error: float


def fit(samples: Sequence[Sample]) -> PerformanceModel:
    """Fit the model to samples of one layout: non-negative least squares of relative errors.

    Raises:
        ValueError: when there are too few samples, or scipy is missing.
    """
    import numpy as np

    try:
        from scipy.optimize import nnls
    except ImportError:
        raise ValueError(
            "fitting a profile needs scipy, which is not installed here; "
            "install it with: pip install 'cleave[profile]'"
        ) from None
    if len(samples) < 8:
        raise ValueError(f"{len(samples)} samples are too few to fit a model; measure at least 8")
    a, b, c, seconds = (
        np.array([getattr(s, name) for s in samples], float) for name in ("a", "b", "c", "seconds")
    )
    features = [np.ones_like(a), a * b * c, a * b, a * c, b * c]
    features += [b * c * (a % width > 0) for width in EDGE_WIDTHS]
    features += [a * c * (b % width > 0) for width in EDGE_WIDTHS]
    # Scaled to comparable columns, which the solver needs: they span fifteen orders of magnitude.
    matrix = np.stack(features, 1) / seconds[:, None]
    scale = np.maximum(np.abs(matrix).max(0), 1e-300)
    weights = [float(w) for w in nnls(matrix / scale, np.ones_like(seconds))[0] / scale]
    if weights[1] <= 0:  # the samples are too small to show any throughput
        weights[1] = float((seconds / (a * b * c)).min())
    startup, volume, out, left, right, *edges = weights
    edge_a, edge_b = edges[: len(EDGE_WIDTHS)], edges[len(EDGE_WIDTHS) :]
    return PerformanceModel(startup, volume, out, left, right, tuple(edge_a), tuple(edge_b))


def fit_and_judge(samples: Sequence[Sample]) -> tuple[PerformanceModel, FitReport]:
    """Fit on four of every five samples, judge on the fifth, then fit on all.

    Raises:
        ValueError: see `fit`.
    """
    ordered = sorted(samples, key=lambda s: (s.a * s.b * s.c, s.a, s.b, s.c))
    held_out = ordered[2::5]
    kept = [s for i, s in enumerate(ordered) if i % 5 != 2]
    judged = fit(kept)
    errors = sorted(abs(judged.seconds(s.a, s.b, s.c) / s.seconds - 1) for s in held_out)
    report = FitReport(len(kept), len(errors), _quantile(errors, 0.5), _quantile(errors, 0.95))
    return fit(samples), report


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between the neighbours, as numpy does."""
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


class ComputeModel:
    """The models of one device, by dtype and layout, as tiles ask for them.

    Args:
        models: by dtype (the protocol's name, or `bf16>fp32` for 16-bit inputs with a result in
            fp32) and layout.
        wakes_s: by dtype, what a tile takes longer on a device that has been idle.
    """

    def __init__(
        self,
        models: Mapping[tuple[str, Layout], PerformanceModel],
        wakes_s: Mapping[str, float] | None = None,
    ) -> None:
        if not models:
            raise ValueError("a device needs a performance model for one dtype at least")
        self.models = dict(models)
        self.wakes_s = dict(wakes_s or {})
        self._known: dict[tuple[str, str, Layout, int, int, int], float] = {}

    def seconds(self, dtype: str, out: str, layout: Layout, a: int, b: int, c: int) -> float:
        """Predicted time of one product.

        Args:
            dtype, out: of the inputs and of the result, as the protocol names them.
            layout: how the operands lie.
            a, b, c: rows, columns, depth.
        """
        # The tiles of one GEMM have a handful of shapes, asked for a million times.
        key = (dtype, out, layout, a, b, c)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            found = self._known[key] = self.model(dtype, out, layout).seconds(a, b, c)
        return found

    def wake_s(self, dtype: str, out: str) -> float:
        """What a tile takes longer on a device that has been idle."""
        wakes_s = self.wakes_s
        return wakes_s.get(f"{dtype}>{out}", 0.0) if out != dtype else wakes_s.get(dtype, 0.0)

    def model(self, dtype: str, out: str, layout: Layout) -> PerformanceModel:
        """What is nearest to the asked dtype and layout; what a device lacks it does in fp32."""
        names = [f"{dtype}>{out}", dtype] if out != dtype else [dtype]
        for name in (*names, "fp32"):
            for candidate in (layout, *Layout):
                found = self.models.get((name, candidate))
                if found is not None:
                    return found
        return next(iter(self.models.values()))

    def scaled(self, factor: float) -> ComputeModel:
        """The models of a device that takes `factor` times as long for everything."""
        return ComputeModel(
            {key: model.scaled(factor) for key, model in self.models.items()},
            {dtype: wake_s * factor for dtype, wake_s in self.wakes_s.items()},
        )
