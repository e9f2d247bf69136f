"""Runs that are alike to the last bit, with coded arrays and without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cleave.fleet.fleet import Fleet
from cleave.gemm import Gemm
from cleave.planner.plan import DeviceRates, ElementBytes, Plan, Residency
from cleave.planner.tiles.planner import TilePlanner
from cleave.training.loop.job import JobSpec
from cleave.training.loop.records import StepRecord
from cleave.training.loop.run_folder import RunFolder
from tests.training.runs import steps_of, trained


def steps_on(fleet: Fleet, job: JobSpec, folder: Path) -> list[StepRecord]:
    """Train on a fleet; return the steps' records."""
    return steps_of(trained(job, RunFolder(folder), fleet))


def check_saving(coded: Sequence[StepRecord], plain: Sequence[StepRecord]) -> None:
    """Ensure that losses are the same to the bit, and that coding saved bytes both ways."""
    assert [step.loss for step in coded] == [step.loss for step in plain]
    for step, other in zip(coded, plain, strict=True):
        assert (other.saved.down.total, other.saved.up.total) == (0, 0)
        assert step.saved.down.total > 0
        assert step.saved.up.total > 0


class AlikePlanner:
    """Plans as if all devices were equally fast and nothing was coded.

    Where a tile is cut changes the order in which some devices sum, and so the last bit of a loss.
    """

    def __init__(self) -> None:
        self._planner = TilePlanner()

    def plan(
        self,
        gemm: Gemm,
        element: ElementBytes,
        devices: Sequence[DeviceRates],
        residencies: Sequence[Residency] = (),
    ) -> Plan:
        return self._planner.plan(gemm, element, [_alike(d) for d in devices], residencies)

    def plan_part(self, gemm: Gemm, element: ElementBytes, devices: Sequence[DeviceRates]) -> Plan:
        return self._planner.plan_part(gemm, element, [_alike(d) for d in devices])


def _alike(device: DeviceRates) -> DeviceRates:
    return replace(
        device,
        downlink_bytes_per_s=1e8,
        uplink_bytes_per_s=1e8,
        flops_per_s=1e10,
        latency_s=1e-3,
        codes_downlink=False,
        codes_uplink=False,
    )
