"""Exports everything after a model's last layer, including the loss, as one graph.

    x, targets, scale, parameters, sums -> loss, dx, sums + gradients

Norm, LM head and cross-entropy process each token independently. So the graph's batch dimension is
the tokens: `x` has the shape (tokens, 1, width), and `targets` has the shape (tokens,). The caller
bounds the memory of the logits by limiting the number of tokens per run.
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
"""Target of a token that the loss ignores."""

_EXAMPLE_TOKENS: Final = 2


@dataclass(frozen=True)
class LossGraph:
    """The graph of everything after a model's last layer, including the loss.

    Attributes:
        graph: serialized ONNX model.
        parameters: names, in the model, of the parameters and buffers that the graph takes.
        trainable: names of the parameters for which the graph returns a gradient.
    """

    graph: bytes
    parameters: tuple[str, ...]
    trainable: tuple[str, ...]


def export_loss(model: nn.Module, calls: Sequence[LayerCall]) -> LossGraph:
    """Export the graph of everything after a causal language model's last layer.

    Args:
        model: the causal language model.
        calls: the recorded calls of the model's layers.

    Raises:
        LayerGraphError: when this part of the model cannot be exported; the message says why.
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
    """Select the parameters and buffers among a graph's inputs.

    Args:
        given: the graph's inputs by input name.

    Returns:
        A map from names in the model to parameters and buffers.
    """
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
