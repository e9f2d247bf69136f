"""Cleave's own methods: training by tiles and by stages.

`cleave` and `cleave-2d`: training by tiles from Cleave's planner, with attention on devices.

The GEMMs of all Linears, including the LM head, run one after another, as in the paper. Each GEMM
takes the time that `cleave plan` predicts. (Actual training runs the two gradient GEMMs of a Linear
concurrently.) Each pass divides a layer's attention into one task per sample and key-value head
(docs/simulation.md). The S x S scores stay on the device. A device downloads the next task while it
computes the current one and uploads the previous result. `TileLosses` models lost devices.

`cleave-stages`: training by stages. Cleave's planner assigns whole layers to devices for a step.

The planner chooses the stages and simulates the step event by event, as for training and `cleave
plan`. Layers run in fp32. The planner decides what computes the loss: the last stage, other devices
(in slices of the vocabulary) or the PS.

When a device is lost, so are its accumulated gradients: on average, the gradients of half of its
micro-batches. The stage's other devices recompute these micro-batches. If the stage has no other
device, another device first downloads the stage's weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cleave.errors import PlanError
from cleave.gemm import Gemm
from cleave.planner.plan import DeviceRates
from cleave.planner.stages.model import PsCompute, StageModel, StagePlan
from cleave.planner.stages.simulation import costs_of
from cleave.planner.tiles.planner import PlanMethod as TileShape
from cleave.planner.tiles.planner import TilePlanner
from cleave.planner.tiles.report import StepReport, plan_step
from cleave.planner.tiles.shape import Floats, RateArrays
from cleave.workload.registry import ModelSpec
from cleave.workload.step import step_gemms
from simulator.method import Conditions, Outcome, Part, TileLosses, impossible


@dataclass(frozen=True, slots=True)
class Tiles:
    """Cleave's training by tiles: devices store no state, and GEMMs run one at a time.

    Attributes:
        shape: whether tiles divide a GEMM in two dimensions (as in the paper) or three.
        fused: True to combine Linears with the same input (such as Q, K and V) into one GEMM.
    """

    name: str
    shape: TileShape
    fused: bool

    def outcomes(self, conditions: Conditions) -> list[Outcome]:
        """Return one outcome. Its `parts` are empty if the planner finds no plan for a GEMM."""
        try:
            return [self._outcome(conditions)]
        except PlanError as error:
            return [impossible(self.name, str(error))]

    def _outcome(self, conditions: Conditions) -> Outcome:
        spec, ps, element = conditions.spec, conditions.ps, conditions.element
        planner = TilePlanner(ps, self.shape)
        gemms = step_gemms(spec, conditions.batch, conditions.seq, self.fused)
        step = plan_step(planner, gemms, element, conditions.devices, ps)
        planned = list(zip(step.reports, step.counts, strict=True))
        head_s = math.fsum(
            r.predicted_s * gemm.count
            for r, gemm in zip(step.reports, gemms, strict=True)
            if gemm.name == "lm_head"
        )

        tasks = [forward_task(spec, conditions.seq, element.sent)]
        tasks.append(backward_task(spec, conditions.seq, element.sent))
        rates = conditions.rates.throttled(ps.egress_bytes_per_s, ps.ingress_bytes_per_s)
        count = conditions.batch * spec.kv_heads  # tasks per layer and pass
        attention = [(task, tasks_s(task, count, rates)) for task in tasks]
        attention_s = spec.layers * math.fsum(seconds for _, seconds in attention)
        down, up, flops = (
            spec.layers * count * sum(getattr(task, name) for task in tasks)
            for name in ("download_bytes", "upload_bytes", "flops")
        )
        attention_bytes = max(2 * task.memory_bytes for task in tasks)
        possible = math.isfinite(attention_s)

        used = {tile.device for r in step.reports for tile in r.plan.tiles}
        for task, seconds in attention:
            places = np.flatnonzero(takers(task, seconds, rates))
            used |= {conditions.devices[int(place)].device for place in places}
        offered = {d.device: d.memory_bytes for d in conditions.devices}
        tightest = max(
            (r.tightest for r in step.reports), key=lambda t: t.memory_bytes / offered[t.device]
        )
        out, in_ = (
            max(getattr(task, f"{way}load_bytes") * count / seconds for task, seconds in attention)
            for way in ("down", "up")
        )
        recovery = _recovery(conditions, planner, step)
        times = [(r.predicted_s, float(n)) for r, n in planned]
        times += [(seconds, float(spec.layers)) for _, seconds in attention]
        again_s = math.fsum(part.seconds for part in recovery)
        return Outcome(
            method=self.name,
            setting="" if possible else "no device has enough memory for attention",
            devices_used=len(used),
            parts=(
                Part("layers' Linears", step.apart_s - head_s),
                Part("LM head", head_s),
                Part("attention", attention_s),
            ),
            download_bytes=(down + sum(r.plan.egress_bytes * n for r, n in planned)) / len(used),
            upload_bytes=(up + step.ingress_bytes) / len(used),
            memory_offered_bytes=float(offered[tightest.device]),
            memory_needed_bytes=max(float(tightest.memory_bytes), attention_bytes),
            misfit="" if possible else f"attention needs {attention_bytes:.3g} bytes",
            ps_egress_bytes_per_s=max(step.peak_egress_bytes_per_s, out),
            ps_ingress_bytes_per_s=max(step.peak_ingress_bytes_per_s, in_),
            recovery=recovery,
            under_losses=TileLosses(tuple(times), len(conditions.devices), again_s)
            if recovery
            else None,
            flops=float(sum(gemm.flops for gemm in gemms)) + flops,
        )


def _recovery(conditions: Conditions, planner: TilePlanner, step: StepReport) -> tuple[Part, ...]:
    """Return the time to recompute the slowest tile on all other devices; empty for one device."""
    tile = max((t for r in step.reports for t in r.plan.tiles), key=lambda t: t.time_s)
    others = [d for d in conditions.devices if d.device != tile.device]
    if not others:
        return ()
    box = tile.tile
    gemm = Gemm(box.m.size, box.n.size, box.k.size)
    part = planner.plan_part(gemm, conditions.element, others)
    return (Part("tile again", part.makespan_s + part.fill_s),)


@dataclass(frozen=True, slots=True)
class AttentionTask:
    """The traffic, FLOPs and memory (including fp32 scores) of one attention task on a device."""

    download_bytes: float
    upload_bytes: float
    flops: float
    memory_bytes: float


def forward_task(spec: ModelSpec, seq: int, element_bytes: int) -> AttentionTask:
    """Return the cost of one attention task of the forward pass.

    The device downloads Q, K and V, and uploads the output O. It computes Q K^T and P V. For S
    tokens and heads of width h, each product takes ``2 S^2 h`` FLOPs per query head.
    """
    queries = spec.heads / spec.kv_heads
    return _task(spec, seq, element_bytes, queries + 2, queries, products=2, scores=1)


def backward_task(spec: ModelSpec, seq: int, element_bytes: int) -> AttentionTask:
    """Return the cost of one attention task of the backward pass.

    The device downloads Q, K, V and dO, and uploads dQ, dK and dV. It recomputes the scores, then
    computes dV, dP, dQ and dK: five matrix multiplications.
    """
    queries = spec.heads / spec.kv_heads
    return _task(spec, seq, element_bytes, 2 * queries + 2, queries + 2, products=5, scores=2)


def _task(
    spec: ModelSpec, seq: int, element: int, down: float, up: float, scores: int, products: int
) -> AttentionTask:
    """Return the cost of a task that downloads `down` matrices and uploads `up` matrices.

    A matrix has `seq` rows and one head's width. The device also stores `scores` fp32 matrices.
    """
    vector = seq * spec.head_width * element
    scores_bytes = scores * 4 * seq * seq
    flops = products * spec.heads / spec.kv_heads * 2 * seq * seq * spec.head_width
    return AttentionTask(down * vector, up * vector, flops, (down + up) * vector + scores_bytes)


def tasks_s(task: AttentionTask, count: int, rates: RateArrays) -> float:
    """Return the minimum time in seconds in which the devices together can finish `count` tasks.

    Only devices with memory for two tasks take part. If no device qualifies, the result is
    infinite. A device finishes its n-th task after ``latency + download + compute + upload + (n -
    1) period`` seconds. The period is the longest of the task's download, compute and upload times.
    """
    period, first = _period_and_first_s(task, rates)
    roomy = 2 * task.memory_bytes <= rates.memory
    period, first = period[roomy], first[roomy]
    if not len(first):
        return float("inf")
    low, high = 0.0, float((first + count * period).min())
    for _ in range(100):
        middle = (low + high) / 2
        done = np.floor(np.maximum(0.0, middle - first) / period) + (middle >= first)
        low, high = (low, middle) if done.sum() >= count else (middle, high)
        if high - low <= 1e-9 * high:
            break
    return high


def takers(task: AttentionTask, seconds: float, rates: RateArrays) -> npt.NDArray[np.bool_]:
    """Return a mask of the devices that can finish at least one task within `seconds`."""
    roomy = 2 * task.memory_bytes <= rates.memory
    found: npt.NDArray[np.bool_] = roomy & (_period_and_first_s(task, rates)[1] <= seconds)
    return found


def _period_and_first_s(task: AttentionTask, rates: RateArrays) -> tuple[Floats, Floats]:
    """Return two arrays in seconds: each device's time per task and time to its first result."""
    stages = np.stack(
        (
            task.download_bytes / rates.downlink,
            task.flops / rates.flops,
            task.upload_bytes / rates.uplink,
        )
    )
    return stages.max(axis=0), stages.sum(axis=0) + rates.latency_s


