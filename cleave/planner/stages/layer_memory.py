"""The memory that running a layer's graphs takes, beside what they are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cleave.attention_blocks import BLOCKS, Blocks

_FP32_BYTES: Final = 4
_INDEX_BYTES: Final = 2  # of an element: a 32-bit integer for two codes of 4 bits


def working_bytes(
    matrices: Sequence[tuple[int, int]],
    width: int,
    heads: int,
    sequence: int,
    blocks: Blocks = BLOCKS,
    *,
    squeezed: bool = False,
) -> float:
    """Return the memory that the backward graph works in, for each token.

    It is the larger of the two: sessions share their memory, so that the forward graph needs no
    more. There is most of it either while the MLP's gradients are computed or while those of
    attention are. How many arrays there are then was measured: see `benchmarks/layer_memory.py`.

    Args:
        matrices: shapes of the layer's.
        width: of activations.
        heads: of attention.
        sequence: tokens of a sequence.
        blocks: when attention goes by blocks of queries.
        squeezed: whether scores are squeezed to a bound, as in Gemma 2.
    """
    inner = max((max(shape) for shape in matrices), default=width)
    of_mlp = sum(max(shape) == inner and min(shape) == width for shape in matrices)
    rows = blocks.rows(heads, sequence, sequence)
    scores = heads * rows  # of all queries at once, by the tokens of a sequence
    whole = rows == sequence
    mlp = 7.5 * width + (2 + 2 * of_mlp) * inner + (scores if whole else 0)
    copies = (4.5 if whole else 7.5) + (3 if squeezed else 0)  # a Scan does less in place
    attention = 7 * width + copies * scores
    return _FP32_BYTES * max(mlp, attention)


def dequantized_bytes(elements: Sequence[int]) -> int:
    """Return the memory in which a layer's graphs make its quantized weights.

    The backward graph needs each weight twice and makes it once, so that all of them are there
    at the same time, and while one is made its codes as integers are, too.

    Args:
        elements: of each quantized matrix.
    """
    return _FP32_BYTES * sum(elements) + _INDEX_BYTES * max(elements, default=0)
