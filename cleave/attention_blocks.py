"""The choice between whole attention and attention by blocks of queries, and the block size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_FP32_BYTES: Final = 4


@dataclass(frozen=True)
class Blocks:
    """Limits for a layer's attention scores in memory at once, per sample.

    Attributes:
        whole_bytes: scores up to this size are computed at once.
        block_bytes: maximum size of a block's scores, if all of them are larger.
    """

    whole_bytes: int = 64 * 2**20  # at 48 MB blocks are no faster, at 768 MB they are
    block_bytes: int = 24 * 2**20  # half this takes 8 % longer, twice this 4 % less

    def rows(self, heads: int, queries: int, keys: int) -> int:
        """Return the number of queries per block; all queries if no blocks are needed."""
        row_bytes = heads * keys * _FP32_BYTES
        if queries * row_bytes <= self.whole_bytes:
            return queries
        return max(1, min(queries, self.block_bytes // row_bytes))


BLOCKS: Final = Blocks()
"""The default limits."""
