"""Products that do not depend on how a GEMM is cut: for runs that must be equal to the last bit.

Floating-point sums depend on their order, and libraries choose it by the shape of a block. Here
sums are exact, so that they have no order: every row of A and column of B is scaled by its largest
element and split into two slices of few bits, whose products and sums fp64 holds without rounding
(error-free splitting, as in the Ozaki scheme). The slices depend on whole rows and columns, so
plans must be of full depth: `FullDepthPlanner`. A sum that is cut in depth is rounded on its way to
the parameter server, and no backend can undo that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from cleave import arrays
from cleave.arrays import Buffer
from cleave.gemm import Gemm
from cleave.planner.plan import DeviceRates, ElementBytes, Plan, Residency
from cleave.planner.tiles.planner import PlanMethod, TilePlanner

Doubles = npt.NDArray[np.float64]

_BITS_OF_A_DOUBLE = 53


class InvariantBackend:
    """Multiplies so that each element depends on its row of A and its column of B alone.

    An element is the exact sum of products of operands that were cut to about 40 bits below the
    largest element of their row or column, rounded to fp64 and then to the result's dtype: as near
    to the true product as fp32 sums are, or nearer.
    """

    name = "invariant"

    def matmul(self, a: Buffer, b: Buffer, out: Buffer, *, accumulate: bool = False) -> None:
        """See `MatmulBackend.matmul`.

        A sum of several products is rounded between them, and so is not invariant: a server asks
        for it when it tests a device, plans of full depth never do.
        """
        before = out.float32().copy() if accumulate else None
        depth = a.shape[1]
        if not depth:
            out.array[...] = 0 if before is None else arrays.narrow(before, out.dtype)
            return
        bits = (_BITS_OF_A_DOUBLE - (depth - 1).bit_length()) // 2
        with np.errstate(all="ignore"):  # damaged operands may be anything
            a_high, a_low, a_unit = _slices(a.float32(), bits, axis=1)
            b_high, b_low, b_unit = _slices(b.float32(), bits, axis=0)
            # Whole numbers below 2^53, and so are all sums of them: exact in any order.
            low = a_high @ b_low + a_low @ b_high
            # Libraries do not agree on the sign of a sum of zeros.
            total = (a_high @ b_high + low * 2.0**-bits + 0.0) * a_unit * b_unit
            product = total.astype(np.float32)
            if before is not None:
                product += before
            out.array[...] = arrays.narrow(product, out.dtype)


def _slices(values: npt.NDArray[np.float32], bits: int, axis: int) -> tuple[Doubles, Doubles, Any]:
    """Two slices in whole numbers, the upper below 2^bits and the lower below half of that.

    Returns:
        The slices, and the power of two by which the upper one is to be multiplied; the lower one's
        is 2^-bits of it.
    """
    largest = np.abs(values).max(axis=axis, keepdims=True, initial=0).astype(np.float64)
    _, exponent = np.frexp(largest)
    unit = np.ldexp(1.0, exponent - bits)
    scaled = values / unit  # by a power of two: exact
    high = np.rint(scaled)
    low = np.rint((scaled - high) * 2.0**bits)
    return high, low, unit


@dataclass
class FullDepthPlanner:
    """Plans in rows and columns only, and never follows what devices hold already.

    Tiles that follow a device's arrays may be cut in depth.
    """

    planner: TilePlanner = field(default_factory=lambda: TilePlanner(method=PlanMethod.TWO_D))

    def plan(
        self,
        gemm: Gemm,
        element: ElementBytes,
        devices: Sequence[DeviceRates],
        residencies: Sequence[Residency] = (),
    ) -> Plan:
        """See `Planner.plan`.

        Raises:
            ValueError: when a device has so little memory that its tile was cut in depth.
        """
        plan = self.planner.plan(gemm, element, devices)
        if any(planned.tile.is_partial(gemm) for planned in plan.tiles):
            raise ValueError(f"a device is too small for tiles of depth {gemm.k}")
        return plan
