"""`dtfm`: data and pipeline parallelism over peers (Yuan et al., NeurIPS 2022, arXiv 2206.01288).

P stages of R replicas hold the layers, divided as evenly as possible. DT-FM's scheduler
(`dtfm_search`) models communication only. This module adds compute, set by a stage's slowest
device, and memory: 16 bytes per parameter and what 1F1B keeps in flight. Micro-batches are single
samples, m = B / R per pipeline. One model gives three rows:

    (formula)    DP + PP as published, PP with the activations of all m samples at once, and
                 a perfectly filled pipeline of compute, (m + P - 1) slots
    (pipelined)  one sample along the whole path forward and backward + (m - 1) slots + DP; a
                 slot is the slowest stage's compute or the slowest link's activations and
                 gradients, whichever is longer: all overlapped (exact: `pipeline`)
    (serial)     m times the whole path forward and backward, nothing overlapped, + DP

Each row uses the grid P x R that is fastest for that row, among all grids that B samples and the
layers allow. Grids that fit in memory come first. Unneeded devices are those with the slowest
links. `dtfm-all` uses all devices offered, as the published grid does: it tries only grids with at
least 90 % of the largest grid's devices. A lost device means a restart from a checkpoint
(`pipeline.restart`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from cleave.planner.tiles.shape import Floats
from simulator.dtfm_search import TRIALS, DtfmSchedule, Problem, first_guess, search
from simulator.method import Conditions, Outcome, Part
from simulator.pipeline import (
    PipelineJob,
    Stage,
    StageMemory,
    layers_of_stages,
    one_f_one_b,
    pipeline_memory,
    restart,
)

_NEARLY_ALL: Final = 0.9
_POINT_S: Final = 20.0  # approximate time limit of all searches in one call of `outcomes`


@dataclass(frozen=True, slots=True)
class _Placed:
    """A schedule with its stages and their memory."""

    job: PipelineJob
    problem: Problem
    schedule: DtfmSchedule
    stages: list[Stage]
    memory: StageMemory

    @property
    def micro_batches(self) -> int:
        return -(-self.job.batch // self.problem.replicas)

    def compute_s(self) -> Floats:
        """Return the seconds per sample, forward and backward, on each stage's slowest device."""
        layers = np.array(layers_of_stages(self.job.layers, self.problem.stages), np.float64)
        layers[-1] += self.job.head_layers
        slowest = self.problem.rates.flops[self.schedule.groups].min(axis=1)
        each_s: Floats = self.memory.again * self.job.flops(1) * layers / slowest
        return each_s

    def flops(self) -> float:
        """Return the FLOPs of all samples, forward and backward."""
        rates = self.problem.rates.flops[self.schedule.groups].min(axis=1)
        return float(self.job.batch * (self.compute_s() * rates).sum())

    def formula(self) -> tuple[Part, ...]:
        slots = self.micro_batches + self.problem.stages - 1
        return (
            Part("compute", slots * float(self.compute_s().max())),
            Part("stage to stage", self.schedule.pp_s),
            Part("gradients", self.schedule.dp_s),
        )

    def pipelined(self) -> tuple[Part, ...]:
        # A device in the middle sends a sample's activations forward and its gradient back.
        rates, stages = self.problem.rates, self.problem.stages
        link_s = 0.0
        if stages > 1:
            slowest = float(np.minimum(rates.uplink, rates.downlink).min())
            link_s = min(2, stages - 1) * self.job.layer.boundary_bytes / slowest
        first_s = float(self.compute_s().sum()) + self._hops_s()
        slot_s = max(float(self.compute_s().max()), link_s)
        return (
            Part("first sample", first_s),
            Part("other samples", (self.micro_batches - 1) * slot_s),
            Part("gradients", self.schedule.dp_s),
        )

    def serial(self) -> tuple[Part, ...]:
        return (
            Part("compute", self.micro_batches * float(self.compute_s().sum())),
            Part("stage to stage", self.micro_batches * self._hops_s()),
            Part("gradients", self.schedule.dp_s),
        )

    def _hops_s(self) -> float:
        """Return the seconds of a sample along the whole path, forward and backward."""
        groups = self.schedule.groups
        one = replace(self.problem, c_pp_bytes=self.job.layer.boundary_bytes)
        pairs = (
            one.hops_s(groups[i : i + 1], groups[i + 1 : i + 2]) for i in range(len(groups) - 1)
        )
        return sum(float(pair[0, 0]) for pair in pairs)


