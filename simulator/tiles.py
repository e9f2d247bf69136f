"""`cleave` and `cleave-2d`: Linears as tiles from Cleave's planner, and attention as tasks.

The GEMMs of all Linears, including the LM head, run one after another, as in the paper. The
duration of a GEMM is the prediction of `cleave plan`. (Actual training runs the two gradient GEMMs
of a Linear concurrently.) The attention of a layer is divided into tasks (`attention`), once in the
forward and once in the backward pass.

When a device is lost, the other devices recompute its current tile. This delays the tile's GEMM
once, even if several devices are lost during the GEMM. With n devices, each of which is lost at the
rate lambda, the average duration of a step is

    T = sum over GEMMs and attentions of  t + (1 - exp(-n lambda t)) (detection + tile again)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cleave.errors import PlanError
from cleave.gemm import Gemm
from cleave.planner.tiles.planner import PlanMethod as TileShape
from cleave.planner.tiles.planner import TilePlanner
from cleave.planner.tiles.report import StepReport, plan_step
from cleave.planner.tiles.shape import Floats, RateArrays
from cleave.workload.registry import ModelSpec
from cleave.workload.step import StepGemm, step_gemms
from simulator.method import Conditions, Outcome, Part, impossible


@dataclass(frozen=True, slots=True)
class Tiles:
    """Cleave's method of training by tiles: devices hold no state, and GEMMs run one at a time.

    Attributes:
        name: name of the method.
        shape: whether tiles cut a GEMM in two dimensions (as in the paper) or three.
        fused: True to combine Linears with the same input (such as Q, K and V) into one GEMM.
    """

    name: str
    shape: TileShape
    fused: bool

    def outcomes(self, conditions: Conditions) -> list[Outcome]:
        """Return one outcome, which has no parts if the planner finds no plan for a GEMM."""
        try:
            planner = TilePlanner(conditions.ps, self.shape)
            step = TiledStep.of(conditions, planner, fused=self.fused)
        except PlanError as error:
            return [impossible(self.name, str(error))]
        return [tiled_outcome(self.name, step)]


class Share(NamedTuple):
    """The cost of a part of a step: its duration, and the total traffic of all devices."""

    seconds: float
    download_bytes: float
    upload_bytes: float

    def times(self, count: float) -> Share:
        """Return the cost of running this part `count` times in sequence."""
        return Share(*(count * value for value in self))


@dataclass(frozen=True, slots=True)
class TileLosses:
    """The module's formula for the average duration of a step while devices are lost.

    Attributes:
        times: for each GEMM and each attention, its seconds and its number of runs per step.
        devices: number n of devices.
        again_s: seconds to recompute a lost tile.
    """

    times: tuple[tuple[float, float], ...]
    devices: int
    again_s: float

    def with_losses_s(self, losses_per_s: float, detection_s: float) -> float:
        """Return the average seconds of a step.

        Args:
            losses_per_s: rate lambda at which each single device is lost.
            detection_s: seconds from the loss of a device until the loss is detected.
        """
        rate, delay_s = self.devices * losses_per_s, detection_s + self.again_s
        return math.fsum(n * (t - math.expm1(-rate * t) * delay_s) for t, n in self.times)


@dataclass(frozen=True)
class TiledStep:
    """A planned training step by tiles: the GEMMs of all Linears, and the attention tasks.

    Attributes:
        conditions: model, batch and fleet.
        planner: planner that divides GEMMs into tiles.
        gemms: GEMMs of all Linears. A GEMM that runs several times is listed once with its count.
        report: plan of each GEMM.
        attention: cost of the attention of one layer in the forward and in the backward pass.
    """

    conditions: Conditions
    planner: TilePlanner
    gemms: tuple[StepGemm, ...]
    report: StepReport
    attention: tuple[Share, ...]

    @classmethod
    def of(cls, conditions: Conditions, planner: TilePlanner, *, fused: bool) -> TiledStep:
        """Plan the GEMMs and attention tasks of a step.

        Args:
            conditions: model, batch and fleet.
            planner: planner that divides GEMMs into tiles.
            fused: True to combine Linears with the same input into one GEMM.

        Raises:
            PlanError: when a GEMM of the step has no plan on these devices.
        """
        spec, ps = conditions.spec, conditions.ps
        gemms = step_gemms(spec, conditions.batch, conditions.seq, fused)
        report = plan_step(planner, gemms, conditions.element, conditions.devices, ps)
        behind = conditions.rates.throttled(ps.egress_bytes_per_s, ps.ingress_bytes_per_s)
        count = conditions.batch * spec.kv_heads
        attention = tuple(
            Share(tasks_s(t, count, behind), count * t.download_bytes, count * t.upload_bytes)
            for t in _tasks(conditions)
        )
        return cls(conditions, planner, gemms, report, attention)

    def linears(self, wanted: Callable[[StepGemm], bool]) -> Share:
        """Return the total cost of all GEMMs for which `wanted` returns True."""
        shares = [
            (
                gemm.count * of.predicted_s,
                float(gemm.count * of.plan.egress_bytes),
                float(gemm.count * of.plan.ingress_bytes),
            )
            for gemm, of in zip(self.gemms, self.report.reports, strict=True)
            if wanted(gemm)
        ]
        return Share(*(math.fsum(column) for column in zip(*shares, strict=True)))

    @property
    def losses(self) -> TileLosses:
        """Return the model of the step's average duration while devices are lost."""
        layers = self.conditions.spec.layers
        times = [
            (of.predicted_s, float(gemm.count))
            for gemm, of in zip(self.gemms, self.report.reports, strict=True)
        ]
        times += [(each.seconds, float(layers)) for each in self.attention]
        again_s = math.fsum(part.seconds for part in self.recovery)
        return TileLosses(tuple(times), len(self.conditions.devices), again_s)

    @cached_property
    def devices_used(self) -> int:
        """Return the number of devices that run at least one tile or attention task."""
        conditions, ps = self.conditions, self.conditions.ps
        used = {tile.device for of in self.report.reports for tile in of.plan.tiles}
        behind = conditions.rates.throttled(ps.egress_bytes_per_s, ps.ingress_bytes_per_s)
        for task, share in zip(_tasks(conditions), self.attention, strict=True):
            places = np.flatnonzero(takers(task, share.seconds, behind))
            used |= {conditions.devices[int(place)].device for place in places}
        return len(used)

    @property
    def flops(self) -> float:
        """Return the FLOPs of all devices in the step, including recomputed attention scores."""
        spec = self.conditions.spec
        tasks = sum(task.flops for task in _tasks(self.conditions))
        attention = spec.layers * self.conditions.batch * spec.kv_heads * tasks
        return float(sum(gemm.flops for gemm in self.gemms)) + attention

    @property
    def attention_bytes(self) -> float:
        """Return the bytes of two attention tasks, which a device must hold at the same time."""
        return max(2 * task.memory_bytes for task in _tasks(self.conditions))

    @property
    def peaks_bytes_per_s(self) -> tuple[float, float]:
        """Return the PS's egress and ingress in bytes/s, each in the busiest part of the step."""
        out = [task.download_bytes / task.seconds for task in self.attention]
        in_ = [task.upload_bytes / task.seconds for task in self.attention]
        report = self.report
        return (
            max(report.peak_egress_bytes_per_s, *out),
            max(report.peak_ingress_bytes_per_s, *in_),
        )

    @cached_property
    def recovery(self) -> tuple[Part, ...]:
        """Return the time to recompute the longest tile after its device is lost.

        The tile is planned again on all other devices. The result is empty if there are none.
        """
        tile = max((t for r in self.report.reports for t in r.plan.tiles), key=lambda t: t.time_s)
        conditions, box = self.conditions, tile.tile
        others = [d for d in conditions.devices if d.device != tile.device]
        if not others:
            return ()
        gemm = Gemm(box.m.size, box.n.size, box.k.size)
        part = self.planner.plan_part(gemm, conditions.element, others)
        return (Part("tile again", part.makespan_s + part.fill_s),)

    def tightest_bytes(self) -> tuple[float, float]:
        """Return the bytes of the tile that takes the largest share of its device's memory.

        The second value is the memory of this device in bytes.
        """
        offers = {d.device: d.memory_bytes for d in self.conditions.devices}
        tile = max(
            (of.tightest for of in self.report.reports),
            key=lambda t: t.memory_bytes / offers[t.device],
        )
        return float(tile.memory_bytes), float(offers[tile.device])


