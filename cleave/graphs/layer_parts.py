"""Export layers, or parts of layers for devices with too little memory for a whole layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from cleave import graph_names as names
from cleave.errors import LayerGraphError
from cleave.graphs.calls import LayerCall
from cleave.graphs.tracing import TracedGraph, core_aten, refuse_chance, to_onnx_split

_LEAST_SHARE: Final = 1 / 8  # minimum fraction of a layer's parameters in the smaller part

_ATEN: Final = torch.ops.aten
_SCORES: Final = (_ATEN.bmm.default, _ATEN.baddbmm.default)


@dataclass(frozen=True)
class LayerPart:
    """A layer, or a part of a layer, as a function of one hidden-state tensor.

    Attributes:
        x, y: example input and output of the part, shape (batch, tokens, width).
        held: the part's parameters and buffers by their names in the layer.
        first, last: indices of the part's input and output among the layer's intermediate results
            that have the shape of the layer's input; None for the layer's own input or output.
        pieces: number of chunks per sequence. With several chunks, `x` and `y` have the shape
            (batch * pieces, tokens / pieces, width).
    """

    call: LayerCall
    layer: int
    x: Tensor
    y: Tensor
    held: Mapping[str, Tensor]
    attends: bool = True
    first: int | None = None
    last: int | None = None
    pieces: int = 1

    @classmethod
    def whole(cls, call: LayerCall, layer: int) -> LayerPart:
        return cls(call, layer, call.x, call.y, tensors_of(call.layer))

    def inputs(self) -> dict[str, Tensor]:
        """Return an example tensor for each graph input, by input name.

        The inputs include the parameters of the whole layer, even if the part does not use them.
        """
        found = {names.X: self.x}
        found |= {names.parameter(n): t for n, t in tensors_of(self.call.layer).items()}
        return found | {names.extra(n): t for n, t in self.call.extras.items()}

    def varying(self) -> set[str]:
        """Return the names of the graph inputs whose first dimension is the batch."""
        samples = self.x.shape[0]
        of_batch = {names.X}
        if self.pieces == 1:
            of_batch |= {names.extra(n) for n in self.call.extras}
        return {
            name
            for name, tensor in self.inputs().items()
            if name in of_batch and tensor.dim() > 0 and tensor.shape[0] == samples
        }

    def parameters(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the layer's parameters and buffers among the graph inputs `given`, by name."""
        return {n: given[names.parameter(n)] for n in tensors_of(self.call.layer)}

    def extras(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the layer's other tensor arguments among the graph inputs `given`, by name."""
        return {n: given[names.extra(n)] for n in self.call.extras}

    @property
    def is_whole(self) -> bool:
        return self.first is None and self.last is None

    def trainable(self) -> tuple[str, ...]:
        """Return the names of the trained parameters that affect the part's output."""
        wanted = [name for name, tensor in self.held.items() if tensor.requires_grad]
        found = self.gradients(wanted, torch.ones_like(self.x, dtype=torch.float32))
        return tuple(name for name in wanted if found[names.new_total(name)] is not None)

    def gradients(self, trainable: Sequence[str], dy: Tensor) -> dict[str, Tensor | None]:
        """Compute the part's gradients with PyTorch in fp32.

        Args:
            dy: gradient of the part's output, same shape as `y`.

        Returns:
            The gradients of the input and the parameters. The keys are the output names of the
            backward graphs. A gradient is None if the output does not depend on the parameter.
        """
        held = {n: t.detach().float() if t.is_floating_point() else t for n, t in self.held.items()}
        trained = [held[name].requires_grad_() for name in trainable]
        extras = {n: t.float() if t.is_floating_point() else t for n, t in self.call.extras.items()}
        x = self.x.detach().float().requires_grad_()
        with torch.enable_grad():
            y = self.run(held, x, extras)
        found = torch.autograd.grad(y, [x, *trained], dy, allow_unused=True)
        wanted = [names.DX, *(names.new_total(name) for name in trainable)]
        return dict(zip(wanted, found, strict=True))

    def run(
        self, parameters: Mapping[str, Tensor], x: Tensor, extras: Mapping[str, Tensor]
    ) -> Tensor:
        """Run this part of the layer with other tensors and return the part's output.

        The layer's operations that precede the part also run, but do not affect the output.
        """
        if self.is_whole:
            return self.call.run(parameters, x, extras)
        # The operations before the part need an input with whole sequences.
        given = x if self.first is None else x.new_zeros(self.call.x.shape, dtype=x.dtype)
        given = x if self.pieces == 1 else given
        results = _Replaced(x, given, self.first, self.last)
        with results:
            try:
                return self.call.run(parameters, given, extras)
            except _ReachedError:
                return results.reached

    def in_pieces(self, pieces: int) -> LayerPart:
        """Return this part with sequences cut into chunks. The part must not mix tokens."""
        shape = -1, self.x.shape[1] // pieces, self.x.shape[2]
        return replace(self, x=self.x.reshape(shape), y=self.y.reshape(shape), pieces=pieces)

    def cut(self) -> list[LayerPart]:
        """Cut the layer into two parts of similar size. Return `[self]` if no cut is suitable.

        A trace shows where to cut. In most layers, only the sum of the layer's input and
        attention's output passes from attention to the MLP.
        """
        cuts = list(_cuts(self))
        if not cuts:
            return [self]
        best = min(cuts, key=lambda parts: max(map(_elements, parts)))
        sizes = [_elements(part) for part in best]
        return [self] if min(sizes) < _LEAST_SHARE * sum(sizes) else self.cut_as(best)

    def cut_as(self, parts: Sequence[LayerPart]) -> list[LayerPart]:
        """Cut this layer at the point where another layer of the same kind was cut into `parts`."""
        found: list[LayerPart] = []
        for part in parts:
            x = found[-1].y if found else self.x
            held = {name: self.held[name] for name in part.held}
            mine = replace(
                self, x=x, held=held, attends=part.attends, first=part.first, last=part.last
            )
            if part.last is not None:
                with torch.no_grad():
                    mine = replace(mine, y=mine.run(self.held, x, self.call.extras))
            found.append(mine)
        return found


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and buffers by name. A tied tensor occurs only once."""
    found: dict[str, Tensor] = dict(module.named_parameters())
    return found | dict(module.named_buffers())


class _ReachedError(Exception):
    """Raised once the part's output is computed, to skip the rest of the layer."""


class _Replaced(TorchFunctionMode):
    """Torch function mode that replaces result number `first` with `x`, and stops at result `last`.

    Only results that have the shape of `given`, the layer's input, are numbered.
    """

    def __init__(self, x: Tensor, given: Tensor, first: int | None, last: int | None) -> None:
        super().__init__()
        self.found: list[Tensor] = []
        self.reached = x
        self._x, self._given, self._first, self._last = x, given, first, last
        self._numbers = count()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._is_alike(result):
            return result
        number = next(self._numbers)
        if number == self._last:
            self.reached = result
            raise _ReachedError
        self.found.append(result)
        return self._x if number == self._first else result

    def _is_alike(self, result: object) -> bool:
        # Ignore the first dimension: the batch size is unknown while a layer is traced.
        return (
            isinstance(result, Tensor)
            and result.is_floating_point()
            and result.dim() == self._given.dim()
            and result.shape[1:] == self._given.shape[1:]
        )


def _elements(part: LayerPart) -> int:
    """Return the number of elements in a part's parameters and buffers."""
    return sum(tensor.numel() for tensor in part.held.values())


def _cuts(layer: LayerPart) -> Iterator[tuple[LayerPart, LayerPart]]:
    """Trace a layer's forward pass and yield the two parts of each possible cut.

    A cut is possible at a result with the shape of the layer's input, if the layer's output depends
    on its input only through the result, and if the two parts share no trainable parameter. In the
    yielded parts, `x` and `y` are still those of the whole layer.
    """

    def forward(given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        results = _Replaced(given[names.X], given[names.X], None, None)
        with results:
            y = layer.call.run(layer.parameters(given), given[names.X], layer.extras(given))
        return (y, *results.found)

    graph, used = core_aten(TracedGraph(forward, layer.inputs(), (), layer.varying()))
    inputs = dict(zip(used, graph.graph.find_nodes(op="placeholder"), strict=True))
    y, *results = graph.graph.find_nodes(op="output")[0].args[0]

    def held(nodes: set[fx.Node]) -> dict[str, Tensor]:
        return {n: t for n, t in layer.held.items() if inputs.get(names.parameter(n)) in nodes}

    for number, node in enumerate(results):
        after = _needed(y, without=node)
        if inputs[names.X] in after or node is y:
            continue
        before = _needed(node)
        first, second = held(before), held(after)
        if not any(first[name].requires_grad for name in first.keys() & second.keys()):
            yield (
                replace(layer, held=first, attends=_attends(before), last=number),
                replace(layer, held=second, attends=_attends(after), first=number),
            )


def _needed(node: fx.Node, without: fx.Node | None = None) -> set[fx.Node]:
    """Return a node and its dependencies, ignoring paths through `without` or through sizes."""
    found: set[fx.Node] = set()
    ahead = [node]
    while ahead:
        one = ahead.pop()
        if one not in found and one is not without and not _is_size(one):
            found.add(one)
            ahead += one.all_input_nodes
    return found


def _is_size(node: fx.Node) -> bool:
    """Return True if a node's value is a tensor's size, which does not depend on tensor values."""
    return isinstance(node.meta.get("val"), int | torch.SymInt)


def _attends(nodes: Iterable[fx.Node]) -> bool:
    return any(
        node.target in _SCORES or isinstance(node.target, torch._ops.HigherOrderOperator)
        for node in nodes
    )


@dataclass(frozen=True)
class LayerGraphs:
    """The fp32 graphs of one kind of layer, or of a part of a layer, for any batch size.

        forward           x, parameters, others                         -> y, activations
        backward          x, dy, parameters, others, sums               -> dx, sums + gradients
        from_activations  x, dy, parameters, others, sums, activations  -> dx, sums + gradients

    `others` are the layer's other tensor arguments, such as masks. `sums` are the accumulated
    parameter gradients. `from_activations` recomputes less of the forward pass than `backward`.

    Attributes:
        forward, backward, from_activations: serialized ONNX models.
        activations: number of elements per sample of each activation, by name.
        parameters: names of the parameters and buffers, relative to the layer.
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
        LayerGraphError: if the layer cannot be exported. The message states the reason.
    """
    batch = part.x.shape[0]
    if part.x.dim() != 3 or batch < 2 or batch in part.x.shape[1:]:
        raise LayerGraphError(f"its input has the shape {tuple(part.x.shape)}")
    trainable = part.trainable()
    inputs = part.inputs()
    sums = {names.total(n): part.held[n] for n in trainable}
    varying = part.varying() | {names.DY}

    def forward(given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return (part.run(part.parameters(given), given[names.X], part.extras(given)),)

    def both(given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        def run(x: Tensor, trained: dict[str, Tensor]) -> Tensor:
            return part.run(part.parameters(given) | trained, x, part.extras(given))

        trained = {n: given[names.parameter(n)] for n in trainable}
        y, pull, *_ = torch.func.vjp(run, given[names.X], trained)
        dx, gradients = pull(given[names.DY])
        return (y, dx, *(given[names.total(n)] + gradients[n] for n in trainable))

    module = part.call.layer
    was_training = module.training
    module.train()  # so that the trace contains dropout, which is then refused
    try:
        outputs = names.Y, names.DX, *(names.new_total(n) for n in trainable)
        traced = TracedGraph(both, {**inputs, names.DY: part.x, **sums}, outputs, varying)
        return LayerGraphs(
            *to_onnx_split(traced, names.DY, 1, names.activation), tuple(part.held), trainable
        )
    except LayerGraphError:  # dropout makes the gradient fail first, with a less clear reason
        alibi = part.call.extras.get("alibi")
        if alibi is not None and alibi.shape[0] != batch:
            raise LayerGraphError(
                f"it is called with an alibi tensor of shape {tuple(alibi.shape)}, whose first "
                f"dimension is not the batch size {batch}"
            ) from None
        refuse_chance(core_aten(TracedGraph(forward, inputs, (names.Y,), varying))[0])
        raise
    finally:
        module.train(was_training)
