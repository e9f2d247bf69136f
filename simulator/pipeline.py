"""What pipelines share: layers of stages, memory of devices, the 1F1B schedule.

Pipelined methods take ``sum t + (m - 1) max t`` for stages of t_p seconds and m micro-batches. 1F1B
takes exactly that if stages are equal, m + P - 1 slots, or if the slowest stage is the last (in
DT-FM it has the LM head). Otherwise 1F1B takes less, by at most the time of the stages after the
slowest: they are hidden once, in the first micro-batch. So the difference is at most a share of
P / m (`tests/simulator/test_pipeline.py` runs the schedule).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cleave.planner.tiles.shape import Floats, RateArrays
from simulator.method import Conditions, Part
from simulator.peers import RECOMPUTE, misfit, stage_need, tightest
from simulator.work import STATE_BYTES, LayerWork, head_flops, layer_work


@dataclass(frozen=True, slots=True)
class PipelineJob:
    """What a pipeline must compute: identical layers, and an LM head on its last stage.

    Attributes:
        head_layers: FLOPs of the head, as a number of layers; its memory is not counted.
        element_bytes: bytes of each activation, weight or gradient element that is sent.
    """

    layers: int
    layer: LayerWork
    head_layers: float
    batch: int
    element_bytes: int

    @classmethod
    def of(cls, conditions: Conditions) -> PipelineJob:
        """Return the job for these conditions."""
        layer = layer_work(conditions.spec, conditions.seq, conditions.element.sent)
        head = head_flops(conditions.spec, conditions.seq) / layer.forward_flops
        return cls(conditions.spec.layers, layer, head, conditions.batch, conditions.element.sent)

    def flops(self, layers: float) -> float:
        """Return the FLOPs of this many layers on a sample, forward and backward."""
        return 3 * layers * self.layer.forward_flops

    @property
    def even_layer(self) -> float:
        """Return the length in layers of a layer with its share of an evenly spread head."""
        return 1 + self.head_layers / self.layers

    def gradient_bytes(self, layers: float) -> float:
        """Return the bytes of the layers' gradient, as sent between replicas."""
        return layers * self.layer.parameters * self.element_bytes


@dataclass(frozen=True, slots=True)
class Stage:
    """Some layers and the devices that hold them.

    Attributes:
        state_bytes: bytes that each device holds for a parameter.
        sharded: number of devices that share what a layer keeps of a sample.
    """

    layers: int
    members: RateArrays
    state_bytes: float = STATE_BYTES
    sharded: int = 1


@dataclass(frozen=True, slots=True)
class StageMemory:
    """The memory of a pipeline's devices.

    Attributes:
        again: by stage, the factor on its compute from recomputing activations; 1 without.
        needed_bytes, offered_bytes: those of the device with the least memory for its part.
        misfit: why devices do not fit; empty if all do.
    """

    again: Floats
    needed_bytes: float
    offered_bytes: float
    misfit: str


def layers_of_stages(layers: int, stages: int) -> list[int]:
    """Divide layers as evenly as possible; the last stages have fewer, as the last has the head."""
    return [layers // stages + (s < layers % stages) for s in range(stages)]


def pipeline_memory(
    job: PipelineJob, stages: Sequence[Stage], in_flight: Sequence[float]
) -> StageMemory:
    """Return the memory of a pipeline's devices, and whether each holds its stage.

    Args:
        in_flight: by stage, number of samples of one device between forward and backward.
    """
    again, needed, offered = [], [], []
    for stage, samples in zip(stages, in_flight, strict=True):
        least = float(stage.members.memory.min())
        need = stage_need(job.layer, stage.layers, samples, least, stage.state_bytes, stage.sharded)
        again.append(RECOMPUTE if need.recompute else 1.0)
        needed.append(np.full(len(stage.members), need.memory_bytes))
        offered.append(stage.members.memory)
    all_needed, all_offered = np.concatenate(needed), np.concatenate(offered)
    worst = tightest(all_needed, all_offered)
    return StageMemory(np.array(again), *worst, misfit(all_needed, all_offered))


def restart(job: PipelineJob, stages: Sequence[Stage], step_s: float) -> tuple[Part, ...]:
    """Return the cost of a lost device with a restart from a checkpoint, made in every step.

    A spare device fetches the largest stage's states at the fleet's median downlink, from a source
    that is as fast. The step begins again; on average, half of it was done.
    """
    largest = max(stages, key=lambda stage: stage.layers * stage.state_bytes)
    state = largest.state_bytes * largest.layers * job.layer.parameters
    downlink = float(np.median(np.concatenate([stage.members.downlink for stage in stages])))
    return Part("states", state / downlink), Part("half a step again", step_s / 2)


def one_f_one_b(stages: int, micro_batches: int, each: float) -> list[float]:
    """Return samples in flight by stage: min(P - p, m) micro-batches of `each` samples.

    Narayanan et al. (PipeDream, 2019): a stage starts as many micro-batches as there
    are stages from it on.
    """
    return [min(stages - p, micro_batches) * each for p in range(stages)]
