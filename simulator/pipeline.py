"""Common parts of pipelined methods: layers per stage, memory per device, the 1F1B schedule.

The time of a step with m micro-batches on P stages of t_p seconds is modelled as
``sum t + (m - 1) max t``. This formula is exact for the 1F1B schedule if all stages take equally
long (m + P - 1 slots), or if the last stage is the slowest (as in DT-FM, where it has the LM head).
Otherwise, 1F1B is faster than the formula by at most the time of the stages after the slowest
stage, which the first micro-batch passes while the slowest stage is busy. The relative difference
is at most P / m. `tests/simulator/test_pipeline.py` runs the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from cleave.planner.tiles.shape import Floats, RateArrays
from simulator.method import Conditions, Part
from simulator.work import (
    RECOMPUTE,
    STATE_BYTES,
    LayerWork,
    head_flops,
    layer_work,
    misfit,
    stage_need,
    tightest,
)


@dataclass(frozen=True, slots=True)
class PipelineJob:
    """The model and batch that a pipeline trains: identical layers, and an LM head at the end.

    Attributes:
        layers: number of layers.
        layer: FLOPs, parameters and activations of one layer.
        head_layers: FLOPs of the LM head as a multiple of one layer's FLOPs. The memory of the LM
            head is not counted.
        batch: samples per step.
        element_bytes: bytes per element of the activations, weights and gradients that are sent.
    """

    layers: int
    layer: LayerWork
    head_layers: float
    batch: int
    element_bytes: int

    @classmethod
    def of(cls, conditions: Conditions) -> PipelineJob:
        """Return the job for the model and batch of a simulation's conditions."""
        layer = layer_work(conditions.spec, conditions.seq, conditions.element.sent)
        head = head_flops(conditions.spec, conditions.seq) / layer.forward_flops
        return cls(conditions.spec.layers, layer, head, conditions.batch, conditions.element.sent)

    def flops(self, layers: float) -> float:
        """Return the FLOPs of the forward and backward pass of `layers` layers for one sample."""
        return 3 * layers * self.layer.forward_flops

    @property
    def even_layer(self) -> float:
        """Return the cost of a layer if the LM head is divided evenly among all layers.

        The unit is the cost of a layer alone, so the result is above 1.
        """
        return 1 + self.head_layers / self.layers

    def gradient_bytes(self, layers: float) -> float:
        """Return the bytes of the weight gradients of `layers` layers, as replicas send them."""
        return layers * self.layer.parameters * self.element_bytes


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a pipeline: a number of layers, and the devices that hold these layers.

    Attributes:
        layers: number of layers.
        members: rates of the devices.
        state_bytes: bytes of weights, gradients and optimizer state that each device holds per
            parameter.
        sharded: number of devices among which a layer's activations of a sample are divided.
    """

    layers: int
    members: RateArrays
    state_bytes: float = STATE_BYTES
    sharded: int = 1


@dataclass(frozen=True, slots=True)
class StageMemory:
    """The memory requirement of a pipeline.

    Attributes:
        again: for each stage, `RECOMPUTE` if the stage recomputes activations, else 1.
        needed_bytes, offered_bytes: memory that the tightest device needs and offers.
        misfit: text on devices with too little memory; empty if every device has enough memory.
    """

    again: Floats
    needed_bytes: float
    offered_bytes: float
    misfit: str


def layers_of_stages(layers: int, stages: int) -> list[int]:
    """Return the number of layers of each stage, divided as evenly as possible.

    The last stages get fewer layers, because the last stage also has the LM head.
    """
    return [layers // stages + (s < layers % stages) for s in range(stages)]


def pipeline_memory(
    job: PipelineJob, stages: Sequence[Stage], in_flight: Sequence[float]
) -> StageMemory:
    """Return the memory requirement of a pipeline, and whether the devices can meet it.

    Args:
        job: layer sizes.
        stages: stages in pipeline order.
        in_flight: for each stage, the number of samples whose activations one device keeps between
            the forward and the backward pass.
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
    """Return the recovery time after the loss of a device, for restarts from a checkpoint.

    A checkpoint is saved in every step. A spare device downloads the state of the largest stage at
    the pipeline's median downlink rate. The step then starts over, which on average repeats half a
    step.

    Args:
        job: layer sizes.
        stages: stages of the pipeline.
        step_s: seconds of a step.
    """
    largest = max(stages, key=lambda stage: stage.layers * stage.state_bytes)
    state = largest.state_bytes * largest.layers * job.layer.parameters
    downlink = float(np.median(np.concatenate([stage.members.downlink for stage in stages])))
    return Part("states", state / downlink), Part("half a step again", step_s / 2)


