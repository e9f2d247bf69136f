"""The names of a graph's inputs and outputs, which PS and devices share."""

from __future__ import annotations

from typing import Final

X: Final = "x"
"""A layer's input, or the loss's."""

Y: Final = "y"
"""A layer's output."""

DX: Final = "dx"
"""The gradient with respect to the input."""

DY: Final = "dy"
"""The gradient with respect to the output."""


TARGETS: Final = "targets"
"""The tokens that the loss expects; -100 where it expects none."""

SCALE: Final = "scale"
"""What each token's loss counts: one over the tokens of the global batch."""

FIRST: Final = "first"
"""The first row of a slice of the LM head."""

SLICE_COLUMNS: Final = 2
"""Of a slice's output: of each token the log-sum-exp, and the target's logit."""

LOSS: Final = "loss"
"""The scaled loss of all tokens together."""


def parameter(name: str) -> str:
    """Name the input for a parameter, frozen or not, or a buffer."""
    return f"parameter:{name}"


def beside(name: str) -> str:
    """Name the input for a tensor that a layer is called with beside its first argument."""
    return f"beside:{name}"


def total(name: str) -> str:
    """Name the input for the sum of a parameter's gradients so far."""
    return f"sum:{name}"


def new_total(name: str) -> str:
    """Name the output for that sum with this batch's gradient."""
    return f"new:{name}"


def activation(number: int) -> str:
    """Name an array that the forward pass makes and the backward pass can take from it."""
    return f"activation:{number}"
