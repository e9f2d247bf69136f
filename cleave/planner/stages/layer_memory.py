"""The memory that a layer's graph needs while it runs, without the graph's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cleave.attention_blocks import BLOCKS, Blocks

_FP32_BYTES: Final = 4
_INDEX_BYTES: Final = 2  # bytes per element: two 4-bit codes are indexed by one 32-bit integer


def working_bytes(
    matrices: Sequence[tuple[int, int]],
    width: int,
    heads: int,
    sequence: int,
    blocks: Blocks = BLOCKS,
    *,
    squeezed: bool = False,
) -> float:
    """Return the working memory of a layer's graphs, in bytes per token.

    All graphs of a layer share one memory arena, and the backward graph needs the most memory. Its
    peak occurs while the gradients of the MLP or of attention are computed.
    `benchmarks/layer_memory.py` measures the memory.

    Args:
        matrices: shapes of the layer's weight matrices.
        width: elements per token of an activation between layers.
        heads: number of attention heads; 0 without attention.
        sequence: tokens per sequence.
        blocks: memory limits above which attention is computed for one block of queries at a time.
        squeezed: whether attention scores are soft-capped, as in Gemma 2.
    """
    inner = max((max(shape) for shape in matrices), default=width)
    of_mlp = sum(max(shape) == inner and min(shape) == width for shape in matrices)
    rows = blocks.rows(heads, sequence, sequence)
    scores = heads * rows  # elements per token of the scores that are computed at once
    whole = rows == sequence
    mlp = 7.5 * width + (2 + 2 * of_mlp) * inner + (scores if whole else 0)
    copies = (4.5 if whole else 7.5) + (3 if squeezed else 0)  # a Scan works in place less often
    attention = 7 * width + copies * scores
    return _FP32_BYTES * max(mlp, attention)


def dequantized_bytes(elements: Sequence[int]) -> int:
    """Return the memory that a layer's graphs need to dequantize the layer's weights, in bytes.

    The backward graph uses each dequantized weight twice. So all dequantized weights are in memory
    at the same time, together with the integer codes of the weight that is being dequantized.

    Args:
        elements: number of elements of each quantized matrix.
    """
    return _FP32_BYTES * sum(elements) + _INDEX_BYTES * max(elements, default=0)
