"""Vocabulary-parallel loss, for an LM head that exceeds the memory of every device.

A *slice* is a range of rows of the LM head, together with the modules between the last layer and
the LM head. Each slice has two graphs:

    forward    x, targets, first, parameters -> y
    backward   x, targets, first, scale, dy, parameters, sums -> dx, sums + gradients

`first` is the slice's first row. `y` has the shape (tokens, 2): for each token, the log-sum-exp of
the logits in the slice, and the logit of the target, which is 0 if the target is in another slice.
`dy` is the log-sum-exp over the whole vocabulary, which the PS computes from the `y` of all slices
(`combined`). From `dy` each slice computes its own part of the loss gradient,

    dlogits = scale (exp(logits - log-sum-exp) - [the target's column]),

so devices never send logits. As in `loss_graph`, the batch dimension is the tokens: `x` has the
shape (tokens, 1, width). The gradients of `x` and of the parameters before the LM head are partial.
The sum over all slices is the full gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from cleave import graph_names as names
from cleave.graphs.calls import LayerCall
from cleave.graphs.errors import LayerGraphError
from cleave.graphs.loss_graph import LossGraph, parameters_in
from cleave.graphs.outside import OutsideLayers
from cleave.graphs.tracing import TracedGraph, to_onnx
from cleave.machine.graph_session import Array

_EXAMPLE_TOKENS: Final = 2


@dataclass(frozen=True)
class SliceGraphs:
    """The graphs of all slices that have a given number of LM head rows.

    Attributes:
        forward, backward: serialized ONNX models.
        parameters: names, in the model, of the parameters and buffers that the graphs take.
        trainable: names of the parameters for which the backward graph returns a gradient.
        cut: names of the parameters of which a slice takes only its own rows.
    """

    forward: bytes
    backward: bytes
    parameters: tuple[str, ...]
    trainable: tuple[str, ...]
    cut: tuple[str, ...]


def export_slice(
    model: nn.Module, calls: Sequence[LayerCall], loss: LossGraph, rows: int
) -> SliceGraphs:
    """Export the graphs of a slice of a causal language model's loss.

    Args:
        model: the causal language model.
        calls: the recorded calls of the model's layers.
        loss: the model's loss as one graph.
        rows: number of LM head rows in the slice.

    Raises:
        LayerGraphError: when the loss cannot be cut into slices; the message says why.
    """
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    cut = rows_of_head(model, loss)
    if not cut:
        raise LayerGraphError("its LM head is not a plain Linear, of which rows can be taken")
    one = _Slice(OutsideLayers(model, calls), loss.trainable)
    inputs = {
        names.X: torch.zeros(_EXAMPLE_TOKENS, 1, calls[-1].y.shape[-1]),
        names.TARGETS: torch.zeros(_EXAMPLE_TOKENS, dtype=torch.long),
        names.FIRST: torch.zeros(1, dtype=torch.long),
    }
    sliced = {n: held[n][:rows] if n in cut else held[n] for n in loss.parameters}
    inputs |= {names.parameter(n): tensor for n, tensor in sliced.items()}
    varying = {names.X, names.TARGETS, names.DY}
    forward = to_onnx(TracedGraph(one.forward, inputs, (names.Y,), varying))
    inputs |= {names.SCALE: torch.zeros(()), names.DY: torch.zeros(_EXAMPLE_TOKENS, 1)}
    inputs |= {names.total(n): sliced[n] for n in loss.trainable}
    outputs = (names.DX, *(names.new_total(n) for n in loss.trainable))
    backward = to_onnx(TracedGraph(one.backward, inputs, outputs, varying))
    return SliceGraphs(forward, backward, loss.parameters, loss.trainable, cut)


def rows_of_head(model: nn.Module, loss: LossGraph) -> tuple[str, ...]:
    """Return the names of the LM head's parameters, which have a row for each vocabulary token.

    The tuple is empty if the LM head is not a plain `Linear`. The loss cannot be cut into slices
    then.
    """
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    if type(head) is not nn.Linear:
        return ()
    own = {id(parameter) for parameter in head.parameters()}
    named = dict(model.named_parameters())
    return tuple(n for n in loss.parameters if n in named and id(named[n]) in own)


@dataclass(frozen=True)
class _Slice:
    outside: OutsideLayers
    trainable: Sequence[str]

    def forward(self, given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return each token's log-sum-exp and target logit, shape (tokens, 2)."""
        logits = self._logits(given, parameters_in(given), given[names.X])
        own = torch.where(_is_target(given, logits), logits, 0.0).sum(1)
        return (torch.stack([torch.logsumexp(logits, 1), own], 1),)

    def backward(self, given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the gradient of `x`, and the parameters' gradient sums including this run."""
        held = parameters_in(given)

        def logits_of(x: Tensor, trained: Mapping[str, Tensor]) -> Tensor:
            return self._logits(given, {**held, **trained}, x)

        trained = {n: held[n] for n in self.trainable}
        logits, pulled = torch.func.vjp(logits_of, given[names.X], trained)  # type: ignore[misc]
        counts = (given[names.TARGETS] >= 0).float() * given[names.SCALE]
        off = torch.exp(logits - given[names.DY]) - _is_target(given, logits).float()
        dx, gradients = pulled(off * counts[:, None])
        return (dx, *(given[names.total(n)] + gradients[n] for n in self.trainable))

    def _logits(self, given: Mapping[str, Tensor], held: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return self.outside.logits(held, x).flatten(0, 1).float()


def _is_target(given: Mapping[str, Tensor], logits: Tensor) -> Tensor:
    """Return a mask that is true at each token's target logit, shape (tokens, rows)."""
    column = torch.arange(logits.shape[1]) + given[names.FIRST]
    return column[None] == given[names.TARGETS][:, None]


def combined(of_slices: Sequence[Array], targets: Array, scale: float) -> tuple[float, Array]:
    """Combine the forward outputs of all slices.

    Args:
        of_slices: the forward output of each slice, shape (tokens, 2).
        targets: target token IDs, shape (tokens,); -100 for ignored tokens.
        scale: factor of each token's loss.

    Returns:
        The loss, and the log-sum-exp over the whole vocabulary, shape (tokens, 1).
    """
    parts = np.stack([part.astype(np.float64) for part in of_slices])
    with np.errstate(invalid="ignore"):  # a diverging training run has infinite logits
        total = np.logaddexp.reduce(parts[:, :, 0], axis=0)
    each = np.where(targets >= 0, total - parts[:, :, 1].sum(axis=0), 0.0)
    return float(each.sum() * scale), total[:, None].astype(np.float32)
