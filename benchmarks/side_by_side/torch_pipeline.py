"""`pipeline`: `torch.distributed.pipelining` with one device per stage.

    t_i = compute of one sample + its transfers to stage i
    T   = sum t_i + (m - 1) max t_i + all-reduce

Micro-batches have one sample each, so m is the batch size. A stage starts a transfer only when it
needs the data, so transfers do not overlap with compute. The last stage has the LM head. If the
LM head shares its weight with the embedding, the first and the last device all-reduce the gradients
of that weight at the end of a step.

The models of `confidant` and `asteroid` divide the LM head evenly among the stages, overlap all
transfers with compute, and do not all-reduce the shared weight. They predict far shorter times than
measured (`benchmarks.side_by_side.simulated`), which favours `confidant` and `asteroid`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cleave.planner.tiles.shape import RateArrays
from simulator.method import Conditions, Outcome, Part
from simulator.pipeline import (
    PipelineJob,
    Stage,
    one_f_one_b,
    pipeline_memory,
    pipeline_outcome,
    pipeline_s,
)
from simulator.work import all_reduce_s, edge_parameters


class TorchPipeline:
    """A pipeline with one device per stage. `layers_of_stages` lists the stages' layer counts."""

    name = "pipeline"

    def __init__(self, layers_of_stages: Sequence[int]) -> None:
        self._layers = layers_of_stages

    def outcomes(self, conditions: Conditions) -> list[Outcome]:
        """Return one outcome. Device i of the fleet runs stage i."""
        job, rates, spec = PipelineJob.of(conditions), conditions.rates, conditions.spec
        last = len(self._layers) - 1
        held = [float(n) for n in self._layers]
        held[last] += job.head_layers
        slots = [job.flops(n) / rates.flops[stage] for stage, n in enumerate(held)]
        for stage in range(last):
            slots[stage + 1] += _hop_s(job, rates, stage, stage + 1)  # activations
            slots[stage] += _hop_s(job, rates, stage + 1, stage)  # gradients of activations
        parts = [Part("pipeline", pipeline_s(slots, job.batch))]
        sent = 2 * job.batch * job.layer.boundary_bytes * last
        if spec.tied_head and last:
            embedding = edge_parameters(spec) * job.element_bytes
            ends = rates.take(np.array([0, last]))
            link = float(min(ends.uplink.min(), ends.downlink.min()))
            latency_s = float(ends.latency_s.max())
            parts.append(Part("embedding", all_reduce_s(embedding, 2, link, latency_s)))
            sent += 2 * embedding
        stages = [Stage(n, rates.take(np.array([number]))) for number, n in enumerate(self._layers)]
        memory = pipeline_memory(job, stages, one_f_one_b(last + 1, job.batch))
        setting = f"layers {'+'.join(map(str, self._layers))}"
        return [pipeline_outcome(self.name, setting, stages, memory, tuple(parts), sent)]


def _hop_s(job: PipelineJob, rates: RateArrays, sender: int, receiver: int) -> float:
    """Return the time in seconds to send one sample's activations from one stage to another."""
    link = min(rates.uplink[sender], rates.downlink[receiver])
    latency_s = (rates.latency_s[sender] + rates.latency_s[receiver]) / 2  # half of each round trip
    return float(job.layer.boundary_bytes / link + latency_s)
