"""Predict how long a job's steps take by tiles on the connected devices, or on the PS alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cleave.arrays import DType
from cleave.errors import PlanError
from cleave.fleet.fleet import Fleet
from cleave.planner.coding import payload_rates
from cleave.planner.forecast import Forecast, MethodChoice, StepForecaster, refused
from cleave.planner.plan import ElementBytes, GemmKind, Method, PsRates, StepGemm
from cleave.planner.stages.model import PsCompute
from cleave.planner.tiles.report import plan_step
from cleave.training.loop.job import JobSpec
from cleave.training.loop.ps_memory import sizes_of
from cleave.workload.registry import ModelSpec
from cleave.workload.step import step_gemms


def tile_gemms(job: JobSpec, spec: ModelSpec) -> list[StepGemm]:
    """Return the matrix multiplications (GEMMs) of a step that can be computed by tiles.

    Weight gradients are omitted if the job trains adapters, because the weights are frozen. GEMMs
    with quantized weights are omitted, because tiles do not support them.
    """
    found = step_gemms(spec, job.batch * job.accumulate, job.seq)
    if not job.lora:
        return list(found)
    products = [g for g in found if g.kind is not GemmKind.WEIGHT_GRADIENT]
    return [g for g in products if g.name == "lm_head" or not job.quantized]


@dataclass(frozen=True, slots=True)
class TilesForecaster:
    """Forecasts a step that computes `gemms` by tiles on the connected devices."""

    gemms: Sequence[StepGemm]
    dtype: DType
    fleet: Fleet

    def forecast(self, forecaster: StepForecaster) -> Forecast:
        """Return the forecast of a step by tiles, or a refusal if the step cannot be planned."""
        _, devices = self.fleet.runtime.fleet_rates()
        able = [device for device in devices if self.dtype.value in device.dtypes]
        if not able:
            return refused(Method.TILES, "no device is connected")
        element = ElementBytes(self.dtype.itemsize, self.dtype.itemsize)
        card = forecaster.ps.rates or PsRates()
        rates = payload_rates(able, self.dtype.value)
        try:
            step = plan_step(self.fleet.planner, self.gemms, element, rates, card)
        except PlanError as error:
            return refused(Method.TILES, str(error))
        return forecaster.by_tiles(step, self.gemms)


def choose_without_stages(
    job: JobSpec, spec: ModelSpec, tiles: TilesForecaster, ps: PsCompute
) -> MethodChoice:
    """Choose between tiles and the PS alone for a job that cannot train by stages."""
    sizes = sizes_of(job, spec)
    forecaster = sizes.forecaster(job.batch * job.accumulate, ps)
    return MethodChoice(Method.AUTO, [tiles.forecast(forecaster), forecaster.alone()])
