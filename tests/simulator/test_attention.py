"""Attention as tasks."""

from __future__ import annotations

import pytest

from cleave.planner.tiles.shape import RateArrays
from cleave.workload.registry import find_model
from simulator.tiles import AttentionTask, backward_task, forward_task, tasks_s
from simulator.work import attention_flops
from tests.simulator.conditions import alike


def test_tasks_hold_all_flops_of_attention() -> None:
    for name in ("opt-13b", "llama2-70b"):
        spec = find_model(name)
        forward, backward = forward_task(spec, 1024, 2), backward_task(spec, 1024, 2)
        assert 8 * spec.kv_heads * forward.flops == attention_flops(spec, 8, 1024)
        # dV, dP, dQ, dK, and the scores once more: five products against two.
        assert backward.flops == 2.5 * forward.flops


def test_one_device_overlaps_its_tasks() -> None:
    rates = RateArrays.of(alike(1, down=10.0, up=5.0, flops=100.0, latency_s=0.5))
    task = AttentionTask(download_bytes=20, upload_bytes=20, flops=100, memory_bytes=1)
    # 1 s of latency both ways, 2 s down, 1 s of work, 4 s up, and 4 s for each further task.
    assert tasks_s(task, 1, rates) == pytest.approx(8)
    assert tasks_s(task, 3, rates) == pytest.approx(16)


def test_tasks_are_whole() -> None:
    rates = RateArrays.of(alike(4, down=10.0, up=10.0, flops=100.0))
    task = AttentionTask(download_bytes=10, upload_bytes=10, flops=100, memory_bytes=1)
    # Five tasks on four devices take as long as eight.
    assert tasks_s(task, 4, rates) == pytest.approx(3)
    assert tasks_s(task, 5, rates) == pytest.approx(4) == tasks_s(task, 8, rates)


def test_without_memory_there_is_no_time() -> None:
    rates = RateArrays.of(alike(4, memory=100))
    assert tasks_s(AttentionTask(1, 1, 1, memory_bytes=51), 1, rates) == float("inf")
    assert tasks_s(AttentionTask(1, 1, 1, memory_bytes=50), 1, rates) < float("inf")