_VARIANTS: dict[str, Callable[[_Placed], tuple[Part, ...]]] = {
    "formula": _Placed.formula,
    "pipelined": _Placed.pipelined,
    "serial": _Placed.serial,
}


@dataclass(frozen=True, slots=True)
class Dtfm:
    """DT-FM: decentralised training of foundation models.

    Attributes:
        every_device: whether to use all devices offered, as far as layers and samples allow, like
            the published grid; otherwise the fastest number of devices.
        thorough: whether to run all trials of every search, not only those that fit into 20 s.
    """

    name: str = "dtfm"
    every_device: bool = False
    thorough: bool = False

    def outcomes(self, conditions: Conditions) -> list[Outcome]:
        """Return three rows: as published, fully pipelined, serial."""
        job = PipelineJob.of(conditions)
        problems = _problems(conditions, job, every_device=self.every_device)
        guesses = [_placed(job, problem, first_guess(problem)) for problem in problems]
        chosen = {}
        for variant, parts in _VARIANTS.items():
            scores = [
                (bool(guess.memory.misfit), sum(p.seconds for p in parts(guess)))
                for guess in guesses
            ]
            chosen[variant] = scores.index(min(scores))
        searched = {}
        for grid in sorted(set(chosen.values())):
            problem, allowance_s = problems[grid], _POINT_S / len(set(chosen.values()))
            trials = TRIALS if self.thorough else problem.trials_in(allowance_s)
            searched[grid] = _placed(job, problem, search(problem, conditions.seed, trials))
        return [
            _outcome(f"{self.name} ({variant})", searched[chosen[variant]], parts)
            for variant, parts in _VARIANTS.items()
        ]


def _problems(conditions: Conditions, job: PipelineJob, *, every_device: bool) -> list[Problem]:
    """Return a problem for each number of layers per stage and 1, 2, 4 ... or all replicas."""
    rates = conditions.rates
    fastest = np.argsort(-np.minimum(rates.uplink, rates.downlink), kind="stable")
    found = []
    for held in range(1, job.layers + 1):
        stages = -(-job.layers // held)
        if -(-job.layers // stages) != held or stages > len(fastest):
            continue
        most = min(job.batch, len(fastest) // stages)
        fewer = () if every_device else (1 << i for i in range(most.bit_length()))
        for replicas in sorted({most, *fewer}):
            samples = -(-job.batch // replicas)
            if not every_device and -(-job.batch // samples) < replicas:
                continue  # fewer replicas would get the same number of samples each
            chosen = rates.take(np.sort(fastest[: stages * replicas]))
            activations = samples * job.layer.boundary_bytes
            gradient = job.gradient_bytes(held)
            found.append(Problem(chosen, stages, replicas, gradient, activations))
    if every_device:
        largest = max(problem.stages * problem.replicas for problem in found)
        found = [p for p in found if p.stages * p.replicas >= _NEARLY_ALL * largest]
    return found


def _placed(job: PipelineJob, problem: Problem, schedule: DtfmSchedule) -> _Placed:
    layers = layers_of_stages(job.layers, problem.stages)
    stages = [
        Stage(held, problem.rates.take(group))
        for held, group in zip(layers, schedule.groups, strict=True)
    ]
    micro_batches = -(-job.batch // problem.replicas)
    in_flight = one_f_one_b(problem.stages, micro_batches, 1)
    memory = pipeline_memory(job, stages, in_flight)
    return _Placed(job, problem, schedule, stages, memory)


def _outcome(method: str, placed: _Placed, parts: Callable[[_Placed], tuple[Part, ...]]) -> Outcome:
    problem, memory, schedule = placed.problem, placed.memory, placed.schedule
    stages, replicas = problem.stages, problem.replicas
    between = 2 * placed.job.batch * placed.job.layer.boundary_bytes * (stages - 1)
    moved = between / (stages * replicas) + 2 * (replicas - 1) / replicas * problem.c_dp_bytes
    gap = schedule.pp_s / schedule.path_bound_s - 1 if schedule.path_bound_s else 0.0
    path = f"path within {gap:.1%} of a bound" if gap > 1e-9 else "shortest path"
    spent = parts(placed)
    return Outcome(
        method=method,
        setting=f"{stages} stages x {replicas}, {schedule.trials} trials, {path}",
        devices_used=stages * replicas,
        parts=spent,
        download_bytes=moved,
        upload_bytes=moved,
        memory_offered_bytes=memory.offered_bytes,
        memory_needed_bytes=memory.needed_bytes,
        misfit=memory.misfit,
        recovery=restart(placed.job, placed.stages, sum(part.seconds for part in spent)),
        flops=placed.flops(),
    )
