"""Which method trains sooner on the fleet as it is: stages, tiles, or the PS alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cleave.arrays import DType
from cleave.errors import PlanError
from cleave.fleet.fleet import Fleet
from cleave.fleet.selection import Selector
from cleave.planner.plan import ElementBytes
from cleave.planner.stage_prediction import local_step_s
from cleave.planner.stages import PsCompute, StageModel, StagePlan
from cleave.training.job import Method
from cleave.workload.step import StepGemm


@dataclass(frozen=True, slots=True)
class Prediction:
    """How long a step takes by each method, in seconds; infinite where it cannot be done."""

    stages_s: float
    tiles_s: float
    local_s: float

    @property
    def best(self) -> Method:
        """Return the method with the shortest step; of equal ones the one with least traffic."""
        if self.local_s <= min(self.tiles_s, self.stages_s):
            return Method.LOCAL
        return Method.STAGES if self.stages_s <= self.tiles_s else Method.TILES

    def __str__(self) -> str:
        ways = [
            f"{seconds:.3g} s {how}"
            for seconds, how in (
                (self.stages_s, "by stages"),
                (self.tiles_s, "by tiles"),
                (self.local_s, "on the parameter server alone"),
            )
            if seconds < float("inf")
        ]
        text = " and ".join([", ".join(ways[:-1]), ways[-1]] if len(ways) > 1 else ways)
        return f"a step is predicted to take {text}"


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
        """Return how long a step takes by each method with the devices that are there now.

        Tiles are counted as `--offload auto` sends them: what the PS does sooner stays there.
        """
        return Prediction(plan.step_s, self._tiles_s(), local_step_s(model, self.ps))

    def _tiles_s(self) -> float:
        predicted = predict_without_stages(self.gemms, self.dtype, self.fleet, self.selector)
        return predicted.tiles_s + self.ps.optimizer_s


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
    epoch, devices = fleet.runtime.fleet_rates()
    element = ElementBytes(dtype.itemsize, dtype.itemsize)
    tiles_s = local_s = 0.0
    for gemm in gemms:
        try:
            found = selector.decide(gemm.gemm, element, dtype, devices, epoch)
        except PlanError:
            found = selector.decide(gemm.gemm, element, dtype, [], epoch)
            tiles_s = float("inf")
        tiles_s += gemm.count * min(found.fleet_s, found.ps_s) if devices else float("inf")
        local_s += gemm.count * found.ps_s
    return Prediction(float("inf"), tiles_s, local_s)
