"""`cleave` and `cleave-2d`: tiles planned by the planner itself, and attention as tasks.

The Linear GEMMs, the LM head among them, take what `cleave plan` predicts for them, one after
another. Attention of a layer is dealt out as tasks (`attention`), once forward and once backward.

A device that is lost takes its tile with it, nothing else: the others do that one again.
"""

from __future__ import annotations

from dataclasses import dataclass

from cleave.errors import PlanError
from cleave.gemm import Gemm
from cleave.planner.planner import Method as TileShape
from cleave.planner.planner import TilePlanner
from cleave.planner.report import StepReport, plan_step
from cleave.simulation.attention import backward_task, forward_task, tasks_s
from cleave.simulation.method import Conditions, Outcome, Part, impossible
from cleave.workload.step import StepGemm, step_gemms


@dataclass(frozen=True, slots=True)
class Tiles:
    """Stateless tiles, each GEMM by itself.

    Attributes:
        name: of the method.
        shape: of tiles; two-dimensional ones are the published scheme.
        fused: siblings that read the same input are one GEMM.
    """

    name: str
    shape: TileShape
    fused: bool

    def outcomes(self, conditions: Conditions) -> list[Outcome]:
        """One row."""
        gemms = step_gemms(conditions.spec, conditions.batch, conditions.seq, self.fused)
        planner = TilePlanner(conditions.ps, self.shape)
        try:
            step = plan_step(planner, gemms, conditions.element, conditions.devices, conditions.ps)
        except PlanError as error:
            return [impossible(self.name, str(error))]
        return [self._outcome(conditions, gemms, step, _recovery(planner, conditions, step))]

    def _outcome(
        self,
        conditions: Conditions,
        gemms: tuple[StepGemm, ...],
        step: StepReport,
        recovery: tuple[Part, ...],
    ) -> Outcome:
        spec, fleet = conditions.spec, len(conditions.devices)
        head_s = sum(
            r.predicted_s * g.count
            for r, g in zip(step.reports, gemms, strict=True)
            if g.name == "lm_head"
        )
        ps = conditions.ps
        behind = conditions.rates.throttled(ps.egress_bytes_per_s, ps.ingress_bytes_per_s)
        each_layer = conditions.batch * spec.kv_heads
        attention_s = sent = returned = memory = 0.0
        flops = float(sum(gemm.flops for gemm in gemms))
        peak_out, peak_in = step.peak_egress_bytes_per_s, step.peak_ingress_bytes_per_s
        for task in (
            forward_task(spec, conditions.seq, conditions.element.sent),
            backward_task(spec, conditions.seq, conditions.element.sent),
        ):
            layer_s = tasks_s(task, each_layer, behind)
            attention_s += spec.layers * layer_s
            sent += spec.layers * each_layer * task.download_bytes
            returned += spec.layers * each_layer * task.upload_bytes
            flops += spec.layers * each_layer * task.flops
            peak_out = max(peak_out, each_layer * task.download_bytes / layer_s)
            peak_in = max(peak_in, each_layer * task.upload_bytes / layer_s)
            memory = max(memory, 2 * task.memory_bytes)
        needed, offered = _tightest(conditions, step)
        return Outcome(
            method=self.name,
            setting="" if attention_s < float("inf") else "no device has memory for attention",
            devices_used=max(r.plan.devices_used for r in step.reports),
            parts=(
                Part("layers' Linears", step.predicted_s - head_s),
                Part("LM head", head_s),
                Part("attention", attention_s),
            ),
            download_bytes=(step.egress_bytes + sent) / fleet,
            upload_bytes=(step.ingress_bytes + returned) / fleet,
            memory_offered_bytes=offered,
            memory_needed_bytes=max(needed, memory),
            misfit="" if attention_s < float("inf") else f"attention needs {memory:.3g} bytes",
            ps_egress_bytes_per_s=peak_out,
            ps_ingress_bytes_per_s=peak_in,
            recovery=recovery,
            flops=flops,
        )


def _tightest(conditions: Conditions, step: StepReport) -> tuple[float, float]:
    """Most that a tile occupies, and what the device that holds it offers."""
    offers = {d.device: d.memory_bytes for d in conditions.devices}
    tile = max(
        (t for r in step.reports for t in r.plan.tiles),
        key=lambda t: t.memory_bytes / offers[t.device],
    )
    return float(tile.memory_bytes), float(offers[tile.device])


def _recovery(planner: TilePlanner, conditions: Conditions, step: StepReport) -> tuple[Part, ...]:
    """The longest tile there is, none of it back yet, done again by the others as a new plan."""
    tile = max((t for r in step.reports for t in r.plan.tiles), key=lambda t: t.time_s)
    others = [d for d in conditions.devices if d.device != tile.device]
    if not others:
        return ()
    box = tile.tile
    part = planner.plan_part(Gemm(box.m.size, box.n.size, box.k.size), conditions.element, others)
    return (Part("tile again", part.makespan_s + part.fill_s),)
