"""A decoder layer as graphs: forward, and backward with and without its forward computed again.

Graphs are pure functions of arrays, with a batch of any size:

    forward           x, parameters, others                         -> y, activations
    backward          x, dy, parameters, others, sums               -> dx, sums + gradients
    from_activations  x, dy, parameters, others, sums, activations  -> dx, sums + gradients

Where activations are kept between the passes, the last one spares most of the forward pass that
`backward` does again. Inputs and outputs are named as `names` says. All floating-point arrays are
fp32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cleave import graph_names as names
from cleave.graphs.calls import LayerCall
from cleave.graphs.errors import LayerGraphError
from cleave.graphs.tracing import TracedGraph, refuse_chance, to_onnx_split


@dataclass(frozen=True)
class LayerGraphs:
    """The graphs of one kind of layer.

    Attributes:
        forward, backward, from_activations: ONNX models.
        activations: the elements for each sample of what the forward pass returns for the last of
            them, by name.
        parameters: names of its parameters and buffers, within the layer.
        trainable: those that get a gradient.
    """

    forward: bytes
    backward: bytes
    from_activations: bytes
    activations: dict[str, int]
    parameters: tuple[str, ...]
    trainable: tuple[str, ...]


def export_layer(call: LayerCall) -> LayerGraphs:
    """Make the graphs of a layer, as the model calls it.

    Raises:
        LayerGraphError: when it cannot become a graph; says why.
    """
    parameters = parameters_of(call.layer)
    trainable = tuple(n for n, p in call.layer.named_parameters() if p.requires_grad)
    batch = call.x.shape[0]
    if call.x.dim() != 3 or batch < 2 or batch in call.x.shape[1:]:
        raise LayerGraphError(f"its input has the shape {tuple(call.x.shape)}")
    layer = _Function(call, tuple(parameters), trainable)
    inputs = {names.X: call.x}
    inputs |= {names.parameter(n): p for n, p in parameters.items()}
    inputs |= {names.beside(n): t for n, t in call.beside.items()}
    sums = {names.total(n): parameters[n] for n in trainable}
    varying = {n for n, t in inputs.items() if _varies(n, t, batch)} | {names.DY}
    was_training = call.layer.training
    call.layer.train()  # what drops at random is to be found, not left out
    try:
        found = names.DX, *(names.new_total(n) for n in trainable)
        given = {**inputs, names.DY: call.x, **sums}
        both = TracedGraph(layer.both, given, (names.Y, *found), varying)
        try:
            models = to_onnx_split(both, names.DY, 1, names.activation)
        except LayerGraphError:  # the gradient of what drops at random fails for other reasons
            refuse_chance(TracedGraph(layer.forward, inputs, (names.Y,), varying))
            raise
        return LayerGraphs(
            models.forward,
            models.backward,
            models.from_activations,
            dict(models.activations),
            tuple(parameters),
            trainable,
        )
    finally:
        call.layer.train(was_training)


def parameters_of(layer: nn.Module) -> dict[str, Tensor]:
    """Return a layer's parameters and buffers by name, each tensor once."""
    found: dict[str, Tensor] = dict(layer.named_parameters())
    return found | dict(layer.named_buffers())


def _varies(name: str, tensor: Tensor, batch: int) -> bool:
    """Say whether an input has as many rows as the batch has samples."""
    of_batch = name == names.X or name.startswith(names.beside(""))
    return of_batch and tensor.dim() > 0 and tensor.shape[0] == batch


@dataclass(frozen=True)
class _Function:
    """A layer as functions of named tensors."""

    call: LayerCall
    parameters: Sequence[str]
    trainable: Sequence[str]

    def forward(self, given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return (self._run(given, given[names.X], {}),)

    def both(self, given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        def run(x: Tensor, trained: dict[str, Tensor]) -> Tensor:
            return self._run(given, x, trained)

        trained = {n: given[names.parameter(n)] for n in self.trainable}
        y, pull, *_ = torch.func.vjp(run, given[names.X], trained)
        dx, gradients = pull(given[names.DY])
        return (y, dx, *(given[names.total(n)] + gradients[n] for n in self.trainable))

    def _run(self, given: Mapping[str, Tensor], x: Tensor, trained: Mapping[str, Tensor]) -> Tensor:
        held = {n: given[names.parameter(n)] for n in self.parameters} | dict(trained)
        beside = {n: given[names.beside(n)] for n in self.call.beside}
        return self.call.run(held, x, beside)
