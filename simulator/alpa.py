"""`alpa`: inter- and intra-operator parallelism (Zheng et al., OSDI 2022, arXiv 2201.12023).

Each stage of l layers on n devices shards a micro-batch of b samples in the fastest way: tensor
parallel over tp devices and data parallel over dp = n / tp groups of such devices. Tensor
parallelism is that of Megatron, with two all-reduces of activations forward and two backward in
each layer. The time of a stage is

    t = max(compute + tensor all-reduces, activations and gradients to neighbouring stages)
        + gradients / m
    compute   3 l forward ceil(b / dp) / (tp F)
    tensor    4 l ring all-reduces of ceil(b / dp) S d e
    gradients ring all-reduce of 2 l p / tp bytes among dp, once per step

Alpa's dynamic program (`partition`) minimizes T = sum t_i + (m - 1) max t_i over the stages. The
numbers of micro-batches m to try are B / 1, B / 2, B / 4 ..., rounded up, for B samples per step.
The mesh is homogeneous: every device computes and sends at the fleet's mean rates. Memory limits
are those of the real devices. Tensor parallelism divides the weights and activations of a layer
among devices. If the fastest plan does not fit in memory, plans with tp of at least 2, 4, 8 ... are
tried.

The optimizer state is sharded over dp (Alpa's ZeRO rewriting), so a device holds 4 / tp + 12 / n
bytes per parameter. A mesh is divided into at most 32 units of equally many devices. Alpa's program
ignores resharding between stages; here resharding counts as bytes to neighbouring stages. Alpa has
no recovery of its own, so losing a device means a restart from a checkpoint (`pipeline.restart`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from simulator.method import Conditions, Outcome, Part
from simulator.pipeline import (
    Cut,
    PipelineJob,
    Stage,
    best_partition,
    one_f_one_b,
    pipeline_memory,
    restart,
)
from simulator.work import all_reduce_s

_UNITS: Final = 32


@dataclass(frozen=True, slots=True)
class _Mesh:
    """The rates of each device in a mesh of identical devices."""

    flops_per_s: float
    link_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class _Sharding:
    """The sharding of a stage over a given number of devices, and its cost.

    Attributes:
        tensor, data: number of tensor-parallel devices, and number of data-parallel groups.
        samples: samples of a micro-batch in each data-parallel group.
        layer_s: seconds of compute and tensor all-reduces, per layer and micro-batch.
        boundary_s: seconds to exchange activations and gradients with a neighbouring stage, per
            micro-batch.
        gradient_s: seconds of the gradient all-reduce, per layer and step.
        sent_bytes: bytes that a device sends within its stage, per layer and step.
    """

    tensor: int
    data: int
    samples: int
    layer_s: float
    boundary_s: float
    gradient_s: float
    sent_bytes: float


class Alpa:
    """A pipeline of sharded stages on a homogeneous mesh."""

    name = "alpa"

    def outcomes(self, conditions: Conditions) -> list[Outcome]:
        """Return one outcome: the fastest plan that fits in memory, or else the fastest plan."""
        job = PipelineJob.of(conditions)
        micro_batches = sorted({-(-job.batch >> i) for i in range(job.batch.bit_length())})
        tensors = [1 << i for i in range(conditions.spec.heads.bit_length())]
        free = {m: self._with(conditions, job, m, tensors[0]) for m in micro_batches}
        best = min(free.values(), key=_order)
        for m in sorted(free, key=lambda m: free[m].step_s):
            for tensor in tensors:
                found = self._with(conditions, job, m, tensor) if tensor > 1 else free[m]
                best = min(best, found, key=_order)
                # More tensor parallelism would only make the plan slower.
                if found.fits or (best.fits and found.step_s >= best.step_s):
                    break
        return [best]

    def _with(
        self, conditions: Conditions, job: PipelineJob, micro_batches: int, least_tensor: int
    ) -> Outcome:
        rates = conditions.rates
        links = np.minimum(rates.uplink, rates.downlink)
        mesh = _Mesh(float(rates.flops.mean()), float(links.mean()), float(rates.latency_s.mean()))
        units = min(_UNITS, len(rates))
        unit = len(rates) // units
        each = -(-job.batch // micro_batches)
        heads = conditions.spec.heads
        shardings = [
            _best_sharding(job, mesh, size * unit, each, micro_batches, heads, least_tensor)
            for size in range(1, units + 1)
        ]
        cost = np.full((job.layers + 1, units + 1, units + 1), np.inf)
        layers = np.arange(job.layers + 1)
        for size, best in enumerate(shardings, 1):
            column = np.maximum(layers * best.layer_s, best.boundary_s)
            column += layers * best.gradient_s / micro_batches
            for start in range(units - size + 1):
                cost[:, start, start + size] = column
        cuts = best_partition(cost, micro_batches)
        assert cuts is not None  # a plan with one stage on all devices always exists
        return _outcome(conditions, job, cuts, shardings, unit, micro_batches)


def _order(outcome: Outcome) -> tuple[bool, float]:
    return not outcome.fits, outcome.step_s


def _best_sharding(
    job: PipelineJob,
    mesh: _Mesh,
    devices: int,
    each: int,
    micro_batches: int,
    heads: int,
    least_tensor: int,
) -> _Sharding:
    """Return the fastest combination of tensor and data parallelism for a layer.

    Args:
        job: layer sizes and batch.
        mesh: rates of each device.
        devices: number of devices of the stage.
        each: samples per micro-batch.
        micro_batches: micro-batches per step.
        heads: number of attention heads, the maximum number of tensor-parallel devices.
        least_tensor: minimum number of tensor-parallel devices, a power of two. It is reduced if
            the stage has fewer devices.
    """
    found = []
    tensor = min(least_tensor, 1 << (devices.bit_length() - 1))
    while tensor <= min(devices, heads):
        data = min(devices // tensor, each)
        samples = -(-each // data)
        activations = samples * job.layer.boundary_bytes
        gradient = job.gradient_bytes(1) / tensor
        layer_s = job.flops(job.even_layer) * samples / (tensor * mesh.flops_per_s)
        layer_s += 4 * all_reduce_s(activations, tensor, mesh.link_bytes_per_s, mesh.latency_s)
        gradient_s = all_reduce_s(gradient, data, mesh.link_bytes_per_s, mesh.latency_s)
        boundary_s = 2 * activations / tensor / mesh.link_bytes_per_s
        sent = 4 * micro_batches * 2 * (tensor - 1) / tensor * activations
        sent += 2 * (data - 1) / data * gradient
        found.append(_Sharding(tensor, data, samples, layer_s, boundary_s, gradient_s, sent))
        tensor *= 2
    return min(found, key=lambda s: s.layer_s + s.gradient_s / micro_batches)


def _outcome(
    conditions: Conditions,
    job: PipelineJob,
    cuts: list[Cut],
    shardings: list[_Sharding],
    unit: int,
    micro_batches: int,
) -> Outcome:
    roomiest = conditions.rates.take(np.argsort(-conditions.rates.memory, kind="stable"))
    chosen = [shardings[cut.stop - cut.start - 1] for cut in cuts]
    stages = []
    for cut, sharding in zip(cuts, chosen, strict=True):
        used = sharding.tensor * sharding.data
        members = roomiest.take(np.arange(cut.start * unit, cut.start * unit + used))
        state = 4 / sharding.tensor + 12 / used
        stages.append(Stage(cut.layers, members, state, sharding.tensor))
    in_flight = [
        samples * sharding.samples
        for samples, sharding in zip(one_f_one_b(len(cuts), micro_batches, 1), chosen, strict=True)
    ]
    memory = pipeline_memory(job, stages, in_flight)
    alone = len(cuts) == 1
    slots = [
        max(cut.layers * s.layer_s * again, 0.0 if alone else s.boundary_s)
        for cut, s, again in zip(cuts, chosen, memory.again, strict=True)
    ]
    gradients_s = max(c.layers * s.gradient_s for c, s in zip(cuts, chosen, strict=True))
    devices = sum(len(stage.members) for stage in stages)
    sent = sum(
        len(stage.members) * cut.layers * s.sent_bytes
        for stage, cut, s in zip(stages, cuts, chosen, strict=True)
    )
    sent += 2 * (len(cuts) - 1) * job.batch * job.layer.boundary_bytes
    pipeline_s = sum(slots) + (micro_batches - 1) * max(slots)
    widest = max(chosen, key=lambda s: s.tensor)
    return Outcome(
        method=Alpa.name,
        setting=f"{len(cuts)} stages, tp up to {widest.tensor}, "
        f"dp up to {max(s.data for s in chosen)}, m = {micro_batches}",
        devices_used=devices,
        parts=(
            Part("pipeline", pipeline_s),
            Part("gradients", gradients_s),
        ),
        download_bytes=sent / devices,
        upload_bytes=sent / devices,
        memory_offered_bytes=memory.offered_bytes,
        memory_needed_bytes=memory.needed_bytes,
        misfit=memory.misfit,
        recovery=restart(job, stages, pipeline_s + gradients_s),
    )
