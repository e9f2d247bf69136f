"""Products that tests ask a fleet for."""

from __future__ import annotations

from typing import Any

import numpy as np

from cleave.arrays import Buffer, DType, empty
from cleave.fleet.fleet import Fleet
from cleave.fleet.product import GemmFuture, Side


def submit(fleet: Fleet, a: Any, b: Any) -> GemmFuture:
    """Have a fleet multiply two matrices in fp32."""
    left, right = (Side(fleet.operand(Buffer(x.astype(np.float32), DType.FP32))) for x in (a, b))
    return fleet.submit(left, right, empty(a.shape[0], b.shape[1], DType.FP32))
