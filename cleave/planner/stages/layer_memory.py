"""The memory of a running layer graph, without its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cleave.attention_blocks import BLOCKS, Blocks

_FP32_BYTES: Final = 4
_INDEX_BYTES: Final = 2  # per element: a 32-bit integer for two codes of 4 bits


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

    Sessions share their memory, and the backward graph needs the most. Its peak occurs during the
    gradients of the MLP or of attention (measured: see `benchmarks/layer_memory.py`).

    Args:
        matrices: shapes of the layer's matrices.
        width: width of activations.
        heads: attention heads.
        sequence: tokens of a sequence.
        blocks: when attention is computed by blocks of queries.
        squeezed: whether scores are soft-capped, as in Gemma 2.
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
    """Return the memory in which a layer's graphs dequantize its weights, in bytes.

    The backward graph dequantizes each weight once for two uses. So all weights are in memory at
    the same time, with the integer codes of the one that is being dequantized.

    Args:
        elements: number of elements of each quantized matrix.
    """
    return _FP32_BYTES * sum(elements) + _INDEX_BYTES * max(elements, default=0)
