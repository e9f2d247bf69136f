"""`cleave` and `cleave-2d`: tiles from Cleave's planner, and attention as tasks.

The Linear GEMMs, with the LM head, run one after another, as published. Each takes the time that
`cleave plan` predicts; actual training submits both gradients of a Linear together. A layer's
attention is split into tasks (`attention`), once forward and once backward.

Losing a device costs only its tile. The others compute that tile again, which delays its GEMM once,
however many devices are lost during it. With n devices, each lost at a rate lambda,

    T = sum over GEMMs and attentions of  t + (1 - exp(-n lambda t)) (detection + tile again)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from cleave.errors import PlanError
from cleave.gemm import Gemm
from cleave.planner.tiles.planner import PlanMethod as TileShape
from cleave.planner.tiles.planner import TilePlanner
from cleave.planner.tiles.report import StepReport, plan_step
from cleave.workload.step import StepGemm, step_gemms
from simulator.attention import AttentionTask, backward_task, forward_task, takers, tasks_s
from simulator.method import Conditions, Outcome, Part, impossible


@dataclass(frozen=True, slots=True)
class Tiles:
    """Stateless tiles, one GEMM at a time.

    Attributes:
        name: name of the method.
        shape: shape of tiles; two-dimensional tiles are the published scheme.
        fused: whether Linears that read the same input form one GEMM.
    """

    name: str
    shape: TileShape
    fused: bool

    def outcomes(self, conditions: Conditions) -> list[Outcome]:
        """Return one row."""
        try:
            planner = TilePlanner(conditions.ps, self.shape)
            step = TiledStep.of(conditions, planner, fused=self.fused)
        except PlanError as error:
            return [impossible(self.name, str(error))]
        return [tiled_outcome(self.name, step)]


class Share(NamedTuple):
    """A part of a step: its seconds, and the bytes of all devices together."""

    seconds: float
    download_bytes: float
    upload_bytes: float

    def times(self, count: float) -> Share:
        """Return `count` repetitions of this share, one after another."""
        return Share(*(count * value for value in self))


@dataclass(frozen=True, slots=True)
class TileLosses:
    """The loss formula in the module's docstring.

    Attributes:
        times: seconds and number of occurrences of each GEMM or attention.
        devices: n, the number of devices.
        again_s: seconds to compute a lost tile again.
    """

    times: tuple[tuple[float, float], ...]
    devices: int
    again_s: float

    def with_losses_s(self, losses_per_s: float, detection_s: float) -> float:
        """See `UnderLosses.with_losses_s`."""
        rate, delay_s = self.devices * losses_per_s, detection_s + self.again_s
        return math.fsum(n * (t - math.expm1(-rate * t) * delay_s) for t, n in self.times)


@dataclass(frozen=True)
class TiledStep:
    """Every Linear of a step as planned, and attention as tasks.

    Attributes:
        planner: planner of the Linears.
        gemms, report: the Linears and their plans.
        attention: attention of one layer, forward and backward.
    """

    conditions: Conditions
    planner: TilePlanner
    gemms: tuple[StepGemm, ...]
    report: StepReport
    attention: tuple[Share, ...]

    @classmethod
    def of(cls, conditions: Conditions, planner: TilePlanner, *, fused: bool) -> TiledStep:
        """Plan a step.

        Raises:
            PlanError: when a GEMM of the step fits no device.
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
        """Return the total share of all occurrences of the selected Linears."""
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
        """Return the model of losses."""
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
        """Return the number of devices that get a tile or an attention task."""
        conditions, ps = self.conditions, self.conditions.ps
        used = {tile.device for of in self.report.reports for tile in of.plan.tiles}
        behind = conditions.rates.throttled(ps.egress_bytes_per_s, ps.ingress_bytes_per_s)
        for task, share in zip(_tasks(conditions), self.attention, strict=True):
            places = np.flatnonzero(takers(task, share.seconds, behind))
            used |= {conditions.devices[int(place)].device for place in places}
        return len(used)

    @property
    def flops(self) -> float:
        """Return the FLOPs of all devices, including recomputed attention scores."""
        spec = self.conditions.spec
        tasks = sum(task.flops for task in _tasks(self.conditions))
        attention = spec.layers * self.conditions.batch * spec.kv_heads * tasks
        return float(sum(gemm.flops for gemm in self.gemms)) + attention

    @property
    def attention_bytes(self) -> float:
        """Return the memory that a device needs for attention: two tasks."""
        return max(2 * task.memory_bytes for task in _tasks(self.conditions))

    @property
    def peaks_bytes_per_s(self) -> tuple[float, float]:
        """Return the egress and ingress rates of the PS's network card in the busiest part."""
        out = [task.download_bytes / task.seconds for task in self.attention]
        in_ = [task.upload_bytes / task.seconds for task in self.attention]
        report = self.report
        return (
            max(report.peak_egress_bytes_per_s, *out),
            max(report.peak_ingress_bytes_per_s, *in_),
        )

    @cached_property
    def recovery(self) -> tuple[Part, ...]:
        """Return the cost of losing the longest tile at its end and replanning it on the others."""
        tile = max((t for r in self.report.reports for t in r.plan.tiles), key=lambda t: t.time_s)
        conditions, box = self.conditions, tile.tile
        others = [d for d in conditions.devices if d.device != tile.device]
        if not others:
            return ()
        gemm = Gemm(box.m.size, box.n.size, box.k.size)
        part = self.planner.plan_part(gemm, conditions.element, others)
        return (Part("tile again", part.makespan_s + part.fill_s),)

    def tightest_bytes(self) -> tuple[float, float]:
        """Return the bytes of the tile that fills its device most, and its device's memory."""
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
    """Return the row of a step that consists of tiles and attention tasks."""
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
