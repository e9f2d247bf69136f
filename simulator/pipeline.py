"""Shared parts of pipelined methods: layers of stages, memory of devices, the 1F1B schedule.

Pipelined methods take ``sum t + (m - 1) max t`` for stages of t_p seconds and m micro-batches. 1F1B
takes exactly that if all stages are equal (m + P - 1 slots), or if the last stage is the slowest
(in DT-FM it has the LM head). Otherwise 1F1B is faster, by at most the time of the stages after the
slowest, which are hidden once, in the first micro-batch. The relative difference is thus at most
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
    """The work of a pipeline: identical layers, and an LM head on the last stage.

    Attributes:
        head_layers: FLOPs of the head in units of one layer's; its memory is not counted.
        element_bytes: bytes per sent element of activations, weights and gradients.
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
        """Return the FLOPs of `layers` layers on one sample, forward and backward."""
        return 3 * layers * self.layer.forward_flops

    @property
    def even_layer(self) -> float:
        """Return the work of a layer plus its share of an evenly spread head, in layers."""
        return 1 + self.head_layers / self.layers

    def gradient_bytes(self, layers: float) -> float:
        """Return the bytes of the layers' gradient, as sent between replicas."""
        return layers * self.layer.parameters * self.element_bytes


@dataclass(frozen=True, slots=True)
class Stage:
    """A number of layers and the devices that hold them.

    Attributes:
        state_bytes: bytes that each device holds per parameter.
        sharded: number of devices that share a layer's activations of a sample.
    """

    layers: int
    members: RateArrays
    state_bytes: float = STATE_BYTES
    sharded: int = 1


@dataclass(frozen=True, slots=True)
class StageMemory:
    """The memory of a pipeline's devices.

    Attributes:
        again: compute factor of each stage for recomputing activations; 1 without recomputation.
        needed_bytes, offered_bytes: memory needed and offered by the tightest device.
        misfit: why devices do not fit; empty if all do.
    """

    again: Floats
    needed_bytes: float
    offered_bytes: float
    misfit: str


def layers_of_stages(layers: int, stages: int) -> list[int]:
    """Divide layers as evenly as possible; the last stages get fewer because of the head."""
    return [layers // stages + (s < layers % stages) for s in range(stages)]


def pipeline_memory(
    job: PipelineJob, stages: Sequence[Stage], in_flight: Sequence[float]
) -> StageMemory:
    """Return the memory of a pipeline's devices, and whether each can hold its stage.

    Args:
        in_flight: for each stage, the samples that one device keeps between forward and backward.
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
    """Return the cost of a lost device with a restart from a checkpoint, taken in every step.

    A spare device downloads the largest stage's states at the pipeline's median downlink. The step
    starts over; on average, half of it was done.
    """
    largest = max(stages, key=lambda stage: stage.layers * stage.state_bytes)
    state = largest.state_bytes * largest.layers * job.layer.parameters
    downlink = float(np.median(np.concatenate([stage.members.downlink for stage in stages])))
    return Part("states", state / downlink), Part("half a step again", step_s / 2)


def one_f_one_b(stages: int, micro_batches: int, each: float) -> list[float]:
    """Return the samples in flight by stage: min(P - p, m) micro-batches of `each` samples.

    A stage starts one micro-batch for itself and each later stage (PipeDream, Narayanan et al.
    2019).
    """
    return [min(stages - p, micro_batches) * each for p in range(stages)]
