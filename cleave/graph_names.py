"""The names of a graph's inputs and outputs, shared by PS and devices."""

from __future__ import annotations

from typing import Final

X: Final = "x"
"""The input of a layer or of the loss."""

Y: Final = "y"
"""A layer's output."""

DX: Final = "dx"
"""The gradient with respect to the input."""

DY: Final = "dy"
"""The gradient with respect to the output."""


TARGETS: Final = "targets"
"""The target tokens of the loss; -100 for tokens without a loss."""

SCALE: Final = "scale"
"""The factor on each token's loss: one over the tokens of the global batch."""

FIRST: Final = "first"
"""The first row of a slice of the LM head."""

SLICE_COLUMNS: Final = 2
"""Columns of a slice's output: log-sum-exp and target logit of each token."""

LOSS: Final = "loss"
"""The sum of the scaled losses of all tokens."""


def parameter(name: str) -> str:
    """Return the name of the input for a parameter, frozen or not, or a buffer."""
    return f"parameter:{name}"


def beside(name: str) -> str:
    """Return the name of the input for a layer argument other than the first."""
    return f"beside:{name}"


def total(name: str) -> str:
    """Return the name of the input for a parameter's accumulated gradient."""
    return f"sum:{name}"


def new_total(name: str) -> str:
    """Return the name of the output for the accumulated gradient including this batch."""
    return f"new:{name}"


def activation(number: int) -> str:
    """Return the name of an activation that the forward pass outputs for the backward pass."""
    return f"activation:{number}"
