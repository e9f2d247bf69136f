"""`cleave-resident`: devices hold sub-layers for a step (docs/simulation.md). Not built: simulated.

The closed form (`resident_layouts`) ranks layouts: the runs of sub-layers, the sizes of groups and
their numbers. The best of them are simulated event by event on the real devices
(`resident_events`), and the best of these is taken. The LM head is done by tiles before and after,
as `cleave` does it, and counts in full. There are two rows: the events, and the closed form. A loss
costs a device's unfinished share, not the step (`resident_losses`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cleave.errors import PlanError
from cleave.planner.report import StepReport, plan_step
from cleave.workload.step import step_gemms
from simulator.method import Conditions, Outcome, Part, impossible
from simulator.resident_events import Assignment, ResidentRun, Step, assign, simulate, spare_s
from simulator.resident_layouts import LayoutSearch, ResidentLayout, Stretch
from simulator.resident_losses import ResidentLosses
from simulator.sublayers import kinds
from simulator.tiles import EDGES
from simulator.work import head_flops

_SIMULATED: Final = 12  # of the layouts that are best by the closed form


@dataclass(frozen=True, slots=True)
class Resident:
    """A stretch of sub-layers on the devices of a fleet, as simulated.

    Attributes:
        runs: the simulated run of each visit.
    """

    stretch: Stretch
    assignment: Assignment
    runs: tuple[ResidentRun, ...]

    @property
    def time_s(self) -> float:
        return sum(run.step_s for run in self.runs)

    @property
    def samples_s(self) -> float:
        """Return the part of `time_s` until the last sample is through."""
        return sum(run.samples_s for run in self.runs)

    def moved_bytes(self, batch: int) -> tuple[float, float]:
        """Return the bytes down and up, of all devices together."""
        groups = [len(each) for each in self.assignment.stages]
        moved = [visit.moved_bytes(batch, groups) for visit in self.stretch.visits]
        return sum(down for down, _ in moved), sum(up for _, up in moved)

    def losses(self, conditions: Conditions) -> ResidentLosses:
        """Return the model of the stretch's time while devices leave."""
        layout = self.stretch.layout
        spare = [spare_s(held, conditions.rates) for held in layout.stages]
        groups = self.assignment.devices / layout.r / len(layout.stages)
        return ResidentLosses(
            self.time_s,
            self.assignment.devices,
            groups,
            max(fetch_s for fetch_s, _ in spare),
            max(again_s for _, again_s in spare) * conditions.batch / groups,
        )


def simulated(
    conditions: Conditions, stretches: Sequence[Stretch], most: int | None = None
) -> Resident | None:
    """Simulate the first stretches; return the best, or None if none fits the devices."""
    ps, best = conditions.ps, None
    behind = conditions.rates.throttled(ps.egress_bytes_per_s, ps.ingress_bytes_per_s)
    for stretch in stretches[:most]:
        layout = stretch.layout
        assignment = assign(layout.stages, behind, layout.r, layout.most_groups)
        if assignment is None:
            continue
        runs = tuple(
            simulate(
                layout.stages,
                assignment,
                conditions.rates,
                Step(conditions.batch, visit.passes, ps),
            )
            for visit in stretch.visits
        )
        found = Resident(stretch, assignment, runs)
        if best is None or found.time_s < best.time_s:
            best = found
    return best


class CleaveResident:
    """Resident sub-layers, with all traffic through the PS."""

    name = "cleave-resident"

    def outcomes(self, conditions: Conditions) -> list[Outcome]:
        """Return two rows: events, closed form."""
        possible = conditions.once(ranked)
        if not possible:
            return [impossible(self.name, "no device, or too few, hold a sub-layer")]
        try:
            head = conditions.once(head_by_tiles)
        except PlanError as error:
            return [impossible(self.name, str(error))]
        best = conditions.once(best_resident)
        rows = [] if best is None else [resident_row(self.name, conditions, best)]
        layout = possible[0].layout
        parts = (
            Part("steady state", layout.steady_s),
            Part("fill", layout.fill_s),
            Part("last gradients", layout.flush_s),
            Part("LM head", head.predicted_s),
        )
        moved = layout.moved_bytes(conditions.batch, [layout.groups] * len(layout.stages))
        name = f"{self.name} (closed form)"
        rows.append(_outcome(name, conditions, layout, layout.devices, parts, moved, head))
        return rows


