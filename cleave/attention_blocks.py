"""Sizes of the query blocks that limit the memory for attention scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_FP32_BYTES: Final = 4


@dataclass(frozen=True)
class Blocks:
    """Memory limits for the attention scores of one layer and one sequence.

    Attributes:
        whole_bytes: maximum size in bytes of the scores of all queries. If the scores are larger,
            attention is computed for one block of queries at a time.
        block_bytes: maximum size in bytes of one block's scores, if the block has several queries.
    """

    whole_bytes: int = 64 * 2**20  # blocks are not faster at 48 MB of scores, but at 768 MB
    block_bytes: int = 24 * 2**20  # half this size takes 8 % longer; twice this size saves 4 %

    def rows(self, heads: int, queries: int, keys: int) -> int:
        """Return the number of queries per block, or `queries` if no blocks are needed."""
        row_bytes = heads * keys * _FP32_BYTES
        if queries * row_bytes <= self.whole_bytes:
            return queries
        return max(1, min(queries, self.block_bytes // row_bytes))


BLOCKS: Final = Blocks()  # the default limits
