"""Conditions that tests share."""

from __future__ import annotations

from cleave.planner.plan import DeviceRates
from cleave.workload.registry import find_model
from simulator.method import Conditions
from simulator.sweep import fleet_rates


def alike(
    count: int,
    *,
    down: float = 50e6,
    up: float = 7.5e6,
    flops: float = 6e12,
    memory: float = 2e9,
    latency_s: float = 0.0,
) -> list[DeviceRates]:
    """Devices that are all the same."""
    return [DeviceRates(i, down, up, flops, latency_s, int(memory)) for i in range(count)]


def paper(devices: int, model: str = "opt-13b", batch: int = 128, seq: int = 1024) -> Conditions:
    """The published conditions."""
    rates = fleet_rates("paper", devices, dtype="bf16")
    return Conditions(find_model(model), batch, seq, rates)
