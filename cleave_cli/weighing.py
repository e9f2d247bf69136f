"""What `cleave plan` asks the planner: what each method takes for a model, a batch and a fleet."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cleave.errors import PlanError, UsageError
from cleave.planner.alternatives import Alternative, Batch, Comparison, refused
from cleave.planner.coding import CodingPolicy
from cleave.planner.methods import Method
from cleave.planner.plan import DeviceRates, ElementBytes, PsRates
from cleave.planner.planner import TilePlanner
from cleave.planner.report import StepReport, plan_step
from cleave.planner.stage_search import plan_stages, plan_stages_within
from cleave.planner.stages import PsCompute, StageModel, StagePlan
from cleave.workload.quantization import Bits
from cleave.workload.stages import Adapters, StageSizes, cut_batch, kept_elements
from cleave.workload.step import StepGemm
from profiles.fleet_device import FleetDevice
from profiles.fleets import find_fleet


@dataclass(frozen=True, slots=True)
class Found:
    """What was found.

    Attributes:
        comparison: the methods side by side.
        step: the plans of tiles, if they were weighed and possible.
        stages: the batch as it is cut and the plan of stages, if they were.
    """

    comparison: Comparison
    step: StepReport | None
    stages: tuple[StageModel, StagePlan] | None


@dataclass(frozen=True, slots=True)
class Weighing:
    """What is asked about: a model, a batch, a fleet and a server.

    Attributes:
        sizes: of the model.
        rows: sequences of the batch.
        dtype: in which parameters and activations travel.
        gemms, planner, element: of tiles.
        devices, in_fp32: the fleet, with its throughput in `dtype`, and in fp32, in which layers by
            stages are computed.
        ps: the server.
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

    def batch(self, rows: int) -> Batch:
        """Return a batch of so many sequences."""
        sizes, spec = self.sizes, self.sizes.spec
        in_parts = replace(sizes, in_parts=True)
        return Batch(
            lambda parts: sizes.costs(cut_batch(rows, sizes.sequence, parts)),
            rows,
            sizes.state_bytes,
            spec.layers * kept_elements(spec) * self.element.sent,
            lambda parts: in_parts.costs(cut_batch(rows, sizes.sequence, parts)),
        )

    def compare(self, method: Method) -> Found:
        """Weigh the methods: all of them, or one and the server alone."""
        batch, step, stages = self.batch(self.rows), None, None
        alternatives: list[Alternative] = []
        if method in (Method.AUTO, Method.STAGES):
            one, stages = self.by_stages(batch)
            alternatives.append(one)
        if method in (Method.AUTO, Method.TILES):
            one, step = self._by_tiles(batch)
            alternatives.append(one)
        alternatives.append(batch.by_ps(self.ps))
        return Found(Comparison(alternatives, method), step, stages)

    def by_stages(self, batch: Batch) -> tuple[Alternative, tuple[StageModel, StagePlan] | None]:
        """Return what stages take, and their plan if there is one."""
        if self.dtype == "fp16":
            return refused(Method.STAGES, "stages travel in bf16 or fp32, not in fp16"), None
        try:
            found, model, plan = batch.by_stages(
                plan_stages, self.in_fp32, self.ps, plan_stages_within
            )
        except PlanError as error:
            return refused(Method.STAGES, str(error)), None
        return found, (model, plan)

    def _by_tiles(self, batch: Batch) -> tuple[Alternative, StepReport | None]:
        if self.sizes.adapters is not None:
            reason = "tiles are planned for whole models, not for adapters"
            return refused(Method.TILES, reason), None
        card = self.ps.rates or PsRates()
        try:
            step = plan_step(self.planner, self.gemms, self.element, self.devices, card)
        except PlanError as error:
            return refused(Method.TILES, str(error)), None
        return batch.by_tiles(step, self.gemms, self.ps), step


def server_flops_per_s(gflops: float, dtype: str) -> float:
    """Return the speed of the server alone, measured on this machine where none is given.

    Args:
        gflops: as `--ps-gflops` says; 0 for none.
        dtype: of the products that are measured.
    """
    if gflops:
        return gflops * 1e9
    from cleave.arrays import DType
    from cleave.fleet.selection import measure_ps
    from cleave.machine.backends import backend_named

    backend = backend_named("torch" if importlib.util.find_spec("torch") else "numpy")
    return measure_ps(backend, DType(dtype), time.perf_counter).flops_per_s


def adapters_of(rank: int, bits: int) -> Adapters | None:
    """Return the adapters that `--lora` and `--lora-bits` ask for; None for the whole model.

    Raises:
        UsageError: when there are no such adapters.
    """
    if rank < 0:
        raise UsageError(f"--lora is {rank}; give a rank, or 0 to train the whole model")
    if bits not in (0, *Bits):
        raise UsageError(f"--lora-bits is {bits}; give 4 or 8, or 0 for weights in --dtype")
    if bits and not rank:
        raise UsageError(f"--lora-bits is {bits}, and no weight is frozen; add --lora RANK")
    return Adapters(rank, bits=Bits(bits) if bits else None) if rank else None


def fleet_devices(fleet: str, stragglers: float, dtype: str) -> list[FleetDevice]:
    """Return the devices of a fleet, with their throughput in a dtype.

    Raises:
        UsageError: when there is no such fleet.
    """
    try:
        return find_fleet(fleet, stragglers, dtype=dtype)
    except ValueError as error:
        raise UsageError(str(error)) from None


def rates_of(
    devices: Sequence[FleetDevice], policy: CodingPolicy, card: PsRates
) -> list[DeviceRates]:
    """Return the stated rates of devices, numbered, and which of them code payloads."""
    rates = (
        DeviceRates(
            number,
            device.stated_downlink_bytes_per_s,
            device.stated_uplink_bytes_per_s,
            device.stated_flops_per_s,
            device.latency_s,
            device.memory_bytes,
            graph_flops_per_s=device.stated_graph_flops_per_s,
        )
        for number, device in enumerate(devices)
    )
    return [policy.decided(one, card, len(devices)) for one in rates]
