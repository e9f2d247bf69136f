"""Run the study: simulate all set-ups and methods, test claims, and analyse sensitivity."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from cleave.energy.account import DeviceUsage, Footprint, cloud_footprint
from cleave.energy.comparison import Ratios
from simulator.study.conditions import (
    CARBON_CLAIM,
    ENERGY_CLAIM,
    ConditionState,
    Found,
    Settings,
    carbon_axes,
    energy_axes,
    held_against,
)
from simulator.study.dependence import (
    Accountant,
    Changed,
    Dependence,
    dependences,
    in_use,
    one_by_one,
)
from simulator.study.rows import GpuRun, StudyRow, gpu_run, rows_of, simulated
from simulator.study.setups import Setup, SetupScope
from simulator.workers import Processes, Workers

SWEPT: Final = ("dtfm-all", "dtfm", "cleave", "cleave-stages")
_SHOWN: Final = ("alone", "dtfm-all (pipelined)", "dtfm (pipelined)", "cleave", "cleave-stages")


@dataclass(frozen=True, slots=True)
class StudyJudgement:
    """The energy, carbon and claim tests of a row, which do not depend on the row's memory.

    Attributes:
        fleet, gpu: energy and carbon of the devices and of the GPU in the central case.
        ratios: ratios of the GPU to the devices in the central case.
        energy: test of the energy claim under all combinations of conditions.
        attributed, sunk_cost: tests of the carbon claim, with and without the devices' embodied
            carbon.
        compute_over_gpu: energy of multiplication on the devices divided by that of the bare GPU.
    """

    fleet: Footprint
    gpu: Footprint
    ratios: Ratios
    energy: Found
    attributed: Found
    sunk_cost: Found
    compute_over_gpu: float


@dataclass(frozen=True, slots=True)
class Judged:
    """A row of the study, with its energy, carbon and claim tests."""

    row: StudyRow
    found: StudyJudgement


@dataclass(frozen=True, slots=True)
class SetupStudy:
    """The results for a set-up.

    Attributes:
        rows: results for each method and memory offer.
        speeds: maps each method that fits to pairs of device throughput (FLOP/s) and energy ratio
            in the central case. The power of a device does not depend on its throughput.
        best: row with the highest energy ratio of all rows that fit in memory.
        changed: ratios of the best row with one condition at a time set to each of its settings.
        dependences: sensitivity of the best row's ratios to each assumption.
        in_use: carbon ratios of the best row for several lifetimes and utilisations.
    """

    setup: Setup
    gpu: GpuRun
    rows: tuple[Judged, ...]
    speeds: Mapping[str, Sequence[tuple[float, float]]]
    best: Judged
    changed: tuple[Changed, ...]
    dependences: tuple[Dependence, ...]
    in_use: Mapping[float, Sequence[float]]

    def published(self) -> list[Judged]:
        """Return the rows of the paper's methods that fit: one device, or DT-FM on all devices."""
        ours = ("alone", "dtfm-all")
        return [j for j in self.rows if j.row.fits and j.row.method.startswith(ours)]

    def by(self, method: str) -> list[Judged]:
        """Return the rows of a method that fit in memory."""
        return [j for j in self.rows if j.row.fits and j.row.method == method]


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the study: energy ratios at `speed`, or all other results if `speed` is None."""

    accountant: Accountant
    setup: Setup
    seed: int
    speed: float | None

    @property
    def name(self) -> str:
        faster = "" if self.speed is None else f", {self.speed:g}x"
        return f"{self.setup.name}{faster}"

    def found(self) -> SetupStudy | list[tuple[str, float]]:
        """Return a set-up's study without `speeds`, or (method, energy ratio) pairs at `speed`."""
        accountant, gpu = self.accountant, gpu_run(self.setup)
        if self.speed is None:
            return _setup_study(accountant, self.setup, gpu, self.seed)
        rows = simulated(self.setup, self.setup.offers[0], self.seed, self.speed, SWEPT)
        ratios = ((row, accountant.ratios(row, gpu, accountant.middle).energy) for row in rows)
        return [
            (row.method, ratio)
            for row, ratio in ratios
            if row.method in _SHOWN and ratio is not None and row.fits
        ]


def steps_of(scope: SetupScope) -> int:
    """Return how many times `study` calls `done` for a scope."""
    return len(scope.setups) * (1 + len(scope.speeds))


