"""Divide a joint trace of a function and its gradient into forward and backward graphs.

The forward graph also returns *activations*: the results of matrix multiplications, which are the
costliest operations. Cheap operations (norms, additions, softmax) are always recomputed. So are
batched multiplications whose result is larger than all operands together (attention scores).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
from torch import Tensor, fx

from cleave.errors import LayerGraphError

_ATEN: Final = torch.ops.aten
_PRODUCTS: Final = (_ATEN.mm.default, _ATEN.addmm.default, _ATEN.convolution.default)
_BATCHED_PRODUCTS: Final = (_ATEN.bmm.default, _ATEN.baddbmm.default)


@dataclass(frozen=True)
class Part:
    """A graph in core ATen operations that is ready for export.

    Attributes:
        inputs: an example of each input by name, in the graph's input order.
        batch_dims: index of the batch dimension by input name, for inputs with a batch dimension.
        outputs: names of the outputs, in order.
    """

    graph: fx.GraphModule
    inputs: Mapping[str, Tensor]
    batch_dims: Mapping[str, int]
    outputs: Sequence[str]


class Splitter:
    """Splits the joint graph of a function and its gradient into forward and backward graphs.

    Args:
        joint: a function and its gradient as one graph in core ATen operations.
        inputs: an example of each graph input by name, in order.
        batched: names of the inputs whose first dimension is the batch.
        batch_of: name of the input that is the gradient of the function's output. The first
            dimension of this gradient is the batch.
        name: maps the index of an activation to its name.
    """

    def __init__(
        self,
        joint: fx.GraphModule,
        inputs: Mapping[str, Tensor],
        batched: Set[str],
        batch_of: str,
        name: Callable[[int], str],
    ) -> None:
        self._joint, self._inputs, self._batched, self._name = joint, inputs, batched, name
        self._placeholders = dict(
            zip(joint.graph.find_nodes(op="placeholder"), inputs, strict=True)
        )
        self._dy = next(n for n, named in self._placeholders.items() if named == batch_of)
        self._batch = _sizes(self._dy)[0]
        self._late: set[fx.Node] = set()
        self._apart: dict[fx.Node, Tensor] = {}
        for node in joint.graph.nodes:
            if node is self._dy or any(given in self._late for given in node.all_input_nodes):
                self._late.add(node)

    def split(
        self, outputs: Sequence[str], of_forward: int
    ) -> tuple[tuple[Part, Part, Part], dict[str, int]]:
        """Split the joint graph into one forward graph and two backward graphs.

        Args:
            outputs: names of the joint graph's outputs, in order.
            of_forward: number of leading outputs that do not depend on the output gradient.

        Returns:
            The forward graph, a backward graph that recomputes activations, and a backward graph
            with activations as inputs; and the number of elements per sample of each activation.
        """
        found: list[Any] = list(self._joint.graph.find_nodes(op="output")[0].args[0])
        early, late = found[:of_forward], found[of_forward:]
        kept, again = self._needed(late)
        activations = {node: self._name(number) for number, node in enumerate(kept)}
        self._apart = {node: node.meta["val"].new_empty(_apart(node, self._batch)) for node in kept}
        forward = self._forward(early, activations, outputs[:of_forward])
        backward = self._backward(late, {}, set(self._joint.graph.nodes), outputs[of_forward:])
        from_activations = self._backward(late, activations, again, outputs[of_forward:])
        sizes = {named: prod(_known(node)) for node, named in activations.items()}
        return (forward, backward, from_activations), sizes

    def _needed(self, outputs: Iterable[fx.Node]) -> tuple[list[fx.Node], set[fx.Node]]:
        """Return the activations that `outputs` depend on, in order, and the nodes to compute."""
        kept: set[fx.Node] = set()
        reached: set[fx.Node] = set()
        ahead = list(outputs)
        while ahead:
            node = ahead.pop()
            if node in reached:
                continue
            reached.add(node)
            if node not in self._late and _is_costly(node):
                kept.add(node)
            else:
                ahead += node.all_input_nodes
        ordered = [node for node in self._joint.graph.nodes if node in kept]
        return ordered, reached - kept

    def _forward(
        self, outputs: Sequence[fx.Node], activations: Mapping[fx.Node, str], names: Sequence[str]
    ) -> Part:
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self._joint.graph.nodes:
            if node not in self._late and node.op != "output":
                copies[node] = graph.node_copy(node, copies.__getitem__)
        x = next(node for node, named in self._placeholders.items() if named in self._batched)
        batch = _call(graph, _ATEN.sym_size.int, (copies[x], 0), self._batch)
        given = []
        for node in activations:
            dim, _ = _batch_dim(node, self._batch)
            shape = _apart(node, self._batch)
            shape[dim] = batch
            reshape = _ATEN.reshape.default
            given.append(_call(graph, reshape, (copies[node], shape), self._apart[node]))
        graph.output((*(copies[node] for node in outputs), *given))
        return self._part(graph, {}, (*names, *activations.values()))

    def _backward(
        self,
        outputs: Sequence[fx.Node],
        activations: Mapping[fx.Node, str],
        wanted: Set[fx.Node],
        names: Sequence[str],
    ) -> Part:
        graph = fx.Graph()
        copies = {node: graph.node_copy(node) for node in self._placeholders}
        given = {node: graph.placeholder(f"activation_{n}") for n, node in enumerate(activations)}
        for node, placeholder in given.items():
            placeholder.meta["val"] = self._apart[node]
        batch = _call(graph, _ATEN.sym_size.int, (copies[self._dy], 0), self._batch)
        for node in self._joint.graph.nodes:
            if node in given:
                dim, times = _batch_dim(node, self._batch)
                shape = _sizes(node)
                shape[dim] = _call(graph, operator.mul, (batch, times), times * self._batch)
                reshape = _ATEN.reshape.default
                copies[node] = _call(graph, reshape, (given[node], shape), node.meta["val"])
            elif node in wanted and node.op not in ("placeholder", "output"):
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in outputs))
        return self._part(graph, activations, names)

    def _part(
        self, graph: fx.Graph, activations: Mapping[fx.Node, str], outputs: Sequence[str]
    ) -> Part:
        graph.eliminate_dead_code()
        samples = self._inputs[self._placeholders[self._dy]].shape[0]
        examples = dict(self._inputs)
        dims = dict.fromkeys(self._batched, 0)
        for node, named in activations.items():
            dim, _ = _batch_dim(node, self._batch)
            sizes = _apart(node, self._batch)
            sizes[dim] = samples
            examples[named] = torch.zeros(sizes)
            dims[named] = dim
        used = {}
        names = [*self._placeholders.values(), *activations.values()]
        for node in graph.find_nodes(op="placeholder"):
            named = names.pop(0)
            if node.users:
                used[named] = examples[named]
            else:
                graph.erase_node(node)
        module = fx.GraphModule(self._joint, graph)
        return Part(module, used, {n: d for n, d in dims.items() if n in used}, outputs)


def _call(
    graph: fx.Graph, target: Callable[..., Any], given: tuple[Any, ...], result: Any
) -> fx.Node:
    """Add a call to a graph and return its node. `result` is an example of the call's result."""
    node = graph.call_function(target, given)
    node.meta["val"] = result
    return node