def _tasks(conditions: Conditions) -> tuple[AttentionTask, AttentionTask]:
    spec, seq, element = conditions.spec, conditions.seq, conditions.element.sent
    return forward_task(spec, seq, element), backward_task(spec, seq, element)


def tiled_outcome(name: str, step: TiledStep) -> Outcome:
    """Return the outcome of a planned step by tiles.

    Args:
        name: name of the method.
        step: planned step.
    """
    layers, used = step.conditions.spec.layers, step.devices_used
    head = step.linears(lambda gemm: gemm.name == "lm_head")
    attention = [share.times(layers) for share in step.attention]
    attention_s = math.fsum(share.seconds for share in attention)
    down = step.linears(lambda gemm: True).download_bytes + sum(
        share.download_bytes for share in attention
    )
    up = step.report.ingress_bytes + sum(share.upload_bytes for share in attention)
    needed, offered = step.tightest_bytes()
    peak_out, peak_in = step.peaks_bytes_per_s
    possible, tasks = math.isfinite(attention_s), step.attention_bytes
    return Outcome(
        method=name,
        setting="" if possible else "no device has memory for attention",
        devices_used=used,
        parts=(
            Part("layers' Linears", step.report.apart_s - head.seconds),
            Part("LM head", head.seconds),
            Part("attention", attention_s),
        ),
        download_bytes=down / used,
        upload_bytes=up / used,
        memory_offered_bytes=offered,
        memory_needed_bytes=max(needed, tasks),
        misfit="" if possible else f"attention needs {tasks:.3g} bytes",
        ps_egress_bytes_per_s=peak_out,
        ps_ingress_bytes_per_s=peak_in,
        recovery=step.recovery,
        under_losses=step.losses if step.recovery else None,
        flops=step.flops,
    )


