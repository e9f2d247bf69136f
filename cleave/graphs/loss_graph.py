"""Export everything after a model's last layer, as one graph or in slices of the vocabulary.

Norm, LM head and cross-entropy process each token independently. So the graphs' batch dimension
consists of tokens: `x` has the shape (tokens, 1, width), and `targets` has the shape (tokens,). The
caller bounds the memory of the logits by limiting the number of tokens per run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from cleave import graph_names as names
from cleave.errors import LayerGraphError
from cleave.graphs.calls import LayerCall, OutsideLayers
from cleave.graphs.tracing import TracedGraph, core_aten, to_onnx
from cleave.machine.graph_session import Array

IGNORED: Final = -100  # target of a token that the loss ignores

_EXAMPLE_TOKENS: Final = 2


@dataclass(frozen=True)
class LossGraph:
    """The graph of the loss: x, targets, scale, parameters, sums -> loss, dx, sums + gradients.

    Attributes:
        graph: serialized ONNX model.
        parameters: the model's names of the parameters and buffers that the graph reads.
        trainable: the model's names of the parameters for which the graph returns a gradient.
    """

    graph: bytes
    parameters: tuple[str, ...]
    trainable: tuple[str, ...]


def export_loss(model: nn.Module, calls: Sequence[LayerCall]) -> LossGraph:
    """Export everything after a causal language model's last layer as one graph.

    Raises:
        LayerGraphError: if this part of the model cannot be exported. The message states the
            reason.
    """
    outside = OutsideLayers(model, calls)
    held: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
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

    def gradients(given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        held = parameters_in(given)

        def loss(x: Tensor, trained: Mapping[str, Tensor]) -> Tensor:
            logits = outside.logits({**held, **trained}, x).flatten(0, 1).float()
            each = torch.nn.functional.cross_entropy(
                logits, given[names.TARGETS], ignore_index=IGNORED, reduction="sum"
            )
            return each * given[names.SCALE]

        both = torch.func.grad_and_value(loss, argnums=(0, 1))
        (dx, found), value = both(given[names.X], {n: held[n] for n in trainable})
        return (value.reshape(1), dx, *(given[names.total(n)] + found[n] for n in trainable))

    traced = TracedGraph(gradients, inputs, outputs, varying)
    return LossGraph(to_onnx(traced), parameters, trainable)


def parameters_in(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters and buffers among a graph's inputs, by their names in the model."""
    prefix = names.parameter("")
    return {n.removeprefix(prefix): t for n, t in given.items() if n.startswith(prefix)}


@dataclass(frozen=True)
class SliceGraphs:
    """Graphs that are shared by all slices with the same number of LM head rows.

    A *slice* is a range of rows of the LM head, together with the modules between the last
    layer and the LM head:

        forward    x, targets, first, parameters -> y, logits
        backward   x, targets, first, scale, dy, logits, parameters, sums -> dx, sums + gradients

    `first` is the slice's first row. `y` has the shape (tokens, 2): for each token, the log-sum-exp
    of the logits in the slice, and the logit of the target token, or 0 if the target token is in
    another slice. `dy` is the log-sum-exp over the whole vocabulary, from `combined`. With `dy`,
    each slice computes its own part of the loss gradient, so devices never send logits:

        dlogits = scale (exp(logits - log-sum-exp) - [the column is the target])

    The gradients of `x` and of the parameters before the LM head are summed over all slices.

    Attributes:
        forward, backward: serialized ONNX models.
        parameters: the model's names of the parameters and buffers that the graphs read.
        trainable: the model's names of the parameters for which the backward graph returns a
            gradient.
        cut: names of the LM head's parameters. Each slice uses only its own rows of them.
    """

    forward: bytes
    backward: bytes
    parameters: tuple[str, ...]
    trainable: tuple[str, ...]
    cut: tuple[str, ...]


