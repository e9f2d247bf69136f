"""The names of inputs and outputs of computation graphs. The PS and devices use the same names."""

from __future__ import annotations

from typing import Final

X: Final = "x"  # the input of a layer or of the loss
Y: Final = "y"  # A layer's output
DX: Final = "dx"  # the gradient of the loss with respect to the input
DY: Final = "dy"  # the gradient of the loss with respect to the output


TARGETS: Final = "targets"  # target token of each position; -100 if it has no loss
SCALE: Final = "scale"  # of each token's loss: one over the tokens of the global batch
FIRST: Final = "first"  # row in the whole LM head at which a slice begins
SLICE_COLUMNS: Final = 2  # a slice's output for a token: log-sum-exp and target logit
LOSS: Final = "loss"  # the sum of the losses of all tokens, each multiplied by the scale


def parameter(name: str) -> str:
    """Return the name of the graph input for a trained or frozen parameter, or for a buffer."""
    return f"parameter:{name}"


def extra(name: str) -> str:
    """Return the name of the graph input for a layer argument other than the first argument."""
    return f"extra:{name}"


def total(name: str) -> str:
    """Return the name of the graph input for a parameter's accumulated gradient."""
    return f"sum:{name}"


def new_total(name: str) -> str:
    """Return the graph output for a parameter's gradient, including this micro-batch."""
    return f"new:{name}"


def activation(number: int) -> str:
    """Return the name of the activation with this index, which the backward graph takes."""
    return f"activation:{number}"
