"""Forecast a training step by each method, for `cleave plan` and `cleave doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cleave.errors import PlanError, UsageError
from cleave.fleet.own_device import offered_bytes
from cleave.planner.coding import CodingPolicy
from cleave.planner.forecast import (
    Forecast,
    MethodChoice,
    StepForecaster,
    choose_state,
    refused,
)
from cleave.planner.local_updates import Rounds
from cleave.planner.plan import DeviceRates, ElementBytes, Method, PsRates, StepGemm
from cleave.planner.stages.model import PsCompute, StagePlanner
from cleave.planner.stages.resident import plan_resident
from cleave.planner.stages.search import plan_stages
from cleave.planner.tiles.planner import TilePlanner
from cleave.planner.tiles.report import plan_step
from cleave.workload.registry import ModelSpec
from cleave.workload.stages import Adapters, Bits, StageSizes
from cleave.workload.step import check_rank
from cleave_cli.options import usage_errors
from profiles.fleet_device import FleetDevice
from profiles.fleets import find_fleet
from simulator.sweep import stated_rates


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """The model, batch, fleet and server for which a training step is forecast.

    Attributes:
        dtype: dtype of parameters and activations in messages.
        gemms: GEMMs of a training step, which devices compute by tiles.
        devices: rates for tiles: throughput in `dtype`, and link rates in uncompressed bytes/s.
        in_fp32: rates for stages: fp32 throughput, and actual link rates.
        on_devices: whether stages keep weights and optimizer state on devices.
        rounds: how often, and in which format, local updates exchange weights.
    """

    sizes: StageSizes
    rows: int
    dtype: str
    gemms: tuple[StepGemm, ...]
    planner: TilePlanner
    element: ElementBytes
    devices: list[DeviceRates]
    in_fp32: list[DeviceRates]
    ps: PsCompute
    on_devices: bool = False
    rounds: Rounds = field(default_factory=Rounds)

    def choose(self, method: Method) -> MethodChoice:
        """Forecast a step without devices and by each method that `method` allows; choose one."""
        forecaster = self.sizes.forecaster(self.rows, self.ps)
        forecasts: list[Forecast] = []
        if method in (Method.AUTO, Method.STAGES):
            forecasts.append(self.by_stages(forecaster))
        if method in (Method.AUTO, Method.TILES):
            forecasts.append(self._by_tiles(forecaster))
        if method in (Method.AUTO, Method.DILOCO):
            elements = self.sizes.trained_parameters
            forecasts.append(forecaster.by_local_updates(self.in_fp32, elements, self.rounds))
        forecasts.append(forecaster.alone())
        return MethodChoice(method, forecasts)

    def with_best_state(self) -> tuple[PlanQuestion, str]:
        """Return a copy with the state where steps by stages are faster, and the reason."""
        forecaster = self.sizes.forecaster(self.rows, self.ps)
        there = replace(self, on_devices=True)
        on_devices, why = choose_state(self.by_stages(forecaster), there.by_stages(forecaster))
        return there if on_devices else self, why

    def with_own_device_s(self, found: MethodChoice) -> float | None:
        """Return the step time by stages, in seconds, with this machine as an additional device.

        The result is None if stages are not chosen, or if this device would save too little time.
        """
        stages = found.considered.stages
        if stages is None:
            return None
        forecaster = self.sizes.forecaster(self.rows, self.ps)
        memory_bytes = offered_bytes(forecaster.state_bytes)
        return forecaster.with_own_device(self.in_fp32, stages, memory_bytes, self._planner)

    def by_stages(self, forecaster: StepForecaster) -> Forecast:
        """Forecast a step by stages. If impossible, `Forecast.refused` gives the reason."""
        if self.dtype == "fp16":
            return refused(Method.STAGES, "stages support bf16 and fp32, but not fp16")
        if self.on_devices:
            return forecaster.with_state_on_devices(self.in_fp32)
        try:
            return forecaster.by_stages(self.in_fp32)
        except PlanError as error:
            return refused(Method.STAGES, str(error))

    @property
    def _planner(self) -> StagePlanner:
        return plan_resident if self.on_devices else plan_stages

    def _by_tiles(self, forecaster: StepForecaster) -> Forecast:
        if self.sizes.adapters is not None:
            return refused(Method.TILES, "tiles are planned for whole models, not for adapters")
        card = self.ps.rates or PsRates()
        try:
            step = plan_step(self.planner, self.gemms, self.element, self.devices, card)
        except PlanError as error:
            return refused(Method.TILES, str(error))
        return forecaster.by_tiles(step, self.gemms)


def server_of(sizes: StageSizes, gflops: float, dtype: str, card: PsRates) -> PsCompute:
    """Return the speed of a server with `gflops` GFLOP/s; if 0, measure this machine's speed."""
    if gflops:
        return sizes.server(gflops * 1e9, card)
    from cleave.arrays import DType
    from cleave.fleet.server_speed import measured_server

    spec, trained = sizes.spec, sizes.trained_parameters
    found = measured_server(spec.width, spec.ffn_width, spec.vocabulary, trained, DType(dtype))
    return replace(found, rates=card)


def alone_by_dtype(question: PlanQuestion) -> dict[str, float]:
    """Return the step time in seconds of this machine alone, by dtype (fp32 and bf16)."""
    card, found = question.ps.rates or PsRates(), dict[str, float]()
    for dtype in ("fp32", "bf16"):
        ps = question.ps if dtype == question.dtype else server_of(question.sizes, 0.0, dtype, card)
        found[dtype] = question.sizes.forecaster(question.rows, ps).alone().step_s
    return found


def adapters_of(rank: int, bits: int, spec: ModelSpec) -> Adapters | None:
    """Return the adapters for `--lora` and `--lora-bits`; None to train the whole model."""
    if rank < 0:
        raise UsageError(f"--lora must be a rank, or 0 to train the whole model, not {rank}")
    if bits not in (0, *Bits):
        raise UsageError(f"--lora-bits must be 4 or 8, or 0 for weights in --dtype, not {bits}")
    if bits and not rank:
        raise UsageError(f"--lora-bits is {bits}, but no weights are frozen; add --lora RANK")
    check_rank(spec, rank)
    return Adapters(rank, bits=Bits(bits) if bits else None) if rank else None


def fleet_devices(fleet: str, stragglers: float, dtype: str) -> list[FleetDevice]:
    """Return a fleet's devices, with throughputs in `dtype`.

    `stragglers` is the share of devices that are slowed down.
    """
    with usage_errors():
        return find_fleet(fleet, stragglers, dtype=dtype)


def rates_of(
    devices: Sequence[FleetDevice], policy: CodingPolicy, card: PsRates
) -> list[DeviceRates]:
    """Return the rates of devices, numbered from 0, with compression as `policy` decides."""
    return [policy.decided(one, card, len(devices)) for one in stated_rates(devices)]
