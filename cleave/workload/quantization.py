"""The sizes of weights in 4 or 8 bits; `cleave.training.lora.quantized` quantizes them."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

BLOCK: Final = 64
"""Elements of a row that share a scale (QLoRA, arXiv 2305.14314, section 4)."""

SCALE_BYTES: Final = 2
"""Bytes of a scale, which is bf16."""

_MOST_BYTES: Final = 255 * 2**20  # the protocol's largest message, because codes are one message


class Bits(IntEnum):
    """Bits of a quantized weight."""

    FOUR = 4
    """NF4, two codes to a byte, the first in its lower half."""

    EIGHT = 8
    """Integers with uniform steps."""

    @property
    def codes_per_byte(self) -> int:
        return 8 // self


def can_quantize(rows: int, columns: int, bits: Bits) -> bool:
    """Return whether a matrix can be quantized: whole blocks per row, codes fit in a message."""
    return columns % BLOCK == 0 and rows * columns // bits.codes_per_byte <= _MOST_BYTES


def quantized_bytes(rows: int, columns: int, bits: Bits) -> int:
    """Return the bytes of a quantized matrix with its scales.

    Args:
        rows, columns: shape of the matrix; columns must be a multiple of `BLOCK`.
    """
    return rows * columns // bits.codes_per_byte + rows * columns // BLOCK * SCALE_BYTES
