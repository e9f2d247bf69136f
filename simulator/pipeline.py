"""What pipelines share: layers dealt to stages, memory of their devices, the 1F1B schedule.

Pipelined methods take ``sum t + (m - 1) max t`` for stages of t_p seconds and m micro-batches. That
is what 1F1B takes where stages are equal, m + P - 1 slots, and where the slowest stage is the last
(DT-FM's has the LM head). Otherwise 1F1B takes less, by no more than the stages that follow the
slowest: they are hidden once in the first micro-batch, so it is a share of P / m at most
(`tests/simulator/test_pipeline.py` runs the schedule).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cleave.planner.shape import Floats, RateArrays
from simulator.method import Conditions, Part
from simulator.peers import RECOMPUTE, misfit, stage_need, tightest
from simulator.work import STATE_BYTES, LayerWork, head_flops, layer_work


@dataclass(frozen=True, slots=True)
class PipelineJob:
    """What a pipeline has to do: alike layers, and an LM head on its last stage.

    Attributes:
        head_layers: what the head multiplies, in layers; its memory is not counted.
        element_bytes: of an activation, weight or gradient that is sent.
    """

    layers: int
    layer: LayerWork
    head_layers: float
    batch: int
    element_bytes: int

    @classmethod
    def of(cls, conditions: Conditions) -> PipelineJob:
        """The work of these conditions."""
        layer = layer_work(conditions.spec, conditions.seq, conditions.element.sent)
        head = head_flops(conditions.spec, conditions.seq) / layer.forward_flops
        return cls(conditions.spec.layers, layer, head, conditions.batch, conditions.element.sent)

    def flops(self, layers: float) -> float:
        """Forward and backward of so many layers, on a sample."""
        return 3 * layers * self.layer.forward_flops

    @property
    def even_layer(self) -> float:
        """A layer with its share of the head, where that is not placed: in layers."""
        return 1 + self.head_layers / self.layers

    def gradient_bytes(self, layers: float) -> float:
        """As sent between replicas."""
        return layers * self.layer.parameters * self.element_bytes


@dataclass(frozen=True, slots=True)
class Stage:
    """Some layers and the devices that hold them.

    Attributes:
        state_bytes: that each of them holds for a parameter.
        sharded: how many of them share what a layer keeps of a sample.
    """

    layers: int
    members: RateArrays
    state_bytes: float = STATE_BYTES
    sharded: int = 1


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Of a pipeline's devices.

    Attributes:
        again: by stage, what recomputing activations multiplies its compute by.
        needed_bytes, offered_bytes: of the device with least for its part.
        misfit: empty where all fit.
    """

    again: Floats
    needed_bytes: float
    offered_bytes: float
    misfit: str


def layers_of_stages(layers: int, stages: int) -> list[int]:
    """As even as possible, the last stages with fewer, as one of them has the head."""
    return [layers // stages + (s < layers % stages) for s in range(stages)]


def pipeline_memory(
    job: PipelineJob, stages: Sequence[Stage], in_flight: Sequence[float]
) -> StageMemory:
    """Whether every device holds its stage.

    Args:
        in_flight: by stage, samples of one device between forward and backward.
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
    """Checkpoint restart after the loss of a device, with a checkpoint of every step.

    A spare device fetches the largest stage's states at the fleet's median downlink, from a place
    that is as fast; the step begins anew, half of which was done on average.
    """
    largest = max(stages, key=lambda stage: stage.layers * stage.state_bytes)
    state = largest.state_bytes * largest.layers * job.layer.parameters
    downlink = float(np.median(np.concatenate([stage.members.downlink for stage in stages])))
    return Part("states", state / downlink), Part("half a step again", step_s / 2)


def one_f_one_b(stages: int, micro_batches: int, each: float) -> list[float]:
    """Samples in flight by stage, first to last: min(P - p, m) micro-batches of `each` samples.

    Narayanan et al. (PipeDream, 2019): a stage starts as many as there are stages from it on.
    """
    return [min(stages - p, micro_batches) * each for p in range(stages)]
