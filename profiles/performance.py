"""Performance models that predict a device's tile times, and code that fits the models to samples.

A model predicts the time to multiply an a x c matrix by a c x b matrix in one storage layout:

    seconds = startup + volume abc + out ab + left ac + right bc
              + sum over widths w of (edge_a[w] bc where w does not divide a)
              + sum over widths w of (edge_b[w] ac where w does not divide b)
              + fresh_left ac if the left operand was not multiplied before
              + fresh_right bc if the right operand was not multiplied before
              + wake if the device has been idle

Every coefficient is 0 or more. Without the edge terms, the throughput approaches 2 / volume as all
sides grow. The terms `left`, `right` and `out` are the costs of packing the operands and writing
the result. The edge terms are the cost of sides that are not multiples of a kernel's register tile.
On x86, the edge terms reduce prediction errors from 50 % to 12 %. The fresh terms are the cost of
reading an operand that is not yet in the core's caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Final

import msgspec

from cleave.errors import not_installed

EDGE_WIDTHS: Final = (2, 4, 8, 16, 32, 48)  # candidate widths of a register tile, in elements
_MOST_KNOWN: Final = 65536


class Layout(Enum):
    """Storage layout of two operands: "t" for a transposed operand, "n" otherwise (as in BLAS)."""

    NN = "nn"
    NT = "nt"
    TN = "tn"
    TT = "tt"

    @classmethod
    def of(cls, transpose_a: bool, transpose_b: bool) -> Layout:
        """Return the layout in which each operand is transposed if its flag is True."""
        return cls(("t" if transpose_a else "n") + ("t" if transpose_b else "n"))


@dataclass(frozen=True, slots=True)
class TimedTile:
    """The measured time of one block of a tile.

    Attributes:
        a, b, c: rows, columns and depth of the block.
        seconds: tile time divided by the number of blocks (the median of several measurements).
        strips: strips per side of the measured tile, which consists of strips x strips blocks. The
            device was idle before the tile, and all strips had just arrived.
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
    """The coefficients of the module's formula for one dtype and layout.

    Attributes:
        startup_s: fixed time of every multiplication, in seconds.
        volume_s: seconds per multiply-add; a multiplication takes a*b*c multiply-adds.
        out_s, left_s, right_s: seconds per element of the result (a*b), the left operand (a*c) and
            the right operand (b*c).
        edge_a_s: for each width in `EDGE_WIDTHS`, seconds per element of the right operand (b*c) if
            the width does not divide a.
        edge_b_s: for each width in `EDGE_WIDTHS`, seconds per element of the left operand (a*c) if
            the width does not divide b.
        fresh_left_s, fresh_right_s: additional seconds per element of an operand that is multiplied
            for the first time.
        wake_s: additional time in seconds on a device that has been idle.
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
    def saturated(cls, flops_per_s: float) -> PerformanceModel:
        """Return a model that predicts FLOPs / `flops_per_s` seconds, a constant throughput."""
        return cls(0.0, 2 / flops_per_s)

    @property
    def flops_per_s(self) -> float:
        """Return the throughput for very large matrices, in FLOP/s."""
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
        """Predict the time in seconds to multiply an a x c matrix by a c x b matrix.

        Args:
            a, b, c: rows, columns and depth.
            fresh_left, fresh_right: 1 if the operand is multiplied for the first time, else 0. For
                the mean of several multiplications, give a share between 0 and 1.
            woken: 1 if the device has been idle, else 0. For a mean, give a share.
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
        """Predict `sample.seconds`, the mean time per block of the measured tile."""
        once = 1 / sample.strips  # share of the blocks that use a strip for the first time
        return self.seconds(sample.a, sample.b, sample.c, once, once, once * once)

    def scaled(self, factor: float) -> PerformanceModel:
        """Return a model whose predicted times are multiplied by `factor`."""
        costs: list[Any] = [
            tuple(each * factor for each in cost) if isinstance(cost, tuple) else cost * factor
            for cost in msgspec.structs.astuple(self)
        ]
        return PerformanceModel(*costs)


class FitReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The prediction error of a performance model on samples that were not used to fit it.

    Attributes:
        fitted, held_out: numbers of samples used for the fit and for the error.
        median_error, p95_error: median and 95 % quantile of |predicted / measured - 1|.
    """

    fitted: int
    held_out: int
    median_error: float
    p95_error: float


POOR_ERROR: Final = 0.25  # `FitReport.median_error` above which a model is unreliable


def fit(samples: Sequence[TimedTile]) -> PerformanceModel:
    """Fit a performance model by non-negative least squares of the relative prediction errors.

    Args:
        samples: at least 8 samples with the same dtypes and layout.

    Raises:
        ValueError: if `samples` has fewer than 8 items, or scipy is missing.
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
    if len(set(strips)) > 1:  # otherwise the fresh and wake costs cannot be determined
        features += [a * c / strips, b * c / strips, 1 / strips**2]
    # The columns span fifteen orders of magnitude, so scale them for the solver.
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
    """Fit a performance model to all samples and estimate its error for other samples.

    The report describes a second model, which is fitted to four of every five samples and tested
    on the fifth.

    Raises:
        ValueError: if the samples are too few to fit a model, or scipy is missing.
    """
    import numpy as np

    ordered = sorted(samples, key=lambda s: (s.a * s.b * s.c, s.a, s.b, s.c))
    held_out = ordered[2::5]
    kept = [s for i, s in enumerate(ordered) if i % 5 != 2]
    judged = fit(kept)
    errors = [abs(judged.expected(s) / s.seconds - 1) for s in held_out]
    median, p95 = (float(q) for q in np.quantile(errors, (0.5, 0.95)))
    return fit(samples), FitReport(len(kept), len(errors), median, p95)


class ComputeModel:
    """The performance models of one device, for several dtypes and layouts.

    Args:
        models: maps a pair of dtype and layout to a model. The dtype is a protocol dtype name, or
            has the form `bf16>fp32` if operands and result differ in dtype.

    Raises:
        ValueError: if `models` is empty.
    """

    def __init__(self, models: Mapping[tuple[str, Layout], PerformanceModel]) -> None:
        if not models:
            raise ValueError("a device needs a performance model for at least one dtype")
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
        """Predict the time in seconds to multiply an a x c matrix by a c x b matrix.

        `dtype` and `out` are the protocol's names for the dtypes of the operands and of the result.
        `fresh_left` and `fresh_right` are True if the operand is multiplied for the first time, and
        `woken` is True if the device has been idle.
        """
        # Cache the results: tiles have few distinct shapes, but there are millions of calls.
        key = (dtype, out, layout, a, b, c, fresh_left, fresh_right, woken)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            found = self.model(dtype, out, layout).seconds(*key[3:])
            self._known[key] = found
        return found

    def model(self, dtype: str, out: str, layout: Layout) -> PerformanceModel:
        """Return the model for these dtypes and this layout, or the closest available model.

        The order of preference is a model for `dtype` and `out`, for `dtype` alone, for fp32, and
        any other model. If these dtypes lack the layout, another of their layouts is used.
        """
        names = [f"{dtype}>{out}", dtype] if out != dtype else [dtype]
        for name in (*names, "fp32"):
            for candidate in (layout, *Layout):
                found = self.models.get((name, candidate))
                if found is not None:
                    return found
        return next(iter(self.models.values()))

    def scaled(self, factor: float) -> ComputeModel:
        """Return a copy whose predicted times are multiplied by `factor`."""
        return ComputeModel({key: model.scaled(factor) for key, model in self.models.items()})