def export_slice(
    model: nn.Module, calls: Sequence[LayerCall], loss: LossGraph, rows: int
) -> SliceGraphs:
    """Export the graphs of a slice with `rows` LM head rows. `loss` is the graph of the whole loss.

    Raises:
        LayerGraphError: if the loss cannot be cut into slices. The message states the reason.
    """
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    cut = rows_of_head(model, loss)
    if not cut:
        raise LayerGraphError("its LM head is not a plain nn.Linear, so it cannot be cut")
    outside = OutsideLayers(model, calls)

    def is_target(given: Mapping[str, Tensor], logits: Tensor) -> Tensor:
        column = torch.arange(logits.shape[1]) + given[names.FIRST]
        return column[None] == given[names.TARGETS][:, None]

    def y_of(given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        logits = outside.logits(parameters_in(given), given[names.X]).flatten(0, 1).float()
        own = torch.where(is_target(given, logits), logits, 0.0).sum(1)
        return torch.stack([torch.logsumexp(logits, 1), own], 1), logits

    def gradients(given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        held = parameters_in(given)

        def logits_of(x: Tensor, trained: Mapping[str, Tensor]) -> Tensor:
            return outside.logits({**held, **trained}, x).flatten(0, 1).float()

        trained = {n: held[n] for n in loss.trainable}
        _, pulled = torch.func.vjp(logits_of, given[names.X], trained)  # type: ignore[misc]
        logits = given[names.LOGITS]
        counts = (given[names.TARGETS] >= 0).float() * given[names.SCALE]
        off = torch.exp(logits - given[names.DY]) - is_target(given, logits).float()
        dx, found = pulled(off * counts[:, None])
        return (dx, *(given[names.total(n)] + found[n] for n in loss.trainable))

    inputs = {
        names.X: torch.zeros(_EXAMPLE_TOKENS, 1, calls[-1].y.shape[-1]),
        names.TARGETS: torch.zeros(_EXAMPLE_TOKENS, dtype=torch.long),
        names.FIRST: torch.zeros(1, dtype=torch.long),
    }
    sliced = {n: held[n][:rows] if n in cut else held[n] for n in loss.parameters}
    inputs |= {names.parameter(n): tensor for n, tensor in sliced.items()}
    varying = {names.X, names.TARGETS, names.DY, names.LOGITS}
    forward = to_onnx(TracedGraph(y_of, inputs, (names.Y, names.LOGITS), varying))
    inputs |= {names.SCALE: torch.zeros(()), names.DY: torch.zeros(_EXAMPLE_TOKENS, 1)}
    inputs[names.LOGITS] = torch.zeros(_EXAMPLE_TOKENS, rows)
    inputs |= {names.total(n): sliced[n] for n in loss.trainable}
    outputs = (names.DX, *(names.new_total(n) for n in loss.trainable))
    backward = to_onnx(TracedGraph(gradients, inputs, outputs, varying))
    return SliceGraphs(forward, backward, loss.parameters, loss.trainable, cut)


def rows_of_head(model: nn.Module, loss: LossGraph) -> tuple[str, ...]:
    """Return the LM head's parameter names; empty unless the head is a plain `nn.Linear`."""
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    if type(head) is not nn.Linear:
        return ()
    own = {id(parameter) for parameter in head.parameters()}
    named = dict(model.named_parameters())
    return tuple(n for n in loss.parameters if n in named and id(named[n]) in own)


def combined(of_slices: Sequence[Array], targets: Array, scale: float) -> tuple[float, Array]:
    """Compute the loss from the forward outputs of all slices, each of shape (tokens, 2).

    Returns:
        The loss, and the log-sum-exp over the whole vocabulary, shape (tokens, 1).
    """
    parts = np.stack([part.astype(np.float64) for part in of_slices])
    with np.errstate(invalid="ignore"):  # a diverging training run has infinite logits
        total = np.logaddexp.reduce(parts[:, :, 0], axis=0)
    each = np.where(targets >= 0, total - parts[:, :, 1].sum(axis=0), 0.0)
    return float(each.sum() * scale), total[:, None].astype(np.float32)