def study(
    scope: SetupScope,
    seed: int,
    workers: Workers | None = None,
    done: Callable[[str], object] = lambda what: None,
) -> list[SetupStudy]:
    """Simulate all set-ups, test the claims, and return the results for each set-up.

    Args:
        seed: random seed of the methods' searches.
        workers: workers that compute the parts of the study; None means this process.
        done: called with the name of each finished part (`steps_of` times).
    """
    workers, accountant = workers or Processes(), Accountant()
    parts = [
        _Part(accountant, setup, seed, speed)
        for speed in (None, *scope.speeds)  # None comes first, because it takes longest
        for setup in reversed(scope.setups)
    ]
    studies: dict[str, SetupStudy] = {}
    ratios: dict[tuple[str, float], list[tuple[str, float]]] = {}
    for index, found in workers.run(_Part.found, parts):
        part = parts[index]
        if isinstance(found, SetupStudy):
            studies[part.setup.name] = found
        elif part.speed is not None:
            ratios[part.setup.name, part.speed] = found
        done(part.name)
    return [
        replace(studies[setup.name], speeds=_curves(setup, scope.speeds, ratios))
        for setup in scope.setups
    ]


def _curves(
    setup: Setup,
    speeds: Sequence[float],
    ratios: Mapping[tuple[str, float], Sequence[tuple[str, float]]],
) -> Mapping[str, Sequence[tuple[float, float]]]:
    curves: dict[str, list[tuple[float, float]]] = {}
    for speed in speeds:
        for method, ratio in ratios[setup.name, speed]:
            curves.setdefault(method, []).append((setup.flops_per_s * speed, ratio))
    return curves


def _setup_study(accountant: Accountant, setup: Setup, gpu: GpuRun, seed: int) -> SetupStudy:
    judgements: dict[tuple[DeviceUsage, ...], StudyJudgement] = {}
    rows = []
    for row in rows_of(setup, seed):
        usages = (row.usage, *row.other_usages.values())
        if usages not in judgements:
            judgements[usages] = judged(accountant, row, gpu)
        rows.append(Judged(row, judgements[usages]))
    best = max(
        (j for j in rows if j.row.fits), key=lambda j: (j.found.energy.central, -j.row.step_s)
    )
    return SetupStudy(
        setup,
        gpu,
        tuple(rows),
        {},
        best,
        tuple(one_by_one(accountant, best.row, gpu)),
        tuple(dependences(accountant, best.row, gpu, seed)),
        in_use(accountant, best.row, gpu),
    )


def judged(accountant: Accountant, row: StudyRow, gpu: GpuRun) -> StudyJudgement:
    """Test the energy and carbon claims for a row under all combinations of conditions.

    Raises:
        ValueError: if the power or the embodied carbon of a device or of the GPU is unknown.
    """
    middle = accountant.middle
    case, cloud = middle.case, gpu.at(middle.gpu_share)
    fleet = accountant.question(row, gpu, middle).fleet(case)
    there = cloud_footprint(cloud, case.assumptions, case.cloud_gco2e_per_kwh)
    energy = energy_axes()
    every = (*energy, *carbon_axes())

    def tried(states: Sequence[tuple[Settings, ConditionState]]) -> list[tuple[Settings, Ratios]]:
        return [(settings, accountant.ratios(row, gpu, state)) for settings, state in states]

    of_energy, of_carbon = tried(accountant.of_energy), tried(accountant.of_carbon)
    return StudyJudgement(
        fleet,
        there,
        accountant.ratios(row, gpu, middle),
        held_against(energy, [(s, _known(r.energy)) for s, r in of_energy], ENERGY_CLAIM[0]),
        held_against(every, [(s, _known(r.attributed)) for s, r in of_carbon], CARBON_CLAIM[0]),
        held_against(every, [(s, _known(r.sunk_cost)) for s, r in of_carbon], CARBON_CLAIM[0]),
        _known(fleet.parts[0].energy_j) / _known(there.parts[0].energy_j),
    )


def _known(value: float | None) -> float:
    if value is None:
        raise ValueError("the power or the making of a device of the study is unknown")
    return value


def needed_flops_per_s(points: Sequence[tuple[float, float]], ratio: float) -> float | None:
    """Return the lowest device speed at which the energy ratio reaches `ratio`.

    Between two points, the logarithms are interpolated linearly. If the ratio is 1 at 1 TFLOP/s and
    4 at 4 TFLOP/s, then it is 2 at 2 TFLOP/s:

        >>> round(needed_flops_per_s([(1e12, 1.0), (4e12, 4.0)], 2.0) / 1e12, 6)
        2.0

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
