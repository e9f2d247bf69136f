"""A stage: consecutive layers of a model on one machine, and the sums of their gradients.

Sums are kept exactly once. A *generation* is a set of samples whose gradients are summed. Adding a
sample that is in it already changes nothing, and taking the gradients freezes the generation, so
that a message that comes twice does no harm. If adding fails half-way, the generation is void.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np

from cleave.arrays import Array, Buffer
from cleave.errors import CleaveError
from cleave.machine import graph_names as names

Arrays: TypeAlias = Mapping[str, Array]


class StageError(CleaveError):
    """A stage cannot do what it was asked for."""


class VoidGenerationError(StageError):
    """Some gradients of a generation were added and others were not, so it cannot be used."""


class Graph(Protocol):
    """A graph that can be run, such as `GraphSession`."""

    @property
    def inputs(self) -> Mapping[str, Sequence[int | str]]:
        """See `GraphSession.inputs`."""
        ...

    def run(self, given: Arrays) -> dict[str, Array]:
        """See `GraphSession.run`."""
        ...


@dataclass(frozen=True)
class StageLayer:
    """One layer of a stage.

    Attributes:
        forward, backward: its graphs (see `cleave.graphs.layer_graphs`).
        parameters: by name, in the dtype that they travel in; vectors are matrices of one row.
        trainable: names of those whose gradients are summed.
    """

    forward: Graph
    backward: Graph
    parameters: Mapping[str, Buffer]
    trainable: Sequence[str]


@dataclass
class _Generation:
    samples: set[int] = field(default_factory=set)
    sums: list[dict[str, Array]] = field(default_factory=list)  # by layer
    frozen: bool = False
    void: bool = False


class Stage:
    """Consecutive layers. One call at a time.

    Args:
        layers: the layers, in order.
    """

    def __init__(self, layers: Sequence[StageLayer]) -> None:
        self._layers = layers
        self._generations: dict[int, _Generation] = {}
        self._kept: dict[int, list[Array]] = {}  # by sample, the input of every layer

    def forward(
        self, sample: int, x: Array, beside: Sequence[Arrays], *, keep: bool = False
    ) -> Array:
        """Return the stage's output, fp32.

        Args:
            sample: its number.
            x: shape (batch, tokens, width), fp32.
            beside: by layer, what it is called with beside `x`.
            keep: whether to keep the layers' inputs for `backward`, which then need not be computed
                again.
        """
        given = []
        for layer, others in zip(self._layers, beside, strict=True):
            given.append(x)
            x = _run(layer.forward, layer, {names.X: x}, others)[names.Y]
        if keep:
            self._kept[sample] = given
        return x

    def backward(
        self, generation: int, sample: int, x: Array, dy: Array, beside: Sequence[Arrays]
    ) -> Array:
        """Return the gradient with respect to `x`, and add the parameters' gradients to the sums.

        For a sample that is in the generation already, the gradient is returned and nothing added.

        Args:
            generation: the number of the sums.
            sample: the sample's number.
            x: as in `forward`.
            dy: the gradient with respect to the output, shaped as `x`, fp32.
            beside: as in `forward`.

        Raises:
            StageError: when the sample is new and the generation is frozen.
            VoidGenerationError: when adding failed, now or before.
        """
        sums = self._generations.setdefault(generation, _Generation())
        if sums.void:
            raise VoidGenerationError(f"generation {generation} is void: adding to it failed")
        known = sample in sums.samples
        if sums.frozen and not known:
            raise StageError(f"generation {generation} is frozen: its gradients were taken")
        given = self._kept.get(sample) or self._layer_inputs(x, beside)
        if not sums.sums:
            sums.sums = [_zeros(layer) for layer in self._layers]
        try:
            for number in reversed(range(len(self._layers))):
                dy = self._layer_backward(sums, number, given[number], dy, beside[number], known)
        except BaseException:
            sums.void = not known
            raise
        sums.samples.add(sample)
        self._kept.pop(sample, None)
        return dy

    def gradients(self, generation: int) -> Sequence[Arrays]:
        """Freeze a generation; return the sums of its gradients by layer and name, fp32.

        Raises:
            StageError: when there is no such generation.
            VoidGenerationError: when adding to it failed.
        """
        sums = self._generations.get(generation)
        if sums is None:
            raise StageError(f"there is no generation {generation}")
        if sums.void:
            raise VoidGenerationError(f"generation {generation} is void: adding to it failed")
        sums.frozen = True
        return sums.sums

    def drop(self, generation: int) -> None:
        """Forget a generation; nothing happens if it is forgotten already."""
        self._generations.pop(generation, None)

    def forget(self, sample: int) -> None:
        """Forget what was kept of a sample that will have no backward."""
        self._kept.pop(sample, None)

    def _layer_inputs(self, x: Array, beside: Sequence[Arrays]) -> list[Array]:
        given = [x]
        for layer, others in zip(self._layers[:-1], beside[:-1], strict=True):
            given.append(_run(layer.forward, layer, {names.X: given[-1]}, others)[names.Y])
        return given

    def _layer_backward(
        self,
        sums: _Generation,
        number: int,
        x: Array,
        dy: Array,
        beside: Arrays,
        known: bool,
    ) -> Array:
        layer, before = self._layers[number], sums.sums[number]
        given = {names.X: x, names.DY: dy} | {names.total(n): a for n, a in before.items()}
        found = _run(layer.backward, layer, given, beside)
        if not known:
            sums.sums[number] = {n: found[names.new_total(n)] for n in before}
        return found[names.DX]


def _zeros(layer: StageLayer) -> dict[str, Array]:
    shapes = {n: _shape(layer.backward, names.total(n)) for n in layer.trainable}
    return {n: np.zeros(shape, np.float32) for n, shape in shapes.items()}


def _run(graph: Graph, layer: StageLayer, given: Arrays, beside: Arrays) -> dict[str, Array]:
    """Run a graph of a layer, whose parameters become fp32 for as long as that takes."""
    feed = dict(given) | {names.beside(n): a for n, a in beside.items()}
    for name, buffer in layer.parameters.items():
        wanted = names.parameter(name)
        if wanted in graph.inputs:
            feed[wanted] = buffer.float32().reshape(_shape(graph, wanted))
    return graph.run(feed)


def _shape(graph: Graph, name: str) -> tuple[int, ...]:
    """Return the shape of an input that does not depend on the batch."""
    shape = graph.inputs[name]
    if not all(isinstance(size, int) for size in shape):
        raise StageError(f"the graph's input {name} has no fixed shape")
    return tuple(int(size) for size in shape)
