"""Attention as tasks, one per sample and key-value head (docs/simulation.md).

The device downloads a task's queries, keys and values and uploads its output, so S x S scores never
travel. All tasks are alike. A device pipelines its tasks: it downloads the next one while it
multiplies one and uploads the previous one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cleave.planner.tiles.shape import Floats, RateArrays
from cleave.workload.registry import ModelSpec


@dataclass(frozen=True, slots=True)
class AttentionTask:
    """The traffic, FLOPs and memory of one task; all tasks of a layer are alike."""

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

    The task computes five products: the scores again, then dV, dP, dQ and dK.
    """
    queries = spec.heads / spec.kv_heads
    vector = seq * spec.head_width * element_bytes
    down, up = (2 * queries + 2) * vector, (queries + 2) * vector
    flops = queries * 10 * seq * seq * spec.head_width
    return AttentionTask(down, up, flops, down + up + 2 * 4 * seq * seq)


def tasks_s(task: AttentionTask, count: int, rates: RateArrays) -> float:
    """Return the shortest time in seconds in which the devices can finish `count` tasks.

    A device's n-th task finishes after ``latency + download + compute + upload + (n - 1) period``.
    The period is the longest of download, compute and upload.
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
    """Return a mask of the devices that finish a task within `seconds`, as found by `tasks_s`."""
    roomy = 2 * task.memory_bytes <= rates.memory
    back: npt.NDArray[np.bool_] = roomy & (_period_and_first_s(task, rates)[1] <= seconds)
    return back


def _period_and_first_s(task: AttentionTask, rates: RateArrays) -> tuple[Floats, Floats]:
    """Return for each device the seconds between tasks, and until its first task is finished."""
    stages = np.stack(
        (
            task.download_bytes / rates.downlink,
            task.flops / rates.flops,
            task.upload_bytes / rates.uplink,
        )
    )
    return stages.max(axis=0), stages.sum(axis=0) + rates.latency_s
