"""Ratios of the study's rows under given conditions."""

from __future__ import annotations

from dataclasses import replace

from cleave.energy.account import Ps
from cleave.energy.assumptions import load_assumptions
from cleave.energy.comparison import ComparisonQuestion, Ratios
from cleave.energy.sensitivity import Case
from cleave.energy.typical import Typical, load_typical
from profiles.device_profile import DeviceProfile
from profiles.library import load_profiles
from simulator.study.conditions import ConditionState, carbon_axes, combinations, energy_axes, grids
from simulator.study.rows import GpuRun, StudyRow


class Accountant:
    """Computes ratios of rows, with typical figures for values that device profiles lack.

    Attributes:
        of_energy, of_carbon: all combinations of a claim's conditions, the central case first.
        middle: the central case.
    """

    def __init__(self) -> None:
        self._profiles = load_profiles()
        self.typical = load_typical()
        every = (*energy_axes(), *carbon_axes())
        self.of_energy = list(combinations(energy_axes(), start()))
        self.of_carbon = list(combinations(every, start()))
        self.middle = self.of_carbon[0][1]

    def question(
        self,
        row: StudyRow,
        gpu: GpuRun,
        state: ConditionState,
        *,
        typical: Typical | None = None,
        card: DeviceProfile | None = None,
        ps: Ps | None = None,
    ) -> ComparisonQuestion:
        """Return the comparison of a row with the GPU in a state.

        Args:
            typical: figures for values that profiles lack; None means the usual ones.
            card: profile of the GPU; None means its own.
            ps: the parameter server's energy; not counted if None.
        """
        cloud = gpu.at(state.gpu_share)
        cloud = replace(cloud, profile=card or cloud.profile)
        usages = [row.spell_at(state.device_share)]
        return ComparisonQuestion(usages, self._profiles, typical or self.typical, ps, cloud)

    def ratios(self, row: StudyRow, gpu: GpuRun, state: ConditionState) -> Ratios:
        """Return the ratios of a row in a state."""
        return self.question(row, gpu, state).ratios(state.case)


def start() -> ConditionState:
    """Return Cleave's own assumptions, with the electricity of the median country."""
    middle = grids()[1]
    return ConditionState(Case(load_assumptions(), middle, middle))