def _is_costly(node: fx.Node) -> bool:
    """Return True if a node's result is an activation, and False if the result is recomputed."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return False  # the results are a tuple; its elements (getitem nodes) are activations
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and isinstance(
            node.args[0].target, torch._ops.HigherOrderOperator
        )
    if node.target not in (*_PRODUCTS, *_BATCHED_PRODUCTS):
        return False
    if all(isinstance(size, int) for size in _sizes(node)):
        return False  # without a batch dimension the result depends on parameters only, as in DoRA
    if node.target in _PRODUCTS:
        return True
    made_of = sum(prod(_known(given)) for given in node.all_input_nodes)
    return prod(_known(node)) <= made_of


def _known(node: fx.Node) -> list[int]:
    """Return the shape of a node's result, with the batch dimension divided by the batch size."""
    return [size if isinstance(size, int) else _times(size) for size in _sizes(node)]


def _sizes(node: fx.Node) -> list[Any]:
    return list(node.meta["val"].shape)


def _times(size: torch.SymInt) -> int:
    """Return a symbolic size divided by the batch size."""
    expression: Any = size.node.expr
    times = expression / next(iter(expression.free_symbols))
    if not times.is_Integer:
        raise LayerGraphError(f"it creates an array with {expression} rows")
    return int(times)


def _batch_dim(node: fx.Node, batch: torch.SymInt) -> tuple[int, int]:
    """Return the index of an activation's batch dimension, and the dimension's size per sample."""
    dims = [(n, size) for n, size in enumerate(_sizes(node)) if not isinstance(size, int)]
    if len(dims) != 1 or dims[0][1].node.expr.free_symbols != batch.node.expr.free_symbols:
        raise LayerGraphError(f"it creates an array of shape {tuple(_sizes(node))}")
    return dims[0][0], _times(dims[0][1])


def _apart(node: fx.Node, batch: torch.SymInt) -> list[Any]:
    """Return an activation's shape with a dimension of size batch * n split into batch and n.

    If n is 1, the dimension of size n is omitted.
    """
    dim, times = _batch_dim(node, batch)
    sizes = _sizes(node)
    return [*sizes[:dim], batch, *([times] if times > 1 else []), *sizes[dim + 1 :]]