class Stages:
    """Cleave's training by stages. Devices exchange data only with the PS."""

    name = "cleave-stages"

    def outcomes(self, conditions: Conditions) -> list[Outcome]:
        """Return one outcome: the planner's fastest plan, or the reason why no plan exists."""
        whole, devices = conditions.stage_sizes, conditions.graph_devices
        ps = PsCompute(conditions.ps_flops_per_s, 0.0, conditions.ps)
        try:
            found = whole.forecaster(conditions.batch, ps).by_stages(devices)
        except PlanError as error:
            return [impossible(self.name, str(error))]
        assert found.stages is not None
        model, plan = found.stages
        by_id = {device.device: device for device in devices}
        used = len(plan.memory_bytes)
        tightest = max(
            plan.memory_bytes, key=lambda d: plan.memory_bytes[d] / by_id[d].memory_bytes
        )
        lost = list(recoveries(model, plan, by_id))
        weights_s, again_s = (math.fsum(part) / len(lost) for part in zip(*lost, strict=True))
        flops = math.fsum(c.flops for stage in plan.planned for c in costs_of(model, stage))
        return [
            Outcome(
                method=self.name,
                setting=f"{len(plan.stages)} stages, {len(model.tokens)} micro-batches, "
                f"loss {plan.where_loss}",
                devices_used=used,
                parts=(Part("stages", plan.step_s),),
                download_bytes=plan.downlink_bytes / used,
                upload_bytes=plan.uplink_bytes / used,
                memory_offered_bytes=float(by_id[tightest].memory_bytes),
                memory_needed_bytes=plan.memory_bytes[tightest],
                ps_egress_bytes_per_s=plan.downlink_bytes / plan.step_s,
                ps_ingress_bytes_per_s=plan.uplink_bytes / plan.step_s,
                recovery=(Part("weights", weights_s), Part("micro-batches again", again_s)),
                flops=sum(model.tokens) * flops,  # including the recomputed forward pass
            )
        ]


def recoveries(
    model: StageModel, plan: StagePlan, devices: Mapping[int, DeviceRates]
) -> Iterator[tuple[float, float]]:
    """Yield the two parts of the recovery time after a loss, for each device of each stage.

    The parts, in seconds, are the time to download the stage's weights (0 if the stage has other
    devices) and the time to recompute the lost micro-batches.
    """
    tokens, ratio = sum(model.tokens), model.coded_ratio
    activation = model.width * model.element_bytes
    for stage in plan.planned:
        costs, count = costs_of(model, stage), len(stage.devices)
        flops = math.fsum(cost.flops for cost in costs)
        weights = sum(cost.weight_bytes + cost.frozen_bytes for cost in costs)
        # Tokens to recompute on each remaining device of the stage.
        again = tokens / (2 * count * max(1, count - 1))
        for number in stage.devices:
            device = devices[number]
            again_s = again * max(
                flops / device.flops_per_s,
                2 * device.down_bytes(activation, ratio) / device.downlink_bytes_per_s,
                device.up_bytes(activation, ratio) / device.uplink_bytes_per_s,
            )
            loaded_s = device.down_bytes(weights, ratio) / device.downlink_bytes_per_s
            yield loaded_s if count == 1 else 0.0, again_s
