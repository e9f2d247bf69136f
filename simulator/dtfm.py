"""`dtfm`: data and pipeline parallelism over peers (Yuan et al., NeurIPS 2022, arXiv 2206.01288).

The layers are divided as evenly as possible into P stages, and each stage has R replicas. DT-FM's
scheduler (`dtfm_search`) models only communication: DP is the time of the gradient all-reduce, and
PP the time of transfers between stages. This module adds compute, which a stage's slowest device
determines, and memory: 16 bytes per parameter, and the activations that 1F1B stores. A micro-batch
is one sample, so the number m of micro-batches per replica is the batch size divided by R, rounded
up. The three variants are:

    (formula)    DP + PP as published, where PP sends the activations of all m samples at once, plus
                 compute in a perfectly filled pipeline of (m + P - 1) slots
    (pipelined)  one sample through all stages, forward and backward, then (m - 1) slots, then DP. A
                 slot is the longer of the slowest stage's compute and the slowest link's transfers
    (serial)     m samples in sequence through all stages, forward and backward, then DP

Each variant uses its fastest grid P x R, preferably one that fits in memory. A grid that needs only
some of the devices uses those with the fastest links. `dtfm-all` tries only grids with at least
90 % of the largest grid's devices, as published. After the loss of a device, a step restarts from a
checkpoint.
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
    pipeline_outcome,
    restart,
)

_NEARLY_ALL: Final = 0.9
_POINT_S: Final = 20.0  # approximate time limit of all searches in one call of `outcomes`


@dataclass(frozen=True, slots=True)
class _Placed:
    """A grid of stages and replicas, the devices assigned to it, and the memory that they need."""

    job: PipelineJob
    problem: Problem
    schedule: DtfmSchedule
    stages: list[Stage]
    memory: StageMemory

    @property
    def micro_batches(self) -> int:
        return -(-self.job.batch // self.problem.replicas)

    def slowest_flops(self) -> Floats:
        slowest: Floats = self.problem.rates.flops[self.schedule.groups].min(axis=1)
        return slowest

    def compute_s(self) -> Floats:
        """Return each stage's compute time (s) per sample on its slowest device, in both passes."""
        layers = np.array(layers_of_stages(self.job.layers, self.problem.stages), np.float64)
        layers[-1] += self.job.head_layers
        each_s: Floats = self.memory.again * self.job.flops(1) * layers / self.slowest_flops()
        return each_s

    def flops(self) -> float:
        """Return the FLOPs of all devices in a step, including recomputed forward passes."""
        return float(self.job.batch * (self.compute_s() * self.slowest_flops()).sum())

    def formula(self) -> tuple[Part, ...]:
        slots = self.micro_batches + self.problem.stages - 1
        return (
            Part("compute", slots * float(self.compute_s().max())),
            Part("stage to stage", self.schedule.pp_s),
            Part("gradients", self.schedule.dp_s),
        )

    def pipelined(self) -> tuple[Part, ...]:
        # A device of a middle stage sends a sample's activations to the next stage and the gradient
        # of activations to the previous stage.
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
        """Return the time in seconds to send one sample through all stages and back."""
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
        every_device: True to use nearly all devices, as far as layers and samples allow. False to
            use the number of devices that gives the shortest step.
        thorough: True to run all trials of every search. False to run as many trials as fit in an
            estimated 20 s.
    """

    name: str = "dtfm"
    every_device: bool = False
    thorough: bool = False

    def outcomes(self, conditions: Conditions) -> list[Outcome]:
        """Return three outcomes: the variants formula, pipelined and serial."""
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
    """Return a scheduling problem for each grid of stages and replicas to try.

    For each possible number of layers per stage, the replica counts tried are 1, 2, 4 ... and the
    maximum. With `every_device`, only the maximum is tried, and only grids that use nearly as many
    devices as the largest grid are returned.
    """
    rates, fastest = conditions.rates, conditions.fastest_links
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
    groups = zip(layers, schedule.groups, strict=True)
    stages = [Stage(held, problem.rates.take(group)) for held, group in groups]
    in_flight = one_f_one_b(problem.stages, -(-job.batch // problem.replicas))
    return _Placed(job, problem, schedule, stages, pipeline_memory(job, stages, in_flight))


def _outcome(method: str, placed: _Placed, parts: Callable[[_Placed], tuple[Part, ...]]) -> Outcome:
    problem, schedule = placed.problem, placed.schedule
    stages, replicas = problem.stages, problem.replicas
    sent = 2 * placed.job.batch * placed.job.layer.boundary_bytes * (stages - 1)
    sent += stages * 2 * (replicas - 1) * problem.c_dp_bytes
    gap = schedule.pp_s / schedule.path_bound_s - 1 if schedule.path_bound_s else 0.0
    path = f"path within {gap:.1%} of a bound" if gap > 1e-9 else "shortest path"
    spent = parts(placed)
    return pipeline_outcome(
        method,
        f"{stages} stages x {replicas}, {schedule.trials} trials, {path}",
        placed.stages,
        placed.memory,
        spent,
        sent,
        restart(placed.job, placed.stages, sum(part.seconds for part in spent)),
        placed.flops(),
    )
