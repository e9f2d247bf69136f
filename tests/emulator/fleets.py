"""Emulated fleets that multiply zeros: what counts is how long it takes and what travels."""

from __future__ import annotations

import numpy as np

from cleave import arrays
from cleave.arrays import Buffer, DType
from cleave.fleet.fleet import Fleet
from cleave.fleet.product import GemmFuture, Side
from emulator.activity import Activity
from emulator.virtual import VirtualRuntime


def virtual(fleet: Fleet) -> VirtualRuntime:
    """Return the runtime of an emulated fleet."""
    assert isinstance(fleet.runtime, VirtualRuntime)
    return fleet.runtime


def watched(fleet: Fleet) -> list[Activity]:
    """Return a list that gets everything that happens from now on."""
    seen: list[Activity] = []
    virtual(fleet).observers.append(seen.append)
    return seen


def submit_zeros(fleet: Fleet, m: int, n: int, k: int, dtype: DType = DType.FP32) -> GemmFuture:
    """Submit the product of two matrices of zeros."""
    a, b = (
        Side(fleet.operand(Buffer(np.zeros(sides, dtype.storage), dtype)))
        for sides in ((m, k), (k, n))
    )
    return fleet.submit(a, b, arrays.empty(m, n, dtype))
