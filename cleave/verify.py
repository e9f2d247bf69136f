"""Checking blocks without computing them again: Freivalds' test with a tolerance for rounding.

For a block C = A B that a device returned and a secret vector r, C r must be A (B r): three
products with a vector instead of one with a matrix (Freivalds 1977). Two independent vectors for
each GEMM and column of blocks, drawn fresh and used for nothing else; their entries have random
signs and magnitudes uniform in [0.5, 1], so that no two wrong elements of a row cancel by
construction (plain signs let a cancelling pair through half of the time) and none is hidden by a
small entry. B r is shared by all blocks of a column, A (B r) by all columns of a row of blocks.

Honest results are rounded. For row i of a block of n columns and depth K, with u = 2^-24,

    sigma_i^2 = u^2 ((|a_i| |B|_F)^2 + (K + n)/3 |c_i|^2) + (u_out |c_i|)^2 / 3

the first term for sums whose partial sums wander about zero, the second for sums of one sign, those
over columns of the check itself included, the third for the rounding of the result to its dtype
(u_out = 2^-8 for bf16, 2^-11 for fp16, 0 for fp32). A row is wrong when its residual is above
`ROW_LIMIT` sigma (honest ones stay below 4); a block is also wrong when the mean square of its
residuals over sigma is above `SPREAD_LIMIT` (honest ones stay below 1, few rows apart): noise that
is spread over all rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cleave.arrays import Buffer, DType
from cleave.gemm import Block, Span

Floats = npt.NDArray[np.float32]

VECTORS: Final = 2
ROW_LIMIT: Final = 8.0
SPREAD_LIMIT: Final = 3.0
_FEW_ROWS: Final = 40.0  # what the mean square of few residuals may be above it, times their number
_UNIT: Final = 2.0**-24
_OUT_UNIT: Final = {DType.FP32: 0.0, DType.BF16: 2.0**-8, DType.FP16: 2.0**-11}


class GemmCheck:
    """The check of all blocks of one GEMM.

    Args:
        a, b: the operands as they enter the product, shapes (M, K) and (K, N).
        blocks: those of its plan: which columns and depths will be asked for together.
        rng: draws the secret vectors; seed it from the system's randomness.
    """

    def __init__(
        self, a: Buffer, b: Buffer, blocks: Iterable[Block], rng: np.random.Generator
    ) -> None:
        self._a = a
        self._b = b
        self._rng = rng
        self._together: dict[tuple[Span, Span], list[Span]] = defaultdict(list)
        for block in dict.fromkeys(blocks):
            self._together[block.m, block.k].append(block.n)
        self._secrets: dict[Span, Floats] = {}
        self._columns: dict[Span, Floats] = {}  # B r over the whole depth
        self._column_norms: dict[tuple[Span, Span], float] = {}
        self._rows: dict[tuple[Span, Span], tuple[Floats, dict[Span, Floats]]] = {}

    def fault(self, block: Block, result: Buffer) -> str:
        """What is wrong with a block, or nothing.

        Args:
            block: which one.
            result: shape (m, n), as it came.

        Returns:
            A reason that a user can read; empty when the block is right to within rounding. A block
            that is not finite is right exactly where the server's own product is not finite.
        """
        with np.errstate(all="ignore"):
            values = result.float32()
            norms = np.sqrt(np.einsum("ij,ij->i", values, values, dtype=np.float64))
            if not np.isfinite(norms).all():
                return self._fault_not_finite(block, values)
            a_norms, expected = self._row(block)
            residual = values @ self._secret(block.n) - expected[block.n]
            scale = a_norms * self._column_norm(block)
            depth = block.k.size
            # No row of an honest C is longer than this; a longer one does not widen its tolerance.
            length = np.minimum(norms, 1.01 * scale)
            variance = _UNIT**2 * (scale**2 + (depth + block.n.size) / 3 * length**2)
            variance += _OUT_UNIT[result.dtype] ** 2 / 3 * length**2
            sigma = np.sqrt(variance)[:, None] + 1e-37
            share = np.abs(residual) / sigma
        if not np.isfinite(share).all():  # the product overflows in fp32: decided by doing it again
            return self._fault_again(block, values, sigma[:, 0])
        worst = float(share.max())
        if worst > ROW_LIMIT:
            row = block.m.start + int(share.max(1).argmax())
            return f"row {row} is off by {worst:.3g} times what rounding explains"
        spread = float(np.square(share).mean())
        if spread > SPREAD_LIMIT + _FEW_ROWS / share.size:
            return f"all rows together are off by {spread:.3g} times what rounding explains"
        return ""

    def _fault_not_finite(self, block: Block, values: Floats) -> str:
        """The run's own overflow, as in plain PyTorch, or the device's?"""
        own = self._product(block)
        if np.array_equal(np.isfinite(own), np.isfinite(values)):
            return ""
        return "it is not finite where the server's own product is"

    def _fault_again(self, block: Block, values: Floats, sigma: Any) -> str:
        own = self._product(block)
        if np.isfinite(own).all() and (np.abs(own - values) <= ROW_LIMIT * sigma[:, None]).all():
            return ""
        return "it differs from the server's own product"

    def _product(self, block: Block) -> Floats:
        a = self._a.region(block.m, block.k).float32()
        product: Floats = a @ self._b.region(block.k, block.n).float32()
        return product

    def _secret(self, n: Span) -> Floats:
        secret = self._secrets.get(n)
        if secret is None:
            shape = (n.size, VECTORS)
            sizes = self._rng.uniform(0.5, 1.0, shape)
            signs = self._rng.integers(0, 2, shape) * 2 - 1
            secret = self._secrets[n] = (sizes * signs).astype(np.float32)
        return secret

    def _column(self, n: Span) -> Floats:
        column = self._columns.get(n)
        if column is None:
            whole = Span(0, self._b.shape[0])
            column = self._b.region(whole, n).float32() @ self._secret(n)
            self._columns[n] = column
        return column

    def _column_norm(self, block: Block) -> float:
        key = (block.k, block.n)
        norm = self._column_norms.get(key)
        if norm is None:
            values = self._b.region(block.k, block.n).float32()
            norm = float(np.sqrt(np.einsum("ij,ij->", values, values, dtype=np.float64)))
            self._column_norms[key] = norm
        return norm

    def _row(self, block: Block) -> tuple[Floats, dict[Span, Floats]]:
        """Norms of A's rows, and A (B r) for every column that these rows meet."""
        key = (block.m, block.k)
        row = self._rows.get(key)
        if row is None or block.n not in row[1]:
            a = self._a.region(*key).float32()
            columns = self._together[key] if row is None else []
            if block.n not in columns:  # it was cut anew after a device was lost
                columns = [*columns, block.n]
            k = slice(block.k.start, block.k.stop)
            products = a @ np.concatenate([self._column(n)[k] for n in columns], axis=1)
            norms = np.sqrt(np.einsum("ij,ij->i", a, a, dtype=np.float64))
            split = dict(zip(columns, np.split(products, len(columns), axis=1), strict=True))
            row = self._rows[key] = (norms, split if row is None else row[1] | split)
        return row
