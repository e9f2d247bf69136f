"""What several tests of the planner share: fleets, and whether a plan is right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cleave.planner.plan import DeviceRates, ElementBytes, Plan
from profiles.fleets import paper_fleet

BF16 = ElementBytes(2, 2)
FP32 = ElementBytes(4, 4)


def paper_rates(devices: int) -> list[DeviceRates]:
    """The published fleet as the planner sees it."""
    return [
        DeviceRates(
            i,
            p.downlink_bytes_per_s,
            p.uplink_bytes_per_s,
            p.flops_per_s,
            p.latency_s,
            p.memory_bytes,
        )
        for i, p in enumerate(paper_fleet(devices))
    ]


def check_right(plan: Plan, devices: Sequence[DeviceRates]) -> None:
    """It covers the GEMM exactly once, with devices of this fleet, none over its memory."""
    gemm = plan.gemm
    boxes = np.array([[*p.tile.m, *p.tile.n, *p.tile.k] for p in plan.tiles])
    assert (boxes[:, ::2] < boxes[:, 1::2]).all()
    assert (boxes[:, ::2] >= 0).all()
    assert (boxes[:, 1::2] <= [gemm.m, gemm.n, gemm.k]).all()
    assert sum(p.tile.volume for p in plan.tiles) == gemm.volume
    meets = (boxes[:, None, ::2] < boxes[None, :, 1::2]).all(-1)
    assert (meets & meets.T).sum() == len(boxes)  # each with itself alone
    memory = {d.device: d.memory_bytes for d in devices}
    for planned in plan.tiles:
        assert planned.memory_bytes <= memory[planned.device]
