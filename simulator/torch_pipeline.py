"""`pipeline`: `torch.distributed.pipelining` with one device per stage.

    t = layers on a sample + receiving      T = sum t_i + (m - 1) max t_i + all-reduce

with micro-batches of one sample, m = B. A stage requests its neighbour's result only when its turn
comes, so transfers add to the compute time instead of overlapping it. The last stage has the head.
If the head is tied to the embedding, the first and last device sum its gradients at the end of a
step (a ring all-reduce of two).

The formulae of published pipelines (`confidant`, `asteroid`) divide the head's work evenly, hide
transfers and send no such gradient. They predict far shorter times than measured
(`benchmarks.side_by_side.simulated`), so comparisons favour these pipelines.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cleave.planner.tiles.shape import RateArrays
from simulator.method import Conditions, Outcome, Part
from simulator.peers import all_reduce_s
from simulator.pipeline import PipelineJob, Stage, one_f_one_b, pipeline_memory
from simulator.work import edge_parameters


class TorchPipeline:
    """A pipeline of single devices with given stages.

    Args:
        layers_of_stages: number of layers of each device, in order. The last also has the head.
    """

    name = "pipeline"

    def __init__(self, layers_of_stages: Sequence[int]) -> None:
        self._layers = layers_of_stages

    def outcomes(self, conditions: Conditions) -> list[Outcome]:
        """Return one row."""
        job, rates, spec = PipelineJob.of(conditions), conditions.rates, conditions.spec
        last = len(self._layers) - 1
        held = [float(n) for n in self._layers]
        held[last] += job.head_layers
        slots = [job.flops(n) / rates.flops[stage] for stage, n in enumerate(held)]
        for stage in range(last):
            slots[stage + 1] += _hop_s(job, rates, stage, stage + 1)  # activations
            slots[stage] += _hop_s(job, rates, stage + 1, stage)  # their gradients
        pipeline_s = float(sum(slots) + (job.batch - 1) * max(slots))
        parts = [Part("pipeline", pipeline_s)]
        sent = 2 * job.batch * job.layer.boundary_bytes * last / (last + 1)
        if spec.tied_head and last:
            embedding = edge_parameters(spec) * job.element_bytes
            ends = rates.take(np.array([0, last]))
            link = float(min(ends.uplink.min(), ends.downlink.min()))
            latency_s = float(ends.latency_s.max())
            parts.append(Part("embedding", all_reduce_s(embedding, 2, link, latency_s)))
            sent += 2 * embedding / (last + 1)
        stages = [Stage(n, rates.take(np.array([number]))) for number, n in enumerate(self._layers)]
        memory = pipeline_memory(job, stages, one_f_one_b(last + 1, job.batch, 1))
        return [
            Outcome(
                method=self.name,
                setting=f"layers {'+'.join(map(str, self._layers))}",
                devices_used=last + 1,
                parts=tuple(parts),
                download_bytes=sent,
                upload_bytes=sent,
                memory_offered_bytes=memory.offered_bytes,
                memory_needed_bytes=memory.needed_bytes,
                misfit=memory.misfit,
            )
        ]


def _hop_s(job: PipelineJob, rates: RateArrays, sender: int, receiver: int) -> float:
    """Return the seconds to send one sample's activations from one device to another."""
    link = min(rates.uplink[sender], rates.downlink[receiver])
    latency_s = (rates.latency_s[sender] + rates.latency_s[receiver]) / 2  # rates have round trips
    return float(job.layer.boundary_bytes / link + latency_s)
