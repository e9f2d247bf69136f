"""Energy and carbon ratios of the study's rows under given conditions."""

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
    """Computes the ratios of the GPU's energy and carbon to the devices' energy and carbon.

    Values that device profiles lack are replaced by typical figures.

    Attributes:
        typical: figures that replace missing values.
        of_energy, of_carbon: all combinations of conditions for claims about energy and about
            carbon, each with its settings and state. The first combination is the central case.
        middle: state of the central case.
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
        """Return the comparison of a row's devices with the GPU, before ratios are computed.

        Args:
            row: set-up and method whose devices are compared.
            gpu: the same training steps on the GPU.
            state: assumptions, and training speeds as shares of multiplication speed.
            typical: figures that replace values missing in profiles; None means `self.typical`.
            card: profile of the GPU; None means the profile in `gpu`.
            ps: energy of the parameter server; None means that it does not count.
        """
        cloud = gpu.at(state.gpu_share)
        cloud = replace(cloud, profile=card or cloud.profile)
        usages = [row.spell_at(state.device_share)]
        return ComparisonQuestion(usages, self._profiles, typical or self.typical, ps, cloud)

    def ratios(self, row: StudyRow, gpu: GpuRun, state: ConditionState) -> Ratios:
        """Return the ratios of the GPU's energy and carbon to those of a row's devices.

        Args:
            row: set-up and method whose devices are compared.
            gpu: the same training steps on the GPU.
            state: assumptions, and training speeds as shares of multiplication speed.
        """
        return self.question(row, gpu, state).ratios(state.case)


def start() -> ConditionState:
    """Return Cleave's default assumptions with the median country's carbon intensity."""
    middle = grids()[1]
    return ConditionState(Case(load_assumptions(), middle, middle))
