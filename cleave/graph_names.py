"""The names of the inputs and outputs of the computation graphs that the PS builds."""

from __future__ import annotations

from typing import Final

X: Final = "x"  # the input of a layer or of the loss
Y: Final = "y"  # the output of a layer
DX: Final = "dx"  # the gradient of the loss with respect to the input
DY: Final = "dy"  # the gradient of the loss with respect to the output


IDS: Final = "ids"  # token IDs of sequences, the input of the embedding
TARGETS: Final = "targets"  # target token of each position; -100 for positions without loss
SCALE: Final = "scale"  # factor of each token's loss: 1 / number of tokens in the global batch
FIRST: Final = "first"  # first row of a slice of the LM head
LOGITS: Final = "logits"  # a slice's logits, which the forward graph returns for the backward graph
SLICE_COLUMNS: Final = 2  # values per token that a slice returns: log-sum-exp and target logit
LOSS: Final = "loss"  # the sum of the losses of all tokens, each multiplied by the scale


def parameter(name: str) -> str:
    """Return the name of the graph input for a trained or frozen parameter, or for a buffer."""
    return f"parameter:{name}"


def extra(name: str) -> str:
    """Return the name of the graph input for a layer argument other than the first."""
    return f"extra:{name}"


def total(name: str) -> str:
    """Return the name of the graph input for a parameter's accumulated gradient."""
    return f"sum:{name}"


def new_total(name: str) -> str:
    """Return the name of the graph output for a gradient sum that includes this micro-batch."""
    return f"new:{name}"


def activation(number: int) -> str:
    """Return the name of an activation: an output of forward and an input of backward graphs."""
    return f"activation:{number}"


GRADIENT: Final = "gradient"  # the sum of a parameter's gradients over all micro-batches
SCALARS: Final = "scalars"  # coefficients of an optimizer step
SQUARES: Final = "squares"  # a sum of squared gradient elements
WEIGHT: Final = "weight"  # a parameter of any shape
START: Final = "start"  # a parameter at the start of a round of local updates
CODES: Final = "codes"  # quantized elements, as integers (see `exchange_graphs`)
MASK: Final = "mask"  # one bit per element: whether the element changes
ERROR: Final = "error"  # the part of earlier differences that a device has not returned yet
SCALES: Final = "scales"  # the factor of each block's codes
MOMENT: Final = "moment"  # an optimizer moment before the first update


def moment(number: int) -> str:
    """Return the name of the graph input for an optimizer moment, such as AdamW's first moment."""
    return f"moment:{number}"


def updated(name: str) -> str:
    """Return the name of the graph output for a weight or moment after an optimizer step."""
    return f"updated:{name}"
