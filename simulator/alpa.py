"""Pipelines whose stages are found by dynamic programming.

`alpa`: inter- and intra-operator parallelism (Zheng et al., OSDI 2022, arXiv 2201.12023).

A stage of l layers on n devices uses the fastest sharding of a micro-batch of b samples: tensor
parallelism in groups of tp devices, and data parallelism over dp = n / tp groups. Tensor
parallelism works as in Megatron: each layer all-reduces activations twice in the forward pass and
twice in the backward pass. The time of a stage is

    t = max(compute + tensor, boundary) + gradients / m
    compute   3 l forward ceil(b / dp) / (tp F)
    tensor    4 l ring all-reduces of ceil(b / dp) S d e bytes
    boundary  activations and gradients to and from a neighbouring stage
    gradients ring all-reduce of l p e / tp bytes among dp devices, once per step

for `forward` FLOPs and p parameters per layer, devices of F FLOP/s, S tokens per sample, width d
and e bytes per element. Alpa's dynamic program (`best_partition`) minimizes the time of a step
T = sum t_i + (m - 1) max t_i. The values tried for m, the number of micro-batches, are the batch
size divided by 1, 2, 4 ..., rounded up. The mesh is homogeneous: every device computes and sends at
the fleet's mean rates, but keeps its real memory. If the fastest plan does not fit in memory, plans
with tp of at least 2, 4, 8 ... are tried. The optimizer state is sharded over dp (Alpa's ZeRO
rewriting), so a device holds 4 / tp + 12 / n bytes per parameter. The mesh is divided into at most
32 units, each with the same number of devices. Alpa's program ignores resharding between stages.
Here, `boundary` includes it. Alpa has no recovery. If a device is lost, the step restarts from a
checkpoint.

`confidant`: a pipeline with one device per stage (Chen et al. 2023, arXiv 2311.13381).

A dynamic program over layers and devices minimizes the time T of a step. A stage of l layers on a
device of F FLOP/s takes the time t:

    t = max(3 l forward / F, 2 S d e / link)        T = sum t_i + (m - 1) max t_i

for `forward` FLOPs per layer, S tokens per sample, width d and e bytes per element. Micro-batches
have one sample each, so m is the batch size. The 1F1B schedule keeps min(P - p, m) micro-batches in
flight on stage p of P. The devices with the fastest links are used, at most one per layer. A device
gets at most as many layers as fit in its memory with gradients and optimizer state. If no plan
remains, memory limits are ignored. After the loss of a device, a step restarts from a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from simulator.method import Conditions, Outcome, Part, best
from simulator.pipeline import (
    PipelineJob,
    Stage,
    best_partition,
    one_f_one_b,
    pipeline_memory,
    pipeline_outcome,
    pipeline_s,
    restart,
)
from simulator.work import STATE_BYTES, all_reduce_s

_UNITS: Final = 32


@dataclass(frozen=True, slots=True)
class _Sharding:
    """The sharding of a stage over several devices, and the cost of the sharding.

    Attributes:
        tensor, data: devices per tensor-parallel group, and number of data-parallel groups.
        samples: number of samples per micro-batch in each data-parallel group.
        layer_s: time of compute and tensor all-reduces in seconds, per layer and micro-batch.
        boundary_s: time of the exchange with a neighbouring stage in seconds, per micro-batch.
        gradient_s: time of the gradient all-reduce in seconds, per layer and step.
        sent_bytes: number of bytes that a device sends within its stage, per layer and step.
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
        micro_batches = {-(-job.batch >> i) for i in range(job.batch.bit_length())}
        free = {m: _planned(conditions, job, m, 1) for m in sorted(micro_batches)}
        chosen = best(free.values())
        for m in sorted(free, key=lambda m: free[m].step_s):
            for i in range(conditions.spec.heads.bit_length()):
                found = _planned(conditions, job, m, 1 << i) if i else free[m]
                chosen = best((chosen, found))
                # More tensor parallelism would only make the plan slower.
                if found.fits or (chosen.fits and found.step_s >= chosen.step_s):
                    break
        return [chosen]


