"""`asteroid`: a hybrid pipeline on unequal devices (Ye et al., MobiCom 2024, arXiv 2408.08015).

A stage is a group of data-parallel devices, which divide each micro-batch of b samples in
proportion to their compute rates F. Devices are sorted by link rate, and consecutive devices form
groups. With m micro-batches, the time of a stage with l layers is

    t = max(3 l forward b / sum F, 2 b S d e / sum of links) + gradients / m
    gradients   ring all-reduce of l p e bytes over the slowest link of the group, once per step

for `forward` FLOPs and p parameters per layer, S tokens per sample, width d and e bytes per
element. The time of a step is T = sum t_i + (m - 1) max t_i. A dynamic program (`best_partition`)
minimizes T. It skips groups in which a device cannot hold the state of the stage's layers. If no
plan remains, memory limits are ignored. Stage p of P keeps the activations of 2 (P - p) - 1
micro-batches, at most m. Micro-batch sizes b are powers of two. A device may get a fraction of a
sample, but a group has at most b devices. Groups consist of units, at most 32 in total, each
with the same number of devices.

Devices recover by pipeline replay. A stage with several devices continues without the lost device.
Otherwise, a neighbour sends a backup of the stage's state at the median uplink rate. The
micro-batches in flight are then recomputed. The step restarts from a checkpoint if that is faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from cleave.planner.tiles.shape import Floats, RateArrays
from simulator.method import Conditions, Outcome, Part, best
from simulator.pipeline import (
    PipelineJob,
    Stage,
    best_partition,
    pipeline_memory,
    pipeline_outcome,
    pipeline_s,
    restart,
)
from simulator.work import STATE_BYTES

_UNITS: Final = 32


@dataclass(frozen=True, slots=True)
class _Groups:
    """Rates and memory of all groups, as arrays. A group consists of consecutive units.

    Entry [start, stop] is for the group of units `start` to `stop - 1`. Entries with start >= stop
    are NaN. `flops` and `links` are sums over the group's devices. `slowest` is the lowest link
    rate, and `least_memory` the smallest memory in the group.
    """

    devices: Floats
    flops: Floats
    links: Floats
    slowest: Floats
    least_memory: Floats

    @classmethod
    def of(cls, rates: RateArrays, unit: int) -> _Groups:
        """Return the rates and memory of all groups. A unit is `unit` consecutive devices."""
        units = len(rates) // unit
        link = np.minimum(rates.uplink, rates.downlink)

        def sums(values: Floats) -> Floats:
            ends = np.concatenate(([0.0], np.cumsum(values.reshape(units, unit).sum(axis=1))))
            found: Floats = ends[None, :] - ends[:, None]
            found[np.tril_indices(units + 1)] = np.nan
            return found

        def least(values: Floats) -> Floats:
            found = np.full((units + 1, units + 1), np.nan)
            each = values.reshape(units, unit).min(axis=1)
            for start in range(units):
                found[start, start + 1 :] = np.minimum.accumulate(each[start:])
            return found

        ones = np.ones(len(rates))
        return cls(sums(ones), sums(rates.flops), sums(link), least(link), least(rates.memory))


class Asteroid:
    """A pipeline of data-parallel groups, planned within the devices' memory limits."""

    name = "asteroid"

    def outcomes(self, conditions: Conditions) -> list[Outcome]:
        """Return one outcome: the fastest plan that fits in memory, or else the fastest plan."""
        job = PipelineJob.of(conditions)
        return [best(_planned(conditions, job, 1 << i) for i in range(job.batch.bit_length()))]


def _planned(conditions: Conditions, job: PipelineJob, each: int) -> Outcome:
    fastest = conditions.fastest_links
    most = min(len(fastest), each * job.layers)
    unit = min(-(-most // _UNITS), each)
    units = min(most // unit, _UNITS)
    used = conditions.rates.take(fastest[: units * unit])
    groups, micro_batches = _Groups.of(used, unit), -(-job.batch // each)
    layers = np.arange(job.layers + 1, dtype=np.float64)[:, None, None]
    boundary = 2 * each * job.layer.boundary_bytes / groups.links
    compute = job.flops(job.even_layer) * layers * each / groups.flops
    n = groups.devices
    gradients = 2 * (n - 1) / n * job.gradient_bytes(1) * layers / groups.slowest
    cost = np.maximum(compute, boundary) + gradients / micro_batches
    cost[:, ~(n <= each)] = np.inf
    roomy = STATE_BYTES * layers * job.layer.parameters <= groups.least_memory
    cuts = best_partition(np.where(roomy, cost, np.inf), micro_batches)
    if cuts is None:
        cuts = best_partition(cost, micro_batches)
    assert cuts is not None  # a plan with all layers on the first unit always exists

    stages = len(cuts)
    members = [used.take(np.arange(cut.start * unit, cut.stop * unit)) for cut in cuts]
    held = [Stage(cut.layers, group) for cut, group in zip(cuts, members, strict=True)]
    in_flight = [
        min(2 * (stages - p) - 1, micro_batches) * each / len(group)
        for p, group in enumerate(members)
    ]
    memory = pipeline_memory(job, held, in_flight)
    slots, gradients_s = [], max(float(gradients[cut]) for cut in cuts)
    for cut, again in zip(cuts, memory.again, strict=True):
        run = (cut.start, cut.stop)
        compute_s = again * job.flops(job.even_layer) * cut.layers * each / groups.flops[run]
        link_s = boundary[run] if stages > 1 else 0.0
        slots.append(float(max(compute_s, link_s)))
    sent = 2 * (stages - 1) * job.batch * job.layer.boundary_bytes
    sent += sum(
        2 * (len(group) - 1) * job.gradient_bytes(cut.layers)
        for cut, group in zip(cuts, members, strict=True)
    )
    alone = [cut.layers for cut, group in zip(cuts, members, strict=True) if len(group) == 1]
    backup = STATE_BYTES * max(alone, default=0) * job.layer.parameters
    latency_s = 2 * (stages - 1) * float(used.latency_s.max())
    replay = (
        Part("states", backup / float(np.median(used.uplink))),
        Part("pipeline replay", min(2 * stages - 1, micro_batches) * max(slots)),
    )
    busy_s = pipeline_s(slots, micro_batches) + latency_s
    ways = (replay, restart(job, held, busy_s + gradients_s))
    return pipeline_outcome(
        Asteroid.name,
        f"{stages} stages of up to {max(len(g) for g in members)}, b = {each}, m = {micro_batches}",
        held,
        memory,
        (Part("pipeline", busy_s), Part("gradients", gradients_s)),
        sent,
        min(ways, key=lambda parts: sum(part.seconds for part in parts)),
    )
