"""Measures tile times of many shapes on this machine and fits models to the samples."""

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

_ALIGNMENTS: Final = (4, 8, 16, 32, 48)  # of regular sides: where planners cut and kernels are fast
_LEAST_SAMPLES: Final = 15  # minimum per model, however short the time


@dataclass(frozen=True, slots=True)
class SampleGrid:
    """The measured shapes.

    Attributes:
        regular: number of shapes with sides that are multiples of 4 to 48.
        irregular: number of shapes with arbitrary sides.
        sides, depths: smallest and largest value.
    """

    regular: int = 100
    irregular: int = 40
    sides: tuple[int, int] = (8, 1536)
    depths: tuple[int, int] = (16, 4096)

    @property
    def elements(self) -> int:
        """Return the maximum number of elements of both inputs of one shape."""
        return 2 * self.sides[1] * self.depths[1]

    def shapes(self, rng: np.random.Generator, volume: float) -> list[Shape]:
        """Draw shapes spread evenly on a log scale, in random order.

        Args:
            rng: generator of the shapes.
            volume: maximum a*b*c of a shape; up to 64^3 is always allowed.
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
    """The dtypes of the inputs and the result."""

    dtype: DType
    out: DType

    @property
    def name(self) -> str:
        """Return the variant's name in profiles."""
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
    """Time all shapes of a grid in turn, repeatedly, until the time is up.

    A shape's median is thus over tiles minutes apart, between other shapes, as in training.

    Args:
        timer: timer of the tiles.
        variant, layout: dtypes and layout of the products.
        grid: the shapes; shapes that would take more than half a percent of the time are left out.
        seconds: duration of the measurement; at least 15 shapes are measured in any case.
        rng: generator of the shapes.
        clock: clock in seconds.
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
        # The first run builds kernels for a new shape; a clock may not advance during a small tile.
        typical_s = max(statistics.median(times[1:] or times), 1e-8)
        samples.append(TimedTile(*shape, layout, float(f"{typical_s:.4g}"), strips))
    return samples


def fitted(samples: Sequence[TimedTile], source: str = "") -> schema.ComputeProfile:
    """Fit a model to the samples of every layout, and judge it on held-out samples.

    Args:
        samples: samples of one dtype, in any layouts.
        source: source of the samples.

    Raises:
        ValueError: when there are too few samples, or scipy is missing.
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