def _planned(
    conditions: Conditions, job: PipelineJob, micro_batches: int, least_tensor: int
) -> Outcome:
    """Return the fastest plan in which tensor parallelism is at least `least_tensor`-way."""
    rates = conditions.rates
    link = float(np.minimum(rates.uplink, rates.downlink).mean())
    flops_per_s, latency_s = float(rates.flops.mean()), float(rates.latency_s.mean())
    units = min(_UNITS, len(rates))
    unit = len(rates) // units
    each = -(-job.batch // micro_batches)

    def sharded(devices: int, tensor: int) -> _Sharding:
        data = min(devices // tensor, each)
        samples = -(-each // data)
        activations = samples * job.layer.boundary_bytes
        gradient = job.gradient_bytes(1) / tensor
        layer_s = job.flops(job.even_layer) * samples / (tensor * flops_per_s)
        layer_s += 4 * all_reduce_s(activations, tensor, link, latency_s)
        gradient_s = all_reduce_s(gradient, data, link, latency_s)
        boundary_s = 2 * activations / tensor / link
        sent = 4 * micro_batches * 2 * (tensor - 1) / tensor * activations
        sent += 2 * (data - 1) / data * gradient
        return _Sharding(tensor, data, samples, layer_s, boundary_s, gradient_s, sent)

    def fastest(devices: int) -> _Sharding:
        most = min(devices, conditions.spec.heads)
        # A stage with fewer devices than `least_tensor` uses all of them.
        least = min(least_tensor, 1 << (devices.bit_length() - 1))
        tensors = (1 << i for i in range(most.bit_length()) if 1 << i >= least)
        found = [sharded(devices, tensor) for tensor in tensors]
        return min(found, key=lambda s: s.layer_s + s.gradient_s / micro_batches)

    shardings = [fastest(size * unit) for size in range(1, units + 1)]
    cost = np.full((job.layers + 1, units + 1, units + 1), np.inf)
    layers = np.arange(job.layers + 1)
    for size, of in enumerate(shardings, 1):
        column = np.maximum(layers * of.layer_s, of.boundary_s)
        column += layers * of.gradient_s / micro_batches
        for start in range(units - size + 1):
            cost[:, start, start + size] = column
    cuts = best_partition(cost, micro_batches)
    assert cuts is not None  # a plan with one stage on all devices always exists
    chosen = [shardings[cut.stop - cut.start - 1] for cut in cuts]

    roomiest = rates.take(np.argsort(-rates.memory, kind="stable"))
    stages, sent = [], 2.0 * (len(cuts) - 1) * job.batch * job.layer.boundary_bytes
    for cut, s in zip(cuts, chosen, strict=True):
        used = s.tensor * s.data
        members = roomiest.take(np.arange(cut.start * unit, cut.start * unit + used))
        stages.append(Stage(cut.layers, members, 4 / s.tensor + 12 / used, s.tensor))
        sent += used * cut.layers * s.sent_bytes
    kept = one_f_one_b(len(cuts), micro_batches)
    in_flight = [count * s.samples for count, s in zip(kept, chosen, strict=True)]
    memory = pipeline_memory(job, stages, in_flight)
    slots = [
        max(cut.layers * s.layer_s * again, s.boundary_s if len(cuts) > 1 else 0.0)
        for cut, s, again in zip(cuts, chosen, memory.again, strict=True)
    ]
    gradients_s = max(c.layers * s.gradient_s for c, s in zip(cuts, chosen, strict=True))
    busy_s = pipeline_s(slots, micro_batches)
    return pipeline_outcome(
        Alpa.name,
        f"{len(cuts)} stages, tp up to {max(s.tensor for s in chosen)}, "
        f"dp up to {max(s.data for s in chosen)}, m = {micro_batches}",
        stages,
        memory,
        (Part("pipeline", busy_s), Part("gradients", gradients_s)),
        sent,
        restart(job, stages, busy_s + gradients_s),
    )


class Confidant:
    """A pipeline in which each stage is a single device."""

    name = "confidant"

    def outcomes(self, conditions: Conditions) -> list[Outcome]:
        """Return one outcome: the fastest plan of the dynamic program."""
        job, rates = PipelineJob.of(conditions), conditions.rates
        used = rates.take(conditions.fastest_links[: job.layers])
        units = len(used)
        layers = np.arange(job.layers + 1, dtype=np.float64)[:, None]
        compute_s = job.flops(job.even_layer) * layers / used.flops
        link_s = 2 * job.layer.boundary_bytes / np.minimum(used.uplink, used.downlink)
        single = np.maximum(compute_s, link_s)
        roomy = STATE_BYTES * layers * job.layer.parameters <= used.memory
        cuts = None
        for possible in (np.where(roomy, single, np.inf), single):
            cost = np.full((job.layers + 1, units + 1, units + 1), np.inf)
            cost[:, np.arange(units), np.arange(1, units + 1)] = possible
            cuts = cuts or best_partition(cost, job.batch)
        assert cuts is not None  # a plan with all layers on one device always exists
        stages = [Stage(cut.layers, used.take(np.array([cut.start]))) for cut in cuts]
        memory = pipeline_memory(job, stages, one_f_one_b(len(cuts), job.batch))
        slots = [
            max(compute_s[c.layers, c.start] * again, link_s[c.start] if len(cuts) > 1 else 0.0)
            for c, again in zip(cuts, memory.again, strict=True)
        ]
        latency_s = 2 * (len(cuts) - 1) * float(used.latency_s.max())
        step_s = pipeline_s(slots, job.batch) + latency_s
        return [
            pipeline_outcome(
                self.name,
                f"{len(cuts)} stages of up to {max(c.layers for c in cuts)} layers",
                stages,
                memory,
                (Part("pipeline", step_s),),
                2 * (len(cuts) - 1) * job.batch * job.layer.boundary_bytes,
                restart(job, stages, step_s),
            )
        ]