@dataclass(frozen=True, slots=True)
class AttentionTask:
    """The traffic, FLOPs and memory of one attention task.

    Attributes:
        download_bytes, upload_bytes: bytes of the task's inputs and of its result.
        flops: FLOPs of the task's matrix multiplications.
        memory_bytes: bytes of inputs, result and fp32 scores on the device.
    """

    download_bytes: float
    upload_bytes: float
    flops: float
    memory_bytes: float


def forward_task(spec: ModelSpec, seq: int, element_bytes: int) -> AttentionTask:
    """Return the cost of one attention task of the forward pass.

    The device downloads Q, K and V, and uploads the output O. It computes Q K^T and P V, each of
    which takes ``2 S^2 h`` FLOPs per query head.
    """
    queries = spec.heads / spec.kv_heads
    vector = seq * spec.head_width * element_bytes
    down, up = (queries + 2) * vector, queries * vector
    flops = queries * 4 * seq * seq * spec.head_width
    return AttentionTask(down, up, flops, down + up + 4 * seq * seq)


def backward_task(spec: ModelSpec, seq: int, element_bytes: int) -> AttentionTask:
    """Return the cost of one attention task of the backward pass.

    The device downloads Q, K, V and dO, and uploads dQ, dK and dV. It runs five matrix
    multiplications: it recomputes the scores, then computes dV, dP, dQ and dK.
    """
    queries = spec.heads / spec.kv_heads
    vector = seq * spec.head_width * element_bytes
    down, up = (2 * queries + 2) * vector, (queries + 2) * vector
    flops = queries * 10 * seq * seq * spec.head_width
    return AttentionTask(down, up, flops, down + up + 2 * 4 * seq * seq)


def tasks_s(task: AttentionTask, count: int, rates: RateArrays) -> float:
    """Return the minimum seconds in which the devices can finish `count` tasks together.

    Only devices with memory for two tasks take part; without such a device, the result is infinite.
    A device finishes its n-th task after ``latency + download + compute + upload + (n - 1) period``
    seconds. The period is the longest of the task's download, compute and upload times.
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
    """Return a mask of the devices that finish at least one task within `seconds`.

    Args:
        task: cost of one task.
        seconds: result of `tasks_s` for these tasks.
        rates: rates of the devices.
    """
    roomy = 2 * task.memory_bytes <= rates.memory
    back: npt.NDArray[np.bool_] = roomy & (_period_and_first_s(task, rates)[1] <= seconds)
    return back


def _period_and_first_s(task: AttentionTask, rates: RateArrays) -> tuple[Floats, Floats]:
    """Return the seconds between finished tasks, and until the first finished task, per device."""
    stages = np.stack(
        (
            task.download_bytes / rates.downlink,
            task.flops / rates.flops,
            task.upload_bytes / rates.uplink,
        )
    )
    return stages.max(axis=0), stages.sum(axis=0) + rates.latency_s
