"""`cleave-resident`: devices hold sub-layers for a step (design, section 9). Not built: simulated.

The closed form, with a fleet of mean rates, P stages of G groups of r devices and B / G samples for
each group:

    step = max over stages of (total down / D, total up / U, compute / F)
           + sum over stages of one sample's forward and backward hop

The search takes the best runs and r by that, deals the real devices to stages and simulates the
step event by event (`resident_events`); the LM head is done by tiles before and after, as `cleave`
does it, and counts in full. Two rows: the closed form, and the events.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from cleave.errors import PlanError
from cleave.planner.planner import TilePlanner
from cleave.planner.report import StepReport, plan_step
from cleave.simulation.method import Conditions, Outcome, Part, impossible
from cleave.simulation.resident_events import Assignment, Run, assign, sample_s, simulate
from cleave.simulation.sublayers import Load, Residence, kinds, residence
from cleave.simulation.work import head_flops
from cleave.workload.step import step_gemms

_SIMULATED: Final = 12  # of the layouts that are best by the closed form
_LONGEST_RUN: Final = 16  # sub-layers


@dataclass(frozen=True, slots=True)
class Layout:
    """A way to spread a model over a fleet, and what the closed form says of it.

    Attributes:
        stages: what each stage's devices hold.
        steady_s, fill_s: the two terms of the closed form.
    """

    stages: tuple[Residence, ...]
    r: int
    groups: int
    steady_s: float
    fill_s: float


def closed_form(conditions: Conditions, run: int, r: int) -> Layout | None:
    """Runs of so many sub-layers in groups of r; None where the fleet is too small for one chain.

    Only devices whose memory holds the largest stage count.
    """
    order = kinds(conditions.spec)
    pieces = [order[i : i + run] for i in range(0, len(order), run)]
    known = {piece: residence(conditions, piece, r) for piece in set(pieces)}
    stages = tuple(known[piece] for piece in pieces)
    need = max(held.memory_bytes for held in stages)
    able = int((conditions.rates.memory >= need).sum())
    groups = min(conditions.batch, able // (len(stages) * r))
    if not groups:
        return None
    samples = -(-conditions.batch // groups)
    steady_s = max(_steady_s(conditions, held, samples) for held in known.values())
    fill_s = sum(
        _hop_s(conditions, held.forward) + _hop_s(conditions, held.backward) for held in stages
    )
    return Layout(stages, r, groups, steady_s, fill_s)


def layouts(conditions: Conditions) -> list[Layout]:
    """Those worth simulating, best first by the closed form."""
    longest = min(_LONGEST_RUN, len(kinds(conditions.spec)))
    found = []
    for run in range(1, longest + 1):
        stages = -(-len(kinds(conditions.spec)) // run)
        most = len(conditions.devices) // stages
        sizes = {most // groups for groups in range(1, most + 1) if groups <= conditions.batch}
        for r in sorted(sizes | {1} if most else sizes):
            layout = closed_form(conditions, run, r) if r else None
            if layout is not None:
                found.append(layout)
    return sorted(found, key=lambda each: each.steady_s + each.fill_s)


class CleaveResident:
    """Resident sub-layers, all traffic through the PS."""

    name = "cleave-resident"

    def outcomes(self, conditions: Conditions) -> list[Outcome]:
        """Two rows: events, closed form."""
        ps = conditions.ps
        behind = conditions.rates.throttled(ps.egress_bytes_per_s, ps.ingress_bytes_per_s)
        possible = layouts(conditions)
        if not possible:
            return [impossible(self.name, "no device, or too few, hold a sub-layer")]
        try:
            head = _head(conditions)
        except PlanError as error:
            return [impossible(self.name, str(error))]
        best: tuple[Run, Layout, Assignment] | None = None
        for layout in possible[:_SIMULATED]:
            assignment = assign(layout.stages, behind, layout.r, conditions.batch)
            if assignment is None:
                continue
            run = simulate(layout.stages, assignment, behind, conditions.batch)
            if best is None or run.step_s < best[0].step_s:
                best = run, layout, assignment
        rows = []
        if best is not None:
            run, layout, assignment = best
            parts = (
                Part("sub-layers", run.samples_s),
                Part("last gradients", run.step_s - run.samples_s),
                Part("LM head", head.predicted_s),
            )
            row = self._outcome(conditions, layout, assignment.devices, parts, head, "")
            rows.append(replace(row, recovery=_recovery(conditions, layout, assignment)))
        first = possible[0]
        parts = (
            Part("steady state", first.steady_s),
            Part("fill", first.fill_s),
            Part("LM head", head.predicted_s),
        )
        used = len(first.stages) * first.groups * first.r
        rows.append(self._outcome(conditions, first, used, parts, head, " (closed form)"))
        return rows

    def _outcome(
        self,
        conditions: Conditions,
        layout: Layout,
        used: int,
        parts: tuple[Part, ...],
        head: StepReport,
        variant: str,
    ) -> Outcome:
        down = up = flops = 0.0
        for held in layout.stages:
            passes = (held.forward, held.backward)
            down += layout.r * conditions.batch * sum(load.download_bytes for load in passes)
            up += layout.r * conditions.batch * sum(load.upload_bytes for load in passes)
            flops += layout.r * conditions.batch * sum(load.flops for load in passes)
            of_stage = used / len(layout.stages)
            down += of_stage * held.weights_bytes
            up += of_stage * held.gradient_bytes
        needed = max(held.memory_bytes for held in layout.stages)
        memory = conditions.rates.memory
        layers_s = sum(part.seconds for part in parts) - head.predicted_s
        longest = max(len(held.run) for held in layout.stages)
        return Outcome(
            method=self.name + variant,
            setting=f"{len(layout.stages)} stages of {longest} sub-layers, groups of {layout.r}",
            devices_used=used,
            parts=parts,
            download_bytes=(down + head.egress_bytes) / used,
            upload_bytes=(up + head.ingress_bytes) / used,
            memory_offered_bytes=float(memory[memory >= needed].min()),
            memory_needed_bytes=needed,
            ps_egress_bytes_per_s=max(down / layers_s, head.peak_egress_bytes_per_s),
            ps_ingress_bytes_per_s=max(up / layers_s, head.peak_ingress_bytes_per_s),
            flops=flops + 3 * conditions.batch * head_flops(conditions.spec, conditions.seq),
        )


def _steady_s(conditions: Conditions, held: Residence, samples: int) -> float:
    rates, passes = conditions.rates, (held.forward, held.backward)
    down = samples * sum(load.download_bytes for load in passes) + held.weights_bytes
    up = samples * sum(load.upload_bytes for load in passes) + held.gradient_bytes
    flops = samples * sum(load.flops for load in passes)
    means = (rates.downlink.mean(), rates.uplink.mean(), rates.flops.mean())
    return float(max(np.divide((down, up, flops), means)))


def _hop_s(conditions: Conditions, load: Load) -> float:
    rates = conditions.rates
    return float(
        load.download_bytes / rates.downlink.mean()
        + load.flops / rates.flops.mean()
        + load.upload_bytes / rates.uplink.mean()
        + rates.latency_s.mean()
    )


def _head(conditions: Conditions) -> StepReport:
    """The LM head by tiles."""
    gemms = step_gemms(conditions.spec, conditions.batch, conditions.seq)
    head = [gemm for gemm in gemms if gemm.name == "lm_head"]
    planner = TilePlanner(conditions.ps)
    return plan_step(planner, head, conditions.element, conditions.devices, conditions.ps)


def _recovery(conditions: Conditions, layout: Layout, assignment: Assignment) -> tuple[Part, ...]:
    """The worst stage's: a spare fetches the weights, and what was summed since the step began.

    Half of a group's samples on average; the other groups of the stage, or the spare where there is
    none, do their backward pass again.
    """
    rates, worst = conditions.rates, 0.0
    weights_s = 0.0
    for held, groups in zip(layout.stages, assignment.stages, strict=True):
        others = max(1, len(groups) - 1)
        again = conditions.batch / len(groups) / 2 * float(sample_s(held, rates).mean()) / others
        worst = max(worst, again)
        weights_s = max(weights_s, held.weights_bytes / float(np.median(rates.downlink)))
    return Part("weights", weights_s), Part("gradients again", worst)
