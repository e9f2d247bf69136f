"""Exports a decoder layer as a forward graph and backward graphs with and without recomputation.

Each graph is a pure function of arrays and accepts any batch size:

    forward           x, parameters, others                         -> y, activations
    backward          x, dy, parameters, others, sums               -> dx, sums + gradients
    from_activations  x, dy, parameters, others, sums, activations  -> dx, sums + gradients

`others` are the layer's other tensor arguments, such as masks. `sums` are the accumulated gradients
of the parameters. If a device stores the activations between the two passes, `from_activations`
avoids most of the forward recomputation of `backward`. `cleave.graph_names` defines the names of
inputs and outputs. All floating-point arrays are fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cleave import graph_names as names
from cleave.graphs.errors import LayerGraphError
from cleave.graphs.layer_parts import LayerPart
from cleave.graphs.tracing import TracedGraph, refuse_chance, to_onnx_split


@dataclass(frozen=True)
class LayerGraphs:
    """The graphs of one kind of layer, or of a part of a layer.

    Attributes:
        forward, backward, from_activations: serialized ONNX models.
        activations: maps the name of each activation that `forward` returns to its number of
            elements per sample.
        parameters: names of the layer's parameters and buffers, relative to the layer.
        trainable: names of the parameters for which the backward graphs return a gradient.
    """

    forward: bytes
    backward: bytes
    from_activations: bytes
    activations: dict[str, int]
    parameters: tuple[str, ...]
    trainable: tuple[str, ...]


def export_layer(part: LayerPart) -> LayerGraphs:
    """Export the graphs of a layer, or of a part of a layer.

    Raises:
        LayerGraphError: when the layer cannot be exported as a graph; the message says why.
    """
    batch = part.x.shape[0]
    if part.x.dim() != 3 or batch < 2 or batch in part.x.shape[1:]:
        raise LayerGraphError(f"its input has the shape {tuple(part.x.shape)}")
    trainable = part.trainable()
    layer = _Function(part, trainable)
    inputs = part.inputs()
    sums = {names.total(n): part.held[n] for n in trainable}
    varying = part.varying() | {names.DY}
    module = part.call.layer
    was_training = module.training
    module.train()  # so that the trace contains dropout, which is then refused
    try:
        found = names.DX, *(names.new_total(n) for n in trainable)
        given = {**inputs, names.DY: part.x, **sums}
        both = TracedGraph(layer.both, given, (names.Y, *found), varying)
        try:
            models = to_onnx_split(both, names.DY, 1, names.activation)
        except LayerGraphError:  # dropout makes the gradient fail first, with a less clear reason
            alibi = part.call.beside.get("alibi")
            if alibi is not None and alibi.shape[0] != batch:
                raise LayerGraphError(
                    f"it is called with alibi of shape {tuple(alibi.shape)}, whose first dimension "
                    f"is not the {batch} sequences of the batch"
                ) from None
            refuse_chance(TracedGraph(layer.forward, inputs, (names.Y,), varying))
            raise
        return LayerGraphs(
            models.forward,
            models.backward,
            models.from_activations,
            dict(models.activations),
            tuple(part.held),
            trainable,
        )
    finally:
        module.train(was_training)


@dataclass(frozen=True)
class _Function:
    part: LayerPart
    trainable: tuple[str, ...]

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
        held = self.part.parameters(given) | dict(trained)
        return self.part.run(held, x, self.part.beside(given))
