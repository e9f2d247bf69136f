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
from cleave.training.job import JobSpec
from cleave.training.lora import LoraSpec
from cleave.workload.registry import ModelSpec
from cleave.workload.step import GemmKind, StepGemm, step_gemms


def tile_gemms(job: JobSpec, spec: ModelSpec) -> list[StepGemm]:
    """Return the GEMMs of a job's step by tiles; frozen weights have no gradients.

    Quantized weights never go by tiles.
    """
    found = step_gemms(spec, job.batch * job.accumulate, job.seq)
    if not job.lora:
        return list(found)
    products = [g for g in found if g.kind is not GemmKind.WEIGHT_GRADIENT]
    return [g for g in products if g.name == "lm_head" or not LoraSpec.of(job.lora).bits]


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
        times = _counted_times(self.gemms, self.dtype, self.fleet, self.selector)
        if any(each.fleet_s == float("inf") for each in times):
            return float("inf")
        return tiles_step_s(local_s, times)


def predict_without_stages(
    gemms: Sequence[StepGemm], dtype: DType, fleet: Fleet, selector: Selector
) -> Prediction:
    """Return how long the multiplications of a step take, where no device can train whole layers.

    Args:
        gemms: of a step.
        dtype: of the multiplications.
        fleet: whose devices are asked about.
        selector: predicts GEMMs on the fleet and here.
    """
    times = _counted_times(gemms, dtype, fleet, selector)
    local_s = sum(each.count * each.ps_s for each in times)
    if any(each.fleet_s == float("inf") for each in times):
        return Prediction(float("inf"), float("inf"), local_s)
    return Prediction(float("inf"), tiles_step_s(local_s, times), local_s)


def _counted_times(
    gemms: Sequence[StepGemm], dtype: DType, fleet: Fleet, selector: Selector
) -> list[CountedTimes]:
    """Return how long each GEMM takes; infinitely long where no device can do it."""
    epoch, devices = fleet.runtime.fleet_rates()
    element = ElementBytes(dtype.itemsize, dtype.itemsize)
    found = []
    for gemm in gemms:
        try:
            decided = selector.decide(gemm.gemm, element, dtype, devices, epoch)
        except PlanError:
            decided = selector.decide(gemm.gemm, element, dtype, [], epoch)
        found.append(CountedTimes(decided.fleet_s, decided.ps_s, gemm.count))
    return found
