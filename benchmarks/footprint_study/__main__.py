"""Test the claims of arXiv 2507.01803 on energy and carbon, by simulation.

    python -m benchmarks.footprint_study [--seed 0]

Laptops and phones train OPT-125M and OPT-1.3B alone, with DT-FM, and with Cleave. Prints time,
memory, energy and carbon compared with an A5000, in how many combinations of conditions the claims
hold, what changes with one condition at a time, and the device speed that the energy claim needs.
Takes about two minutes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.footprint_study.conditions import (
    CARBON_CLAIM,
    ENERGY_CLAIM,
    ConditionState,
    Found,
    Settings,
    carbon_axes,
    combinations,
    energy_axes,
    grids,
    held_against,
)
from benchmarks.footprint_study.rows import StudyRow, gpu_at, gpu_usage, rows_of, simulated
from benchmarks.footprint_study.setups import Setup, published
from benchmarks.published_claims.verdict import figure, paragraphs, table
from cleave.energy.account import CloudUsage, Footprint, cloud_footprint
from cleave.energy.comparison import Case, ComparisonQuestion, Ratios
from cleave.energy.typical import load_assumptions, load_typical
from profiles.library import load_profiles

SPEEDS = tuple(2.0**power for power in range(-1, 8))  # factors for the devices' throughput
SWEPT = ("dtfm-all", "dtfm", "cleave", "cleave-stages")
_SHOWN = ("alone", "dtfm-all (pipelined)", "dtfm (pipelined)", "cleave", "cleave-stages")
_PROFILES = load_profiles()
_TYPICAL = load_typical()


def central() -> ConditionState:
    """Return the central case, apart from the first settings of the axes."""
    middle = grids()[1]  # the median country's electricity
    start = ConditionState(Case(load_assumptions(), middle, middle))
    return next(combinations((*energy_axes(), *carbon_axes()), start))[1]


def compared(row: StudyRow, gpu: CloudUsage, state: ConditionState) -> ComparisonQuestion:
    """Return the comparison of a row's devices with the GPU. The server's energy is left out."""
    usages = [row.usage_at(state.device_share)]
    return ComparisonQuestion(usages, _PROFILES, _TYPICAL, None, gpu_at(gpu, state.gpu_share))


def ratios(row: StudyRow, gpu: CloudUsage, state: ConditionState) -> Ratios:
    """Return the GPU's energy and carbon divided by those of a row's devices."""
    return compared(row, gpu, state).ratios(state.case)


@dataclass(frozen=True, slots=True)
class Judged:
    """The energy, carbon and claim tests of a row.

    Attributes:
        fleet, gpu: energy and carbon of the devices and of the GPU in the central case.
        energy: test of the energy claim under all combinations of conditions.
        attributed, sunk_cost: tests of the carbon claim, with and without the devices' embodied
            carbon.
    """

    row: StudyRow
    fleet: Footprint
    gpu: Footprint
    energy: Found
    attributed: Found
    sunk_cost: Found

    @property
    def compute_over_gpu(self) -> float:
        """Return the energy of multiplication on the devices, divided by that of the bare GPU."""
        return _known(self.fleet.parts[0].energy_j) / _known(self.gpu.parts[0].energy_j)


def judged(row: StudyRow, gpu: CloudUsage) -> Judged:
    """Test the energy and carbon claims for a row under all combinations of conditions."""
    middle, energy = central(), energy_axes()
    every = (*energy, *carbon_axes())
    there = cloud_footprint(
        gpu_at(gpu, middle.gpu_share), middle.case.assumptions, middle.case.cloud_gco2e_per_kwh
    )
    of_energy, of_carbon = (
        [(settings, ratios(row, gpu, state)) for settings, state in combinations(axes, middle)]
        for axes in (energy, every)
    )

    def tested(
        tried: Iterable[tuple[Settings, Ratios]], of: Callable[[Ratios], float | None]
    ) -> list[tuple[Settings, float]]:
        return [(settings, _known(of(each))) for settings, each in tried]

    return Judged(
        row,
        compared(row, gpu, middle).fleet(middle.case),
        there,
        held_against(energy, tested(of_energy, lambda r: r.energy), ENERGY_CLAIM),
        held_against(every, tested(of_carbon, lambda r: r.attributed), CARBON_CLAIM),
        held_against(every, tested(of_carbon, lambda r: r.sunk_cost), CARBON_CLAIM),
    )


def _known(value: float | None) -> float:
    if value is None:
        raise ValueError("the power or the making of a device of the study is unknown")
    return value


def one_by_one(row: StudyRow, gpu: CloudUsage) -> Iterator[tuple[str, str, Ratios]]:
    """Yield a row's ratios with one condition (axis, setting) at a time changed."""
    middle = central()
    for axis in (*energy_axes(), *carbon_axes()):
        for title, change in axis.settings.items():
            yield axis.name, title, ratios(row, gpu, change(middle))


