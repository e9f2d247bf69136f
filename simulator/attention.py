"""Attention as tasks: one for each sample and key-value head (docs/simulation.md).

A task's queries, keys and values go down and its output comes back, so S x S scores never travel.
Tasks are all alike, and a device does its tasks in turn: it downloads the next while it multiplies
one and uploads the last.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cleave.planner.tiles.shape import Floats, RateArrays
from cleave.workload.registry import ModelSpec


@dataclass(frozen=True, slots=True)
class AttentionTask:
    """What one task sends and multiplies; all tasks of a layer are alike."""

    download_bytes: float
    upload_bytes: float
    flops: float
    memory_bytes: float


def forward_task(spec: ModelSpec, seq: int, element_bytes: int) -> AttentionTask:
    """Return a forward task: Q, K, V down; O up; Q K^T and P V, ``2 S^2 h`` each per query head."""
    queries = spec.heads / spec.kv_heads
    vector = seq * spec.head_width * element_bytes
    down, up = (queries + 2) * vector, queries * vector
    flops = queries * 4 * seq * seq * spec.head_width
    return AttentionTask(down, up, flops, down + up + 4 * seq * seq)


def backward_task(spec: ModelSpec, seq: int, element_bytes: int) -> AttentionTask:
    """Return a backward task: Q, K, V and dO down; dQ, dK, dV up.

    It multiplies five products: the scores again, then dV, dP, dQ and dK.
    """
    queries = spec.heads / spec.kv_heads
    vector = seq * spec.head_width * element_bytes
    down, up = (2 * queries + 2) * vector, (queries + 2) * vector
    flops = queries * 10 * seq * seq * spec.head_width
    return AttentionTask(down, up, flops, down + up + 2 * 4 * seq * seq)


def tasks_s(task: AttentionTask, count: int, rates: RateArrays) -> float:
    """Return the seconds until `count` tasks are back, dealt out so that the last is back soonest.

    A device's n-th task is back after ``latency + download + compute + upload + (n - 1) period``,
    where the period is the largest of the three.
    """
    period, first = _period_and_first_s(task, rates)
    roomy = 2 * task.memory_bytes <= rates.memory
    period, first = period[roomy], first[roomy]
    if not len(first):
        return float("inf")
    low, high = 0.0, float((first + count * period).min())
    for _ in range(100):
        middle = (low + high) / 2
        done = np.floor(np.maximum(0.0, middle - first) / period) + (middle >= first)
        low, high = (low, middle) if done.sum() >= count else (middle, high)
        if high - low <= 1e-9 * high:
            break
    return high


def takers(task: AttentionTask, seconds: float, rates: RateArrays) -> npt.NDArray[np.bool_]:
    """Say which devices have a task back within `seconds`, as found by `tasks_s`."""
    roomy = 2 * task.memory_bytes <= rates.memory
    back: npt.NDArray[np.bool_] = roomy & (_period_and_first_s(task, rates)[1] <= seconds)
    return back


def _period_and_first_s(task: AttentionTask, rates: RateArrays) -> tuple[Floats, Floats]:
    """Return for each device the seconds from task to task, and until the first is back."""
    stages = np.stack(
        (
            task.download_bytes / rates.downlink,
            task.flops / rates.flops,
            task.upload_bytes / rates.uplink,
        )
    )
    return stages.max(axis=0), stages.sum(axis=0) + rates.latency_s
