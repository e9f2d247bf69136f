"""When a layer's attention goes by blocks of queries, and how large they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_FP32_BYTES: Final = 4


@dataclass(frozen=True)
class Blocks:
    """How much of the scores of a layer's attention there may be at once, for each sample.

    Attributes:
        whole_bytes: scores that take no more are computed at once.
        block_bytes: what the scores of a block take at most, where they take more.
    """

    whole_bytes: int = 64 * 2**20  # at 48 MB blocks are no quicker, at 768 MB they are
    block_bytes: int = 24 * 2**20  # half of it takes 8 % longer, twice it 4 % less

    def rows(self, heads: int, queries: int, keys: int) -> int:
        """Return for how many queries scores are computed at once: for all, or for a block."""
        row_bytes = heads * keys * _FP32_BYTES
        if queries * row_bytes <= self.whole_bytes:
            return queries
        return max(1, min(queries, self.block_bytes // row_bytes))


BLOCKS: Final = Blocks()
"""By which layers go, unless told otherwise."""
