"""The sizes of weights in 4 or 8 bits; `cleave.training.lora.quantized` makes them."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

BLOCK: Final = 64
"""Elements of a row that share a scale (QLoRA, arXiv 2305.14314, section 4)."""

SCALE_BYTES: Final = 2
"""Of a scale, which is bf16 wherever it is."""

_MOST_BYTES: Final = 255 * 2**20  # of the protocol's largest message, as codes travel in one


class Bits(IntEnum):
    """The width of a weight's code."""

    FOUR = 4
    """NF4, two codes to a byte, the first in its lower half."""

    EIGHT = 8
    """Integers of equal distance."""

    @property
    def codes_per_byte(self) -> int:
        """Return how many codes a byte has."""
        return 8 // self


def can_quantize(rows: int, columns: int, bits: Bits) -> bool:
    """Say whether a matrix can be in so many bits: its rows are whole blocks, and codes travel."""
    return columns % BLOCK == 0 and rows * columns // bits.codes_per_byte <= _MOST_BYTES


def quantized_bytes(rows: int, columns: int, bits: Bits) -> int:
    """Return the bytes of a matrix in so many bits, with its scales.

    Args:
        rows, columns: of the matrix; columns a multiple of `BLOCK`.
        bits: the width of a code.
    """
    return rows * columns // bits.codes_per_byte + rows * columns // BLOCK * SCALE_BYTES
