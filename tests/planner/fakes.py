"""Planners that do as a test says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cleave.gemm import Gemm, Span, Tile, cut_tile
from cleave.planner.plan import DeviceRates, ElementBytes, Plan, PlannedTile, Residency


class FakePlanner:
    """A planner to whom only the GEMM and the devices matter."""

    def plan(
        self,
        gemm: Gemm,
        element: ElementBytes,
        devices: Sequence[DeviceRates],
        residencies: Sequence[Residency] = (),
    ) -> Plan:
        """See `Planner.plan`."""
        return self.planned(gemm, devices)

    def planned(self, gemm: Gemm, devices: Sequence[DeviceRates]) -> Plan:
        """Return the plan."""
        raise NotImplementedError


@dataclass
class OneDevice(FakePlanner):
    """All of the GEMM to one device, in strips of rows of A and of columns of B."""

    device: int
    rows: int = 1
    columns: int = 1

    def planned(self, gemm: Gemm, devices: Sequence[DeviceRates]) -> Plan:
        """See `FakePlanner.planned`."""
        whole = Tile(Span(0, gemm.m), Span(0, gemm.n), Span(0, gemm.k))
        cut = cut_tile(whole, self.rows, self.columns)
        return Plan(gemm, (PlannedTile(self.device, cut, 0, 0, 0.0),), 0.0)