def ranked(conditions: Conditions) -> list[Stretch]:
    """Return all ways to have every sub-layer resident, best first by the closed form."""
    return LayoutSearch(conditions).best_first(kinds(conditions.spec))


def best_resident(conditions: Conditions) -> Resident | None:
    """Return the best way, simulated event by event; None if the fleet cannot hold the model."""
    return simulated(conditions, conditions.once(ranked), _SIMULATED)


def resident_row(name: str, conditions: Conditions, best: Resident) -> Outcome:
    """Return the row of a step whose sub-layers are all resident at the same time."""
    head = conditions.once(head_by_tiles)
    layout = best.stretch.layout
    parts = (
        Part("sub-layers", best.samples_s),
        Part("last gradients", best.time_s - best.samples_s),
        Part("LM head", head.predicted_s),
    )
    losses = best.losses(conditions)
    return _outcome(
        name,
        conditions,
        layout,
        best.assignment.devices,
        parts,
        best.moved_bytes(conditions.batch),
        head,
        recovery(losses),
        WithHead(losses, head.predicted_s),
    )


@dataclass(frozen=True, slots=True)
class WithHead:
    """Losses in the sub-layers; a loss in the LM head costs a tile and is left out."""

    sublayers: ResidentLosses
    head_s: float

    def with_losses_s(self, losses_per_s: float, detection_s: float) -> float:
        """See `UnderLosses.with_losses_s`."""
        return self.sublayers.with_losses_s(losses_per_s, detection_s) + self.head_s


def recovery(losses: ResidentLosses) -> tuple[Part, ...]:
    """Return what one loss adds: its group is away, one of a stage's G, so a G-th of that time."""
    return (
        Part("weights", losses.weights_s / losses.groups),
        Part("gradients again", losses.again_s / 4 / losses.groups),
    )


def head_by_tiles(conditions: Conditions) -> StepReport:
    """Plan the LM head and the other Linears outside the layers.

    Raises:
        PlanError: when no device can multiply it.
    """
    gemms = step_gemms(conditions.spec, conditions.batch, conditions.seq, fused_siblings=True)
    edges = [gemm for gemm in gemms if gemm.name in EDGES]
    ps, element = conditions.ps, conditions.element
    return plan_step(conditions.planner, edges, element, conditions.devices, ps)


def _outcome(
    method: str,
    conditions: Conditions,
    layout: ResidentLayout,
    used: int,
    parts: tuple[Part, ...],
    moved: tuple[float, float],
    head: StepReport,
    recovery: tuple[Part, ...] = (),
    losses: WithHead | None = None,
) -> Outcome:
    down, up = moved
    memory = conditions.rates.memory
    layers_s = math.fsum(part.seconds for part in parts) - head.predicted_s
    longest = max(len(held.run) for held in layout.stages)
    return Outcome(
        method=method,
        setting=f"{len(layout.stages)} stages of {longest} sub-layers, groups of {layout.r}",
        devices_used=used,
        parts=parts,
        download_bytes=(down + head.egress_bytes) / used,
        upload_bytes=(up + head.ingress_bytes) / used,
        memory_offered_bytes=float(memory[memory >= layout.needed_bytes].min()),
        memory_needed_bytes=layout.needed_bytes,
        ps_egress_bytes_per_s=max(down / layers_s, head.peak_egress_bytes_per_s),
        ps_ingress_bytes_per_s=max(up / layers_s, head.peak_ingress_bytes_per_s),
        recovery=recovery,
        under_losses=losses,
        flops=layout.flops(conditions.batch)
        + 3 * conditions.batch * head_flops(conditions.spec, conditions.seq),
    )
