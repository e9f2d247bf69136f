"""Common parts of pipeline methods: layers and memory per stage, 1F1B, Alpa's dynamic program.

The time of a step with m micro-batches on P stages is modelled as ``sum t + (m - 1) max t``, where
t is a stage's time per micro-batch. The model is exact for 1F1B if all stages take the same time,
or if the last stage is the slowest. Otherwise, 1F1B is faster by at most the time of the stages
after the slowest, an error of at most P / m. `tests/simulator/test_pipeline.py` simulates the
schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from cleave.planner.tiles.shape import Floats, RateArrays
from simulator.method import Conditions, Outcome, Part
from simulator.work import RECOMPUTE, STATE_BYTES, LayerWork, layer_work, stage_need, tightest


@dataclass(frozen=True, slots=True)
class PipelineJob:
    """The workload of a pipeline: identical layers with an LM head at the end, and a batch.

    Attributes:
        head_layers: FLOPs of the LM head as a multiple of one layer's FLOPs. The LM head's memory
            is not counted.
        batch: samples per step.
        element_bytes: bytes per element of activations, weights and gradients in messages.
    """

    layers: int
    layer: LayerWork
    head_layers: float
    batch: int
    element_bytes: int

    @classmethod
    def of(cls, conditions: Conditions) -> PipelineJob:
        spec, seq, element_bytes = conditions.spec, conditions.seq, conditions.element.sent
        layer = layer_work(spec, seq, element_bytes)
        head_flops = 2.0 * seq * spec.vocabulary * spec.embedding_width
        head_layers = head_flops / layer.forward_flops
        return cls(spec.layers, layer, head_layers, conditions.batch, element_bytes)

    def flops(self, layers: float) -> float:
        """Return the FLOPs of the forward and backward passes of `layers` layers for one sample."""
        return 3 * layers * self.layer.forward_flops

    @property
    def even_layer(self) -> float:
        """Return the FLOPs of a layer and its LM head share, as a multiple of a layer's FLOPs."""
        return 1 + self.head_layers / self.layers

    def gradient_bytes(self, layers: float) -> float:
        """Return the size in bytes of a message with the weight gradients of `layers` layers."""
        return layers * self.layer.parameters * self.element_bytes


@dataclass(frozen=True, slots=True)
class Stage:
    """A pipeline stage: the number of its layers, and the rates of its devices.

    Attributes:
        state_bytes: bytes of weights, gradients and optimizer state per parameter on each device.
        sharded: number of devices among which each layer's activations are divided.
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
        needed_bytes, offered_bytes: memory of the device with the highest ratio of needed to
            offered memory.
        misfit: message about devices with too little memory; empty if all devices have enough.
    """

    again: Floats
    needed_bytes: float
    offered_bytes: float
    misfit: str


def layers_of_stages(layers: int, stages: int) -> list[int]:
    """Divide layers evenly among stages and return the number of layers of each stage.

    The first stages get any remaining layers, because the last stage has the LM head.
    """
    return [layers // stages + (s < layers % stages) for s in range(stages)]


def pipeline_memory(
    job: PipelineJob, stages: Sequence[Stage], in_flight: Sequence[float]
) -> StageMemory:
    """Return a pipeline's memory requirement, with a message if devices have too little memory.

    Args:
        stages: stages in pipeline order.
        in_flight: for each stage, the number of samples whose activations a device stores.
    """
    again, needed, offered = [], [], []
    for stage, samples in zip(stages, in_flight, strict=True):
        least = float(stage.members.memory.min())
        need = stage_need(job.layer, stage.layers, samples, least, stage.state_bytes, stage.sharded)
        again.append(RECOMPUTE if need.recompute else 1.0)
        needed.append(np.full(len(stage.members), need.memory_bytes))
        offered.append(stage.members.memory)
    return StageMemory(np.array(again), *tightest(np.concatenate(needed), np.concatenate(offered)))


def pipeline_s(slots: Sequence[float], micro_batches: int) -> float:
    """Return a pipeline's step time in seconds, sum t + (m - 1) max t.

    `slots` contains each stage's time t in seconds for one of the m micro-batches.
    """
    return float(sum(slots) + (micro_batches - 1) * max(slots))


def pipeline_outcome(
    method: str,
    setting: str,
    stages: Sequence[Stage],
    memory: StageMemory,
    parts: tuple[Part, ...],
    sent_bytes: float,
    recovery: tuple[Part, ...] = (),
    flops: float = 0.0,
) -> Outcome:
    """Return the outcome of a pipeline. `sent_bytes` is the total sent by all devices per step."""
    devices = sum(len(stage.members) for stage in stages)
    each = sent_bytes / devices
    tightest = memory.offered_bytes, memory.needed_bytes, memory.misfit
    return Outcome(
        method, setting, devices, parts, each, each, *tightest, recovery=recovery, flops=flops
    )


def restart(job: PipelineJob, stages: Sequence[Stage], step_s: float) -> tuple[Part, ...]:
    """Return the parts of the recovery time if an interrupted step restarts from a checkpoint.

    A spare device downloads the state of the largest stage at the pipeline's median downlink rate.
    The step then starts over, which on average repeats half a step.
    """
    largest = max(stages, key=lambda stage: stage.layers * stage.state_bytes)
    state = largest.state_bytes * largest.layers * job.layer.parameters
    downlink = float(np.median(np.concatenate([stage.members.downlink for stage in stages])))
    return Part("states", state / downlink), Part("half a step again", step_s / 2)


def one_f_one_b(stages: int, micro_batches: int) -> list[int]:
    """Return the number of micro-batches in flight on each stage: min(P - p, m).

    Before its first backward pass, stage p of P starts one micro-batch for itself and one for each
    later stage (PipeDream, Narayanan et al. 2019).
    """
    return [min(stages - p, micro_batches) for p in range(stages)]


_STEP: Final = 1.05


class Cut(NamedTuple):
    """A pipeline stage: a number of layers on the device units `start` to `stop - 1`."""

    layers: int
    start: int
    stop: int


def best_partition(cost: Floats, micro_batches: int) -> list[Cut] | None:
    """Return the stages that minimize T = sum t_i + (m - 1) max t_i; None if no plan is valid.

    This is the dynamic program of Alpa (Zheng et al., OSDI 2022, arXiv 2201.12023, section 5). For
    each limit on max t_i, it computes the minimum sum of stage times for k layers on d devices:

        F(k, d) = min over l, d' of  F(k - l, d') + t(l, d', d)     with t(l, d', d) <= limit

    Alpa tries every stage time as a limit. Here, the limits form a geometric series with a ratio of
    1.05, so the term (m - 1) max t_i may be 5 % above the optimum.

    Args:
        cost: time t of each stage in seconds, indexed [layers, start, stop], shape (layers + 1,
            units + 1, units + 1). Impossible stages take infinitely long. Entries with 0 layers or
            start >= stop are ignored.
        micro_batches: number m of micro-batches per step.
    """
    finite = cost[1:][np.isfinite(cost[1:])]
    if not finite.size:
        return None
    best: tuple[float, list[Cut]] | None = None
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
    """Return the minimum sum of stage times and the stages with this sum; None without a plan."""
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
