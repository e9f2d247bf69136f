"""`asteroid`: a hybrid pipeline on unequal devices (Ye et al., MobiCom 2024, arXiv 2408.08015).

A stage is a group of data-parallel devices. The devices of a group divide each micro-batch of b
samples in proportion to their compute rates. Devices are sorted by link rate, and consecutive
devices form groups. The time of a stage with l layers is

    t = max(3 l forward b / sum F, 2 b S d e / sum of links) + gradients / m
    gradients   ring all-reduce of 2 l p bytes over the slowest link of the group, once per step

and that of a step is T = sum t_i + (m - 1) max t_i. A dynamic program over layers and devices
minimizes T. It skips groups in which a device cannot hold the state of the stage's layers in
memory. If that leaves no plan, the program runs again without memory limits. Stage p = 0 ... P - 1
keeps the activations of K_p = 2 (P - p) - 1 micro-batches, at most m. Micro-batch sizes b are
powers of two. A device may get a fraction of a sample, but a group has at most b devices. The
devices are divided into at most 32 units of equally many devices, and a group consists of units.

Recovery is by pipeline replay. If the lost device shared its stage with other devices, the stage
continues with the other devices. Otherwise, a neighbour sends a backup of the stage's states at the
median uplink rate. The micro-batches in flight are then computed again. A restart from a checkpoint
(`pipeline.restart`) replaces the replay if the restart is faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from cleave.planner.tiles.shape import Floats, RateArrays
from simulator.method import Conditions, Outcome, Part
from simulator.pipeline import Cut, PipelineJob, Stage, best_partition, pipeline_memory, restart
from simulator.work import STATE_BYTES

_UNITS: Final = 32


@dataclass(frozen=True, slots=True)
class _Groups:
    """Aggregate figures of every possible group, which is a range of consecutive units.

    Each array has the index [start, stop], where `stop` is exclusive. Entries with start >= stop
    are NaN.

    Attributes:
        devices: number of devices in the group.
        flops, links: sums of the FLOP/s and of the link rates of the group's devices.
        slowest: lowest link rate in the group, in bytes/s.
        least_memory: smallest memory in the group, in bytes.
    """

    devices: Floats
    flops: Floats
    links: Floats
    slowest: Floats
    least_memory: Floats

    @classmethod
    def of(cls, rates: RateArrays, unit: int) -> _Groups:
        """Return the figures of all groups.

        Args:
            rates: rates of the devices, sorted so that consecutive devices may form a group.
            unit: number of devices per unit; it divides the number of devices.
        """
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

    def gradients_s(self, job: PipelineJob, layers: Floats) -> Floats:
        """Return the seconds of a ring all-reduce of the gradients of `layers` layers per group."""
        n = self.devices
        found: Floats = 2 * (n - 1) / n * job.gradient_bytes(1) * layers / self.slowest
        return found


class Asteroid:
    """A pipeline of data-parallel groups, which is planned within the devices' memory limits."""

    name = "asteroid"

    def outcomes(self, conditions: Conditions) -> list[Outcome]:
        """Return one outcome: the fastest plan that fits in memory, or else the fastest plan."""
        job = PipelineJob.of(conditions)
        tried = [self._with(conditions, job, 1 << i) for i in range(job.batch.bit_length())]
        return [min(tried, key=lambda outcome: (not outcome.fits, outcome.step_s))]

    def _with(self, conditions: Conditions, job: PipelineJob, each: int) -> Outcome:
        rates = conditions.rates
        fastest = np.argsort(-np.minimum(rates.uplink, rates.downlink), kind="stable")
        most = min(len(fastest), each * job.layers)
        unit = min(-(-most // _UNITS), each)
        units = min(most // unit, _UNITS)
        used = rates.take(fastest[: units * unit])
        groups, micro_batches = _Groups.of(used, unit), -(-job.batch // each)
        layers = np.arange(job.layers + 1, dtype=np.float64)[:, None, None]
        boundary = 2 * each * job.layer.boundary_bytes / groups.links
        compute = job.flops(job.even_layer) * layers * each / groups.flops
        cost = np.maximum(compute, boundary) + groups.gradients_s(job, layers) / micro_batches
        cost[:, ~(groups.devices <= each)] = np.inf
        roomy = STATE_BYTES * layers * job.layer.parameters <= groups.least_memory
        cuts = best_partition(np.where(roomy, cost, np.inf), micro_batches)
        if cuts is None:
            cuts = best_partition(cost, micro_batches)
        assert cuts is not None  # a plan with all layers on the first unit always exists
        return _outcome(job, used, groups, cuts, unit, each)


def _outcome(
    job: PipelineJob, used: RateArrays, groups: _Groups, cuts: list[Cut], unit: int, each: int
) -> Outcome:
    micro_batches, stages = -(-job.batch // each), len(cuts)
    members = [used.take(np.arange(cut.start * unit, cut.stop * unit)) for cut in cuts]
    held = [Stage(cut.layers, group) for cut, group in zip(cuts, members, strict=True)]
    in_flight = [
        min(2 * (stages - p) - 1, micro_batches) * each / len(group)
        for p, group in enumerate(members)
    ]
    memory = pipeline_memory(job, held, in_flight)
    slots, gradients = [], []
    for cut, again in zip(cuts, memory.again, strict=True):
        run = (cut.start, cut.stop)
        compute_s = again * job.flops(job.even_layer) * cut.layers * each / groups.flops[run]
        link_s = 2 * each * job.layer.boundary_bytes / groups.links[run] if stages > 1 else 0.0
        slots.append(float(max(compute_s, link_s)))
        gradients.append(float(groups.gradients_s(job, np.array(float(cut.layers)))[run]))
    devices = sum(len(group) for group in members)
    sent = 2 * (stages - 1) * job.batch * job.layer.boundary_bytes
    sent += sum(
        2 * (len(group) - 1) * job.gradient_bytes(cut.layers)
        for cut, group in zip(cuts, members, strict=True)
    )
    # A stage with several devices continues without the lost device. For a stage with one device, a
    # neighbour has a backup of the states.
    alone = [cut.layers for cut, group in zip(cuts, members, strict=True) if len(group) == 1]
    backup = STATE_BYTES * max(alone, default=0) * job.layer.parameters
    latency_s = 2 * (stages - 1) * float(used.latency_s.max())
    replay = (
        Part("states", backup / float(np.median(used.uplink))),
        Part("pipeline replay", min(2 * stages - 1, micro_batches) * max(slots)),
    )
    pipeline_s = sum(slots) + (micro_batches - 1) * max(slots) + latency_s
    step_s = pipeline_s + max(gradients)
    ways = (replay, restart(job, held, step_s))
    return Outcome(
        method=Asteroid.name,
        setting=f"{stages} stages of up to {max(len(g) for g in members)}, b = {each}, "
        f"m = {micro_batches}",
        devices_used=devices,
        parts=(
            Part("pipeline", pipeline_s),
            Part("gradients", max(gradients)),
        ),
        download_bytes=sent / devices,
        upload_bytes=sent / devices,
        memory_offered_bytes=memory.offered_bytes,
        memory_needed_bytes=memory.needed_bytes,
        misfit=memory.misfit,
        recovery=min(ways, key=lambda parts: sum(part.seconds for part in parts)),
    )
