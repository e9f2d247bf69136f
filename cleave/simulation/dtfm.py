"""`dtfm`: data and pipeline parallel over peers (Yuan et al., NeurIPS 2022, arXiv 2206.01288).

P stages of R replicas hold the layers, as even as possible. Its scheduler (`dtfm_search`) models
communication alone; compute is charged here, of the slowest device of a stage, and memory of 16
bytes a parameter with what 1F1B keeps in flight. Micro-batches are single samples, m = B / R for
each pipeline. Three rows from one model:

    dtfm (formula)    DP + PP as published, PP with the activations of all m samples at once, and
                      a perfectly filled pipeline of compute, (m + P - 1) slots
    dtfm (pipelined)  one sample along the whole path forward and backward + (m - 1) slots + DP; a
                      slot is the slowest stage's compute or the slowest link's activations and
                      gradients, whichever is longer: all overlapped
    dtfm (serial)     m times the whole path forward and backward, nothing overlapped, + DP

The grid P x R is chosen for each row by its own time, among all that B samples and the layers
allow; one that fits comes before one that does not. Devices that it does not need are those of the
slowest links.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from cleave.planner.shape import Floats
from cleave.simulation.dtfm_search import Problem, Schedule, first_guess, search
from cleave.simulation.method import Conditions, Outcome, Part
from cleave.simulation.pipeline import (
    Job,
    Memory,
    Stage,
    layers_of_stages,
    one_f_one_b,
    pipeline_memory,
)


@dataclass(frozen=True, slots=True)
class _Placed:
    """A schedule with what its stages hold."""

    job: Job
    problem: Problem
    schedule: Schedule
    memory: Memory

    @property
    def micro_batches(self) -> int:
        return -(-self.job.batch // self.problem.replicas)

    def compute_s(self) -> Floats:
        """By stage, a sample forward and backward on its slowest device."""
        layers = np.array(layers_of_stages(self.job.layers, self.problem.stages), np.float64)
        layers[-1] += self.job.head_layers
        slowest = self.problem.rates.flops[self.schedule.groups].min(axis=1)
        each_s: Floats = self.memory.again * self.job.flops(1) * layers / slowest
        return each_s

    def formula(self) -> tuple[Part, ...]:
        slots = self.micro_batches + self.problem.stages - 1
        return (
            Part("compute", slots * float(self.compute_s().max())),
            Part("stage to stage", self.schedule.pp_s),
            Part("gradients", self.schedule.dp_s),
        )

    def pipelined(self) -> tuple[Part, ...]:
        # A device between two others sends a sample's activations on and its gradient back.
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
        """A sample along the whole path, forward and backward."""
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


class Dtfm:
    """Decentralised training of foundation models."""

    name = "dtfm"

    def outcomes(self, conditions: Conditions) -> list[Outcome]:
        """Three rows: as published, fully pipelined, serial."""
        job = Job.of(conditions)
        problems = _problems(conditions, job)
        guesses = [_placed(job, problem, first_guess(problem)) for problem in problems]
        searched: dict[int, _Placed] = {}
        rows = []
        for variant, parts in _VARIANTS.items():
            scores = [
                (bool(guess.memory.misfit), sum(p.seconds for p in parts(guess)))
                for guess in guesses
            ]
            best = scores.index(min(scores))
            if best not in searched:
                schedule = search(problems[best], conditions.seed)
                searched[best] = _placed(job, problems[best], schedule)
            rows.append(_outcome(variant, searched[best], parts))
        return rows


def _problems(conditions: Conditions, job: Job) -> list[Problem]:
    """Every number of layers that the largest stage may have, with 1, 2, 4 ... replicas."""
    rates = conditions.rates
    fastest = np.argsort(-np.minimum(rates.uplink, rates.downlink), kind="stable")
    found = []
    for largest in range(1, job.layers + 1):
        stages = -(-job.layers // largest)
        if -(-job.layers // stages) != largest or stages > len(fastest):
            continue
        most = min(job.batch, len(fastest) // stages)
        for replicas in sorted({most, *(1 << i for i in range(most.bit_length()))}):
            samples = -(-job.batch // replicas)
            if -(-job.batch // samples) < replicas:
                continue  # fewer replicas have as many samples each
            chosen = rates.take(np.sort(fastest[: stages * replicas]))
            activations = samples * job.layer.boundary_bytes
            gradient = job.gradient_bytes(largest)
            found.append(Problem(chosen, stages, replicas, gradient, activations))
    return found


def _placed(job: Job, problem: Problem, schedule: Schedule) -> _Placed:
    layers = layers_of_stages(job.layers, problem.stages)
    stages = [
        Stage(held, problem.rates.take(group))
        for held, group in zip(layers, schedule.groups, strict=True)
    ]
    micro_batches = -(-job.batch // problem.replicas)
    in_flight = one_f_one_b(problem.stages, micro_batches, 1)
    return _Placed(job, problem, schedule, pipeline_memory(job, stages, in_flight))


def _outcome(
    variant: str, placed: _Placed, parts: Callable[[_Placed], tuple[Part, ...]]
) -> Outcome:
    problem, memory, schedule = placed.problem, placed.memory, placed.schedule
    stages, replicas = problem.stages, problem.replicas
    between = 2 * placed.job.batch * placed.job.layer.boundary_bytes * (stages - 1)
    moved = between / (stages * replicas) + 2 * (replicas - 1) / replicas * problem.c_dp_bytes
    gap = schedule.pp_s / schedule.path_bound_s - 1 if schedule.path_bound_s else 0.0
    return Outcome(
        method=f"{Dtfm.name} ({variant})",
        setting=f"{stages} stages x {replicas}, path within {gap:.1%} of a bound",
        devices_used=stages * replicas,
        parts=parts(placed),
        download_bytes=moved,
        upload_bytes=moved,
        memory_offered_bytes=memory.offered_bytes,
        memory_needed_bytes=memory.needed_bytes,
        misfit=memory.misfit,
    )