def speeds_of(setup: Setup, gpu: CloudUsage, seed: int) -> dict[str, list[tuple[float, float]]]:
    """Map each method that fits to (device speed in FLOP/s, energy ratio) in the central case."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for speed in SPEEDS:
        for row in simulated(setup, setup.offers[0], seed, speed, SWEPT):
            ratio = ratios(row, gpu, central()).energy
            if row.method in _SHOWN and row.fits and ratio is not None:
                curves.setdefault(row.method, []).append((setup.flops_per_s * speed, ratio))
    return curves


def needed_flops_per_s(points: Sequence[tuple[float, float]], ratio: float) -> float | None:
    """Return the lowest device speed at which the energy ratio reaches `ratio`.

    Between two points, the logarithms are interpolated linearly. If the ratio is 1 at 1 TFLOP/s and
    4 at 4 TFLOP/s, then it is 2 at 2 TFLOP/s.

    Args:
        points: (speed in FLOP/s, energy ratio) pairs, sorted by ascending speed.
        ratio: required energy ratio.

    Returns:
        Speed in FLOP/s; None if no point reaches `ratio`.
    """
    for at, (flops_per_s, found) in enumerate(points):
        if found >= ratio:
            if at == 0:
                return flops_per_s
            before_flops_per_s, before = points[at - 1]
            share = math.log(ratio / before) / math.log(found / before)
            return float(before_flops_per_s * (flops_per_s / before_flops_per_s) ** share)
    return None


def report(setup: Setup, seed: int) -> Iterator[str]:
    """Yield the lines of Markdown that show the results of a set-up."""
    gpu = gpu_usage(setup)
    every = [judged(row, gpu) for row in rows_of(setup, seed)]
    columns = (
        "method", "memory", "needed", "fits", "s a step", "devices Wh", "GPU Wh",
        "multiplication over bare GPU's", "energy", "carbon, attributed", "carbon, sunk cost",
    )  # fmt: skip
    yield from paragraphs(
        f"## {setup.name}",
        f"The GPU takes {gpu.time_s / setup.steps:.3g} s a step. Ratios are the GPU's over the "
        "devices': in the central case, lowest to highest, and the combinations of conditions in "
        "which the claim holds, with what all of these have in common.",
        table(columns, (_cells(each) for each in every)),
    )
    best = max((j for j in every if j.row.fits), key=lambda j: (j.energy.central, -j.row.step_s))
    changed = (
        (axis, setting, *map(_ratio, (found.energy, found.attributed, found.sunk_cost)))
        for axis, setting, found in one_by_one(best.row, gpu)
    )
    yield from paragraphs(
        f"One condition at a time, for {best.row.method} with {best.row.offered}:",
        table(("condition", "setting", "energy", "attributed", "sunk cost"), changed),
        f"Device speed from which devices take {ENERGY_CLAIM:g} times less energy. A device here "
        f"has {_tera(setup.flops_per_s)} TFLOP/s, and similar ones "
        f"{' to '.join(map(_tera, setup.measured_flops_per_s))}:",
        table(
            ("method", "TFLOP/s"),
            (
                (method, "never" if (speed := needed_flops_per_s(at, ENERGY_CLAIM)) is None
                 else _tera(speed))
                for method, at in speeds_of(setup, gpu, seed).items()
            ),
        ),
    )  # fmt: skip


def _cells(judged: Judged) -> tuple[str, ...]:
    row = judged.row
    return (
        row.method,
        row.offered,
        f"{row.needed_bytes / 1e9:.3g} GB",
        "yes" if row.fits else "NO",
        f"{row.step_s:.4g}",
        figure(_known(judged.fleet.energy_j) / 3600),
        figure(_known(judged.gpu.energy_j) / 3600),
        figure(judged.compute_over_gpu),
        *map(_held, (judged.energy, judged.attributed, judged.sunk_cost)),
    )


def _held(found: Found) -> str:
    needed = "; ".join(f"{name}: {setting}" for name, setting in found.only_if.items())
    return (
        f"{figure(found.central)} ({figure(found.least)} to {figure(found.most)}), "
        f"{found.held} of {found.tried}" + (f": {needed}" if needed else "")
    )


def _ratio(value: float | None) -> str:
    return "unknown" if value is None else figure(value)


def _tera(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e12:.2g}"


def main() -> None:
    """Run the study; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of every search")
    seed = parser.parse_args().seed
    for setup in published():
        print(*report(setup, seed), sep="\n", flush=True)


if __name__ == "__main__":
    main()
