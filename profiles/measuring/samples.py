"""Measures tile times of many shapes on this machine, and fits performance models to the times."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from cleave.arrays import DType
from profiles import device_profile as schema
from profiles.measuring.gemm_timer import REPEATS, Clock, Shape, TileTimer
from profiles.performance import Layout, TimedTile, fit_and_judge

# Regular sides are multiples of these. Planners cut tiles there, and kernels are fast for them.
_ALIGNMENTS: Final = (4, 8, 16, 32, 48)
_LEAST_SAMPLES: Final = 15  # minimum number of samples per model, however short the time limit


@dataclass(frozen=True, slots=True)
class SampleGrid:
    """The number and size range of the shapes to measure.

    Attributes:
        regular: number of shapes whose sides are multiples of 4, 8, 16, 32 or 48.
        irregular: number of shapes with arbitrary sides.
        sides: minimum and maximum number of rows, and of columns.
        depths: minimum and maximum depth.
    """

    regular: int = 100
    irregular: int = 40
    sides: tuple[int, int] = (8, 1536)
    depths: tuple[int, int] = (16, 4096)

    @property
    def elements(self) -> int:
        """Return the maximum number of elements of both operands of a shape together."""
        return 2 * self.sides[1] * self.depths[1]

    def shapes(self, rng: np.random.Generator, volume: float) -> list[Shape]:
        """Draw shapes uniformly on a logarithmic scale, and return them in random order.

        Args:
            rng: random generator for sides and order.
            volume: maximum product of rows, columns and depth; at least 64^3 is always allowed.
        """
        found: list[Shape] = []
        while len(found) < self.regular + self.irregular:
            aligned = len(found) < self.regular
            a, b = (self._side(rng, *self.sides, aligned=aligned) for _ in range(2))
            c = self._side(rng, *self.depths, aligned=aligned)
            if a * b * c <= max(64**3, volume):
                found.append((a, b, c))
        return [found[i] for i in rng.permutation(len(found))]

    @staticmethod
    def _side(rng: np.random.Generator, low: int, high: int, *, aligned: bool) -> int:
        side = round(math.exp(rng.uniform(math.log(low), math.log(high))))
        if aligned:
            width = int(rng.choice(_ALIGNMENTS))
            side = max(1, round(side / width)) * width
        return min(high, max(low, side))


@dataclass(frozen=True, slots=True)
class Variant:
    """A pair of dtypes: the dtype of both operands, and the dtype of the result."""

    dtype: DType
    out: DType

    @property
    def name(self) -> str:
        """Return the key of `DeviceProfile.compute` for this variant, such as `bf16>fp32`."""
        return self.dtype.value if self.dtype is self.out else f"{self.dtype.value}>fp32"


QUICK_VARIANTS: Final = (
    Variant(DType.FP32, DType.FP32),
    Variant(DType.BF16, DType.BF16),
    Variant(DType.BF16, DType.FP32),
)
ALL_VARIANTS: Final = (
    *QUICK_VARIANTS,
    Variant(DType.FP16, DType.FP16),
    Variant(DType.FP16, DType.FP32),
)
QUICK_LAYOUTS: Final = (Layout.NN, Layout.NT, Layout.TN)


def measure_samples(
    timer: TileTimer,
    variant: Variant,
    layout: Layout,
    grid: SampleGrid,
    seconds: float,
    rng: np.random.Generator,
    clock: Clock = time.perf_counter,
) -> list[TimedTile]:
    """Time all shapes of a grid in turn, and repeat this until the time is up.

    The repetitions of a shape are thus minutes apart, with other shapes in between, as in training.

    Args:
        timer: timer that runs the tiles.
        variant, layout: dtypes and storage layout of the multiplications.
        grid: number and size range of the shapes. Shapes that would take more than 0.5 % of
            `seconds` are not drawn.
        seconds: duration of the measurement. At least 15 shapes are measured, even if this takes
            longer.
        rng: random generator for the shapes.
        clock: function that returns the current time in seconds.

    Returns:
        One sample for each measured shape, with the median of its tile times.
    """

    def block_s(shape: Shape, strips: int) -> float:
        return timer.block_s(shape, strips, layout, variant.dtype, variant.out)

    began_s = clock()
    pace_s = min(block_s((128, 128, 128), 1) for _ in range(REPEATS)) / 128**3
    volume = seconds / 200 / max(pace_s, 1e-15)
    shapes = grid.shapes(rng, volume)
    tiles = [
        (shape, strips if strips**2 * math.prod(shape) <= volume else 1)
        for shape, strips in zip(shapes, itertools.cycle(timer.strips), strict=False)
    ]
    took_s: list[list[float]] = []
    for number in itertools.count():
        place = number % len(tiles)
        if len(took_s) >= _LEAST_SAMPLES and clock() - began_s > seconds:
            break
        if number == place:
            took_s.append([])
        took_s[place].append(block_s(*tiles[place]))
    samples = []
    for (shape, strips), times in zip(tiles, took_s, strict=False):
        # The first run of a shape may build kernels, so leave it out. The clock may be too coarse
        # for a small tile, so the result is at least 1e-8 s.
        typical_s = max(statistics.median(times[1:] or times), 1e-8)
        samples.append(TimedTile(*shape, layout, float(f"{typical_s:.4g}"), strips))
    return samples


def fitted(samples: Sequence[TimedTile], source: str = "") -> schema.ComputeProfile:
    """Fit one performance model per layout, and measure its error on held-out samples.

    Args:
        samples: samples of one dtype with any number of layouts.
        source: text for `ComputeProfile.source`.

    Raises:
        ValueError: when a layout has too few samples, or scipy is missing.
    """
    models, fits = {}, {}
    for layout in dict.fromkeys(s.layout for s in samples):
        of_layout = [s for s in samples if s.layout is layout]
        models[layout], fits[layout] = fit_and_judge(of_layout)
    return schema.ComputeProfile(
        flops_per_s=max(2 * s.a * s.b * s.c / s.seconds for s in samples),
        source=source,
        models=models,
        samples=tuple((s.a, s.b, s.c, s.layout, s.seconds, s.strips) for s in samples),
        fits=fits,
    )
