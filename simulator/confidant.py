"""`confidant`: a pipeline with one device per stage (Chen et al. 2023, arXiv 2311.13381).

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

import numpy as np

from simulator.method import Conditions, Outcome, Part
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
from simulator.work import STATE_BYTES


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
