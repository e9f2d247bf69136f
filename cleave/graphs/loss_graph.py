"""Everything after a model's last layer, including the loss, as one graph.

    x, targets, scale, parameters, sums -> loss, dx, sums + gradients

Norm, LM head and cross-entropy process each token independently, so the graph's batch is tokens:
`x` has the shape (tokens, 1, width) and `targets` (tokens,). The caller chooses the tokens per run,
which bounds the memory of the logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from cleave import graph_names as names
from cleave.graphs.calls import LayerCall
from cleave.graphs.outside import OutsideLayers
from cleave.graphs.tracing import TracedGraph, core_aten, to_onnx

IGNORED: Final = -100
"""The target of tokens that do not count in the loss."""

_EXAMPLE_TOKENS: Final = 2


@dataclass(frozen=True)
class LossGraph:
    """The graph of a model's loss.

    Attributes:
        graph: an ONNX model.
        parameters: names of the graph's parameters and buffers, within the model.
        trainable: names of the parameters that get a gradient.
    """

    graph: bytes
    parameters: tuple[str, ...]
    trainable: tuple[str, ...]


def export_loss(model: nn.Module, calls: Sequence[LayerCall]) -> LossGraph:
    """Export the graph of everything after a causal language model's last layer.

    Args:
        calls: how the model calls its layers.

    Raises:
        LayerGraphError: when this part cannot become a graph; the message says why.
    """
    outside = OutsideLayers(model, calls)
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    inputs = {names.X: torch.zeros(_EXAMPLE_TOKENS, 1, calls[-1].y.shape[-1])}
    inputs |= {names.parameter(n): t for n, t in held.items()}
    varying = {names.X, names.TARGETS}

    def logits(given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return (outside.logits(parameters_in(given), given[names.X]),)

    _, used = core_aten(TracedGraph(logits, inputs, ("logits",), varying))
    parameters = tuple(n for n in held if names.parameter(n) in used)
    trainable = tuple(n for n in parameters if held[n].requires_grad)
    inputs[names.TARGETS] = torch.zeros(_EXAMPLE_TOKENS, dtype=torch.long)
    inputs[names.SCALE] = torch.zeros(())
    inputs |= {names.total(n): held[n] for n in trainable}
    outputs = (names.LOSS, names.DX, *(names.new_total(n) for n in trainable))
    loss = _Loss(outside, trainable)
    return LossGraph(
        to_onnx(TracedGraph(loss.gradients, inputs, outputs, varying)), parameters, trainable
    )


def parameters_in(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters from a graph's inputs, by their names in the model."""
    prefix = names.parameter("")
    return {n.removeprefix(prefix): t for n, t in given.items() if n.startswith(prefix)}


@dataclass(frozen=True)
class _Loss:
    outside: OutsideLayers
    trainable: Sequence[str]

    def gradients(self, given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        held = parameters_in(given)

        def loss(x: Tensor, trained: Mapping[str, Tensor]) -> Tensor:
            logits = self.outside.logits({**held, **trained}, x).flatten(0, 1).float()
            each = torch.nn.functional.cross_entropy(
                logits, given[names.TARGETS], ignore_index=IGNORED, reduction="sum"
            )
            return each * given[names.SCALE]

        trained = {n: held[n] for n in self.trainable}
        both = torch.func.grad_and_value(loss, argnums=(0, 1))
        (dx, gradients), value = both(given[names.X], trained)
        totals = (given[names.total(n)] + gradients[n] for n in self.trainable)
        return (value.reshape(1), dx, *totals)
