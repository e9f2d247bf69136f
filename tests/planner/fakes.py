"""Planners that do as a test says."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from cleave.gemm import Gemm, Span, Tile, cut_tile
from cleave.planner.plan import DeviceRates, ElementBytes, Plan, PlannedTile, Residency


class FakePlanner(ABC):
    """A planner that looks at the GEMM and the devices only."""

    def plan(
        self,
        gemm: Gemm,
        element: ElementBytes,
        devices: Sequence[DeviceRates],
        residencies: Sequence[Residency] = (),
    ) -> Plan:
        return self.planned(gemm, devices)

    @abstractmethod
    def planned(self, gemm: Gemm, devices: Sequence[DeviceRates]) -> Plan:
        """Return the plan."""


@dataclass
class OneDevice(FakePlanner):
    """Assigns the whole GEMM to one device, in strips of rows of A and of columns of B."""

    device: int
    rows: int = 1
    columns: int = 1

    def planned(self, gemm: Gemm, devices: Sequence[DeviceRates]) -> Plan:
        whole = Tile(Span(0, gemm.m), Span(0, gemm.n), Span(0, gemm.k))
        cut = cut_tile(whole, self.rows, self.columns)
        return Plan(gemm, (PlannedTile(self.device, cut, 0, 0, 0.0),), 0.0)
