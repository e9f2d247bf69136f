"""Layers in two parts, for devices that cannot hold a whole layer.

Most layers add attention's output to their input, then add the MLP's output to that sum. Only the
sum passes between the two, so each can be a stage. The place to cut is found in a trace of the
layer, independent of its modules' names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from cleave import graph_names as names
from cleave.graphs.calls import LayerCall
from cleave.graphs.tracing import TracedGraph, core_aten

_LEAST_SHARE: Final = 1 / 8
"""Smallest share of a layer's parameters that is worth a separate pass."""

_ATEN: Final = torch.ops.aten
_SCORES: Final = (_ATEN.bmm.default, _ATEN.baddbmm.default)


@dataclass(frozen=True)
class LayerPart:
    """A layer, or a part of one: a function of one activation.

    Attributes:
        call: how the model calls the layer.
        layer: the layer's number.
        x, y: example input and output of the part, shape (batch, tokens, width).
        held: the part's parameters and buffers, by their names within the layer.
        attends: whether the part contains attention.
        first, last: numbers of the results that are the part's input and output, among the layer's
            results shaped as `x`; None for the layer's own input or output.
        pieces: number of chunks of each sequence. `x` and `y` then have `pieces` times more rows
            of `pieces` times fewer tokens.
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
        """Return a whole layer as one part."""
        return cls(call, layer, call.x, call.y, tensors_of(call.layer))

    def inputs(self) -> dict[str, Tensor]:
        """Return examples of all inputs by name, with all tensors of the whole layer."""
        found = {names.X: self.x}
        found |= {names.parameter(n): t for n, t in tensors_of(self.call.layer).items()}
        return found | {names.beside(n): t for n, t in self.call.beside.items()}

    def varying(self) -> set[str]:
        """Return the names of the inputs whose first dimension is the batch."""
        samples = self.x.shape[0]
        of_batch = {names.X}
        if self.pieces == 1:
            of_batch |= {names.beside(n) for n in self.call.beside}
        return {
            name
            for name, tensor in self.inputs().items()
            if name in of_batch and tensor.dim() > 0 and tensor.shape[0] == samples
        }

    def parameters(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the layer's parameters and buffers from named inputs, by their own names."""
        return {n: given[names.parameter(n)] for n in tensors_of(self.call.layer)}

    def beside(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the layer's other tensor arguments (masks, position embeddings), by name."""
        return {n: given[names.beside(n)] for n in self.call.beside}

    @property
    def is_whole(self) -> bool:
        """Return whether the part is the whole layer."""
        return self.first is None and self.last is None

    def trainable(self) -> tuple[str, ...]:
        """Return the names of the parameters that get a gradient.

        These parameters require a gradient, and the output depends on them. The output does not
        depend on adapters that are merged or disabled, for example.
        """
        wanted = [name for name, tensor in self.held.items() if tensor.requires_grad]
        found = self.gradients(wanted, torch.ones_like(self.x, dtype=torch.float32))
        return tuple(name for name in wanted if found[names.new_total(name)] is not None)

    def gradients(self, trainable: Sequence[str], dy: Tensor) -> dict[str, Tensor | None]:
        """Return the gradients that PyTorch computes in fp32, by the names of the graphs' outputs.

        Args:
            trainable: names of the parameters.
            dy: the gradient of the output.

        Returns:
            The gradients of the input and of the parameters. A gradient is None when the output
            does not depend on the parameter.
        """
        held = {n: t.detach().float() if t.is_floating_point() else t for n, t in self.held.items()}
        trained = [held[name].requires_grad_() for name in trainable]
        beside = {n: t.float() if t.is_floating_point() else t for n, t in self.call.beside.items()}
        x = self.x.detach().float().requires_grad_()
        with torch.enable_grad():
            y = self.run(held, x, beside)
        found = torch.autograd.grad(y, [x, *trained], dy, allow_unused=True)
        wanted = [names.DX, *(names.new_total(name) for name in trainable)]
        return dict(zip(wanted, found, strict=True))

    def run(
        self, parameters: Mapping[str, Tensor], x: Tensor, beside: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the part's output, for other parameters, input and tensor arguments.

        Operations of the layer outside the part may also run; nothing depends on them.
        """
        if self.is_whole:
            return self.call.run(parameters, x, beside)
        # Until its input is replaced, the layer needs an input of whole sequences.
        given = x if self.first is None else x.new_zeros(self.call.x.shape, dtype=x.dtype)
        given = x if self.pieces == 1 else given
        results = _Replaced(x, given, self.first, self.last)
        with results:
            try:
                return self.call.run(parameters, given, beside)
            except _ReachedError:
                return results.reached

    def in_pieces(self, pieces: int) -> LayerPart:
        """Return the part for sequences that are cut into chunks.

        Outputs are the same only if the tokens do not depend on each other.
        """
        shape = -1, self.x.shape[1] // pieces, self.x.shape[2]
        return replace(self, x=self.x.reshape(shape), y=self.y.reshape(shape), pieces=pieces)

    def cut(self) -> list[LayerPart]:
        """Return the layer in two parts, or as one part if it cannot be cut."""
        trace = _Trace.of(self)
        best: tuple[int, _Cut] | None = None
        for number, cut in trace.cuts():
            if best is None or cut.larger < best[1].larger:
                best = number, cut
        if best is None or best[1].smaller < _LEAST_SHARE * (best[1].smaller + best[1].larger):
            return [self]
        number, found = best
        return self.cut_as(
            [
                replace(self, held=found.first, attends=found.attends_first, last=number),
                replace(self, held=found.second, attends=found.attends_second, first=number),
            ]
        )

    def cut_as(self, parts: Sequence[LayerPart]) -> list[LayerPart]:
        """Return the layer cut as another layer of its kind was cut."""
        found: list[LayerPart] = []
        for part in parts:
            x = found[-1].y if found else self.x
            held = {name: self.held[name] for name in part.held}
            mine = replace(
                self, x=x, held=held, attends=part.attends, first=part.first, last=part.last
            )
            if part.last is not None:
                with torch.no_grad():
                    mine = replace(mine, y=mine.run(self.held, x, self.call.beside))
            found.append(mine)
        return found


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and buffers by name, each tensor once."""
    found: dict[str, Tensor] = dict(module.named_parameters())
    return found | dict(module.named_buffers())


class _ReachedError(Exception):
    """The wanted result was computed; the rest of the layer must not run."""


class _Replaced(TorchFunctionMode):
    """Numbers results shaped as the layer's input, replaces result `first`, stops at `last`.

    Args:
        x: replacement of the result number `first`.
        given: the layer's input.
        first, last: numbers of results, see `LayerPart`.
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
        # The batch size is unknown while a layer is traced.
        return (
            isinstance(result, Tensor)
            and result.is_floating_point()
            and result.dim() == self._given.dim()
            and result.shape[1:] == self._given.shape[1:]
        )


@dataclass(frozen=True)
class _Cut:
    """The two parts of a layer at a possible cut.

    Attributes:
        first, second: parameters and buffers of each part, by name.
        attends_first, attends_second: whether each part contains attention.
    """

    first: Mapping[str, Tensor]
    second: Mapping[str, Tensor]
    attends_first: bool
    attends_second: bool

    @property
    def larger(self) -> int:
        """Return the number of elements of the larger part."""
        return max(_elements(self.first), _elements(self.second))

    @property
    def smaller(self) -> int:
        """Return the number of elements of the smaller part."""
        return min(_elements(self.first), _elements(self.second))


def _elements(held: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() for tensor in held.values())


@dataclass(frozen=True)
class _Trace:
    """The forward pass of a layer as a graph, with every result shaped as its input."""

    held: Mapping[str, Tensor]
    inputs: Mapping[fx.Node, str]
    y: fx.Node
    results: list[fx.Node]

    @classmethod
    def of(cls, part: LayerPart) -> _Trace:
        def forward(given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
            results = _Replaced(given[names.X], given[names.X], None, None)
            with results:
                y = part.call.run(part.parameters(given), given[names.X], part.beside(given))
            return (y, *results.found)

        graph, used = core_aten(TracedGraph(forward, part.inputs(), (), part.varying()))
        inputs = dict(zip(graph.graph.find_nodes(op="placeholder"), used, strict=True))
        y, *results = graph.graph.find_nodes(op="output")[0].args[0]
        return cls(part.held, inputs, y, results)

    def cuts(self) -> Iterable[tuple[int, _Cut]]:
        """Yield possible cuts: results through which alone the output depends on the input."""
        x = next(node for node, name in self.inputs.items() if name == names.X)
        for number, node in enumerate(self.results):
            after = _needed(self.y, without=node)
            if x in after or node is self.y:
                continue
            before = _needed(node)
            first, second = self._tensors(before), self._tensors(after)
            if not any(first[name].requires_grad for name in first.keys() & second.keys()):
                yield number, _Cut(first, second, _attends(before), _attends(after))

    def _tensors(self, nodes: set[fx.Node]) -> dict[str, Tensor]:
        named = {name for node, name in self.inputs.items() if node in nodes}
        return {n: t for n, t in self.held.items() if names.parameter(n) in named}


def _needed(node: fx.Node, without: fx.Node | None = None) -> set[fx.Node]:
    """Return a node and its ancestors, stopping at the node `without`, which is left out."""
    found: set[fx.Node] = set()
    ahead = [node]
    while ahead:
        one = ahead.pop()
        if one not in found and one is not without and not _is_size(one):
            found.add(one)
            ahead += one.all_input_nodes
    return found


def _is_size(node: fx.Node) -> bool:
    """Return whether a node is a tensor's size, which does not need the tensor itself."""
    return isinstance(node.meta.get("val"), int | torch.SymInt)


def _attends(nodes: Iterable[fx.Node]) -> bool:
    return any(
        node.target in _SCORES or isinstance(node.target, torch._ops.HigherOrderOperator)
        for node in nodes
    )
