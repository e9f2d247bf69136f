"""The sizes of matrices quantized to 4 or 8 bits by `cleave.training.lora.quantized`."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

# Consecutive elements of a row that share one scale (QLoRA, arXiv 2305.14314, section 4).
BLOCK: Final = 64
SCALE_BYTES: Final = 2  # a scale is bf16
_MOST_BYTES: Final = 255 * 2**20  # largest message; it must fit the codes of a matrix


class Bits(IntEnum):
    """Number of bits of each quantized weight."""

    FOUR = 4
    """NF4 codes. Each byte holds two codes, the first code in the low 4 bits."""

    EIGHT = 8
    """Integers. The quantization levels are equally spaced."""

    @property
    def codes_per_byte(self) -> int:
        return 8 // self


def can_quantize(rows: int, columns: int, bits: Bits) -> bool:
    """Return True if a matrix can be quantized.

    Each row must consist of whole blocks of `BLOCK` elements. The codes of the matrix must fit in
    one protocol message.
    """
    return columns % BLOCK == 0 and rows * columns // bits.codes_per_byte <= _MOST_BYTES


def quantized_bytes(rows: int, columns: int, bits: Bits) -> int:
    """Return the size in bytes of a quantized matrix: the codes and the scales."""
    return rows * columns // bits.codes_per_byte + rows * columns // BLOCK * SCALE_BYTES