def one_f_one_b(stages: int, micro_batches: int, each: float) -> list[float]:
    """Return the number of samples in flight on each stage with the 1F1B schedule.

    Stage p of P starts one micro-batch for itself and one for each later stage before its first
    backward pass. It thus has min(P - p, m) micro-batches in flight (PipeDream, Narayanan et al.
    2019).

    Args:
        stages: number P of stages.
        micro_batches: number m of micro-batches per step.
        each: samples per micro-batch.
    """
    return [min(stages - p, micro_batches) * each for p in range(stages)]


_STEP: Final = 1.05


class Cut(NamedTuple):
    """A stage of a pipeline.

    Attributes:
        layers: number of layers.
        start, stop: range of the stage's device units; `stop` is exclusive.
    """

    layers: int
    start: int
    stop: int


def best_partition(cost: Floats, micro_batches: int) -> list[Cut] | None:
    """Return the stages that minimize T, in pipeline order; None if no partition is possible.

    Args:
        cost: seconds t of each possible stage, indexed [layers, start, stop], (layers + 1,
            units + 1, units + 1). Impossible stages are infinite. Entries with 0 layers or with
            start >= stop are ignored.
        micro_batches: number m of micro-batches per step.
    """
    if not np.isfinite(cost[1:]).any():
        return None
    best: tuple[float, list[Cut]] | None = None
    finite = cost[1:][np.isfinite(cost[1:])]
    # There are at most as many stages as units, so one stage has at least this many layers.
    least_layers = -(-(cost.shape[0] - 1) // (cost.shape[1] - 1))
    limit, most = float(cost[least_layers:].min()), float(finite.max())
    while True:
        found = _least_sum(np.where(cost <= limit, cost, np.inf))
        if found is not None:
            total_s, cuts = found
            longest = max(float(cost[cut]) for cut in cuts)
            time_s = total_s + (micro_batches - 1) * longest
            if best is None or time_s < best[0]:
                best = time_s, cuts
        if limit >= most or (best is not None and (micro_batches - 1) * limit > best[0]):
            break
        limit = most if micro_batches == 1 else min(limit * _STEP, most)
    return None if best is None else best[1]


def _least_sum(cost: Floats) -> tuple[float, list[Cut]] | None:
    """Return the minimum sum of stage times, and the stages that have this sum.

    Return None if no partition is possible.
    """
    layers, units = cost.shape[0] - 1, cost.shape[1] - 1
    least = np.full((layers + 2, units + 1), np.inf)  # the last row is index -1: impossible
    least[0, :] = 0.0  # devices before the first stage may stay idle
    choice = np.zeros((layers + 1, units + 1, 2), np.intp)
    numbers = np.arange(1, layers + 1)
    for stop in range(1, units + 1):
        ends = cost[1:, :stop, stop]  # seconds, indexed [layers - 1, start]
        lengths = numbers[np.isfinite(ends).any(axis=1)]
        best_s, idle_s = np.full(layers, np.inf), least[1:-1, stop - 1]
        if len(lengths):
            before = np.maximum(numbers[:, None] - lengths, -1)
            sums = (ends[lengths - 1] + least[before, :stop]).reshape(layers, -1)
            at = sums.argmin(axis=1)
            best_s = sums[numbers - 1, at]
            choice[1:, stop] = np.stack([lengths[at // stop], at % stop], axis=1)
        choice[1:, stop][idle_s <= best_s] = 0, stop - 1  # unit `stop - 1` stays idle
        least[1:-1, stop] = np.minimum(idle_s, best_s)
    if not np.isfinite(least[layers, units]):
        return None
    cuts: list[Cut] = []
    k, stop = layers, units
    while k:
        held, start = (int(x) for x in choice[k, stop])
        if held:
            cuts.append(Cut(held, start, stop))
        k, stop = k - held, start
    return float(least[layers, units]), cuts[::-1]
