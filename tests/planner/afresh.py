"""A planner that is not told what devices hold, as those of large fleets are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cleave.gemm import Gemm
from cleave.planner.plan import DeviceRates, ElementBytes, Plan, Residency
from cleave.planner.tiles.planner import TilePlanner


@dataclass(frozen=True)
class Afresh:
    """Plans each GEMM as if devices held nothing."""

    planner: TilePlanner

    def plan(
        self,
        gemm: Gemm,
        element: ElementBytes,
        devices: Sequence[DeviceRates],
        residencies: Sequence[Residency] = (),
    ) -> Plan:
        """See `Planner.plan`."""
        return self.planner.plan(gemm, element, devices)
