"""Attention as independent tasks, one task per sample and key-value head (docs/simulation.md).

A device downloads the queries, keys and values of a task and uploads the attention output, so the
S x S scores stay on the device. All tasks of a layer cost the same. A device pipelines its tasks:
it downloads the next task while it computes the current task and uploads the previous result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cleave.planner.tiles.shape import Floats, RateArrays
from cleave.workload.registry import ModelSpec


@dataclass(frozen=True, slots=True)
class AttentionTask:
    """The traffic, FLOPs and memory of one attention task.

    Attributes:
        download_bytes, upload_bytes: bytes of the task's inputs and of its result.
        flops: FLOPs of the task's matrix multiplications.
        memory_bytes: bytes of inputs, result and fp32 scores on the device.
    """

    download_bytes: float
    upload_bytes: float
    flops: float
    memory_bytes: float


def forward_task(spec: ModelSpec, seq: int, element_bytes: int) -> AttentionTask:
    """Return the cost of one attention task of the forward pass.

    The device downloads Q, K and V, and uploads the output O. It computes Q K^T and P V, each of
    which takes ``2 S^2 h`` FLOPs per query head.
    """
    queries = spec.heads / spec.kv_heads
    vector = seq * spec.head_width * element_bytes
    down, up = (queries + 2) * vector, queries * vector
    flops = queries * 4 * seq * seq * spec.head_width
    return AttentionTask(down, up, flops, down + up + 4 * seq * seq)


def backward_task(spec: ModelSpec, seq: int, element_bytes: int) -> AttentionTask:
    """Return the cost of one attention task of the backward pass.

    The device downloads Q, K, V and dO, and uploads dQ, dK and dV. It runs five matrix
    multiplications: it recomputes the scores, then computes dV, dP, dQ and dK.
    """
    queries = spec.heads / spec.kv_heads
    vector = seq * spec.head_width * element_bytes
    down, up = (2 * queries + 2) * vector, (queries + 2) * vector
    flops = queries * 10 * seq * seq * spec.head_width
    return AttentionTask(down, up, flops, down + up + 2 * 4 * seq * seq)


def tasks_s(task: AttentionTask, count: int, rates: RateArrays) -> float:
    """Return the minimum seconds in which the devices can finish `count` tasks together.

    Only devices with memory for two tasks take part; without such a device, the result is infinite.
    A device finishes its n-th task after ``latency + download + compute + upload + (n - 1) period``
    seconds. The period is the longest of the task's download, compute and upload times.
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
    """Return a mask of the devices that finish at least one task within `seconds`.

    Args:
        task: cost of one task.
        seconds: result of `tasks_s` for these tasks.
        rates: rates of the devices.
    """
    roomy = 2 * task.memory_bytes <= rates.memory
    back: npt.NDArray[np.bool_] = roomy & (_period_and_first_s(task, rates)[1] <= seconds)
    return back


def _period_and_first_s(task: AttentionTask, rates: RateArrays) -> tuple[Floats, Floats]:
    """Return the seconds between finished tasks, and until the first finished task, per device."""
    stages = np.stack(
        (
            task.download_bytes / rates.downlink,
            task.flops / rates.flops,
            task.upload_bytes / rates.uplink,
        )
    )
    return stages.max(axis=0), stages.sum(axis=0) + rates.latency_s
