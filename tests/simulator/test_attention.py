"""Attention as tasks."""

from __future__ import annotations

import pytest

from cleave.planner.plan import DeviceRates
from cleave.planner.tiles.shape import RateArrays
from cleave.workload.registry import find_model
from simulator.cleave_methods import AttentionTask, backward_task, forward_task, tasks_s
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


def test_a_task_takes_what_its_messages_take_one_after_the_other() -> None:
    # Each device by itself, event by event: download, multiply and upload, each in turn.
    task = backward_task(find_model("opt-125m"), 512, 2)
    speeds, down, up = (2e12, 6e12, 20e12), (10e6, 60e6, 100e6, 25e6), (2e6, 8e6)
    devices = [DeviceRates(i, down[i % 4], up[i % 2], speeds[i % 3]) for i in range(5)]
    took_s = tasks_s(task, 40, RateArrays.of(devices))
    done = 0
    for device in devices:
        down_s = computed_s = back_s = 0.0
        while True:
            down_s += task.download_bytes / device.downlink_bytes_per_s
            computed_s = max(computed_s, down_s) + task.flops / device.flops_per_s
            back_s = max(back_s, computed_s) + task.upload_bytes / device.uplink_bytes_per_s
            if back_s > took_s * (1 + 1e-6):
                break
            done += 1
    assert done >= 40
