"""Which method trains sooner on the fleet as it is: stages, tiles, or the PS alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cleave.arrays import DType
from cleave.errors import PlanError
from cleave.fleet.fleet import Fleet
from cleave.fleet.selection import Selector
from cleave.planner.methods import CountedTimes, Prediction, tiles_step_s
from cleave.planner.plan import ElementBytes
from cleave.planner.stage_prediction import local_step_s
from cleave.planner.stages import PsCompute, StageModel, StagePlan
from cleave.workload.step import StepGemm


@dataclass(frozen=True, slots=True)
class MethodChoice:
    """Compares the methods for one model and batch.

    Attributes:
        gemms: of a step, for tiles.
        dtype: of the multiplications.
        fleet: whose devices are asked about.
        selector: predicts GEMMs on the fleet and here.
        ps: what the PS can do itself.
    """

    gemms: Sequence[StepGemm]
    dtype: DType
    fleet: Fleet
    selector: Selector
    ps: PsCompute

    def predict(self, model: StageModel, plan: StagePlan) -> Prediction:
        """Return how long a step takes by each method with the devices that are there now."""
        local_s = local_step_s(model, self.ps)
        return Prediction(plan.step_s, self._tiles_s(local_s), local_s)

    def _tiles_s(self, local_s: float) -> float:
        epoch, devices = self.fleet.runtime.fleet_rates()
        element = ElementBytes(self.dtype.itemsize, self.dtype.itemsize)
        times = []
        for gemm in self.gemms:
            try:
                found = self.selector.decide(gemm.gemm, element, self.dtype, devices, epoch)
            except PlanError:
                return float("inf")
            times.append(CountedTimes(found.fleet_s, found.ps_s, gemm.count))
        return tiles_step_s(local_s, times)
