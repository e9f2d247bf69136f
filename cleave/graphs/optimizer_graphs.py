"""Graphs that devices run to update the parameters they keep between steps.

One graph serves all parameters: it takes them as vectors. The coefficients of a step, such as the
learning rate, are an input, so the graph is the same in every step.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from cleave import graph_names as names
from cleave.machine.graph_session import Array
from cleave.machine.onnx_graph import ArrayType, Node, written

_VECTOR: Final = ArrayType(["elements"])
_ONE: Final = ArrayType([1])
_MOMENTS_OF_ADAMW: Final = 2
_ADAMW: Final = ("clip", "kept", "new1", "old2", "new2", "rate", "root", "epsilon")
_SGD: Final = ("clip", "decay", "momentum", "rate")


def squares_graph() -> bytes:
    """Return a graph that adds the squares of a gradient's elements to a sum of squares.

    The inputs are `GRADIENT`, shape (elements,), and `total(SQUARES)`, shape (1,). The output is
    `new_total(SQUARES)`, shape (1,). All are in fp32.
    """
    total, new = names.total(names.SQUARES), names.new_total(names.SQUARES)
    return written(
        [
            Node("ReduceSumSquare", [names.GRADIENT], ["one"], {"keepdims": 1}),
            Node("Add", [total, "one"], [new]),
        ],
        {names.GRADIENT: _VECTOR, total: _ONE},
        {new: _ONE},
    )


def adamw_graph() -> bytes:
    """Return the graph of an AdamW step (arXiv 1711.05101, algorithm 2), as in `torch.optim.AdamW`.

    Inputs are `WEIGHT`, `GRADIENT`, `SCALARS` (see `adamw_scalars`), and two moments. Outputs are
    the updated weight and moments. All are fp32 vectors.
    """
    first, second = names.moment(0), names.moment(1)
    new_first, new_second = names.updated(first), names.updated(second)
    nodes = [
        Node("Mul", [names.GRADIENT, "clip"], ["g"]),
        Node("Sub", ["g", first], ["change"]),
        Node("Mul", ["change", "new1"], ["part1"]),
        Node("Add", [first, "part1"], [new_first]),
        Node("Mul", ["g", "g"], ["square"]),
        Node("Mul", ["square", "new2"], ["part2"]),
        Node("Mul", [second, "old2"], ["rest2"]),
        Node("Add", ["rest2", "part2"], [new_second]),
        Node("Sqrt", [new_second], ["deviation"]),
        Node("Mul", ["deviation", "root"], ["corrected"]),
        Node("Add", ["corrected", "epsilon"], ["denominator"]),
        Node("Div", [new_first, "denominator"], ["direction"]),
        Node("Mul", ["direction", "rate"], ["step"]),
        Node("Mul", [names.WEIGHT, "kept"], ["decayed"]),
        Node("Sub", ["decayed", "step"], [names.updated(names.WEIGHT)]),
    ]
    return _update(nodes, _ADAMW, _MOMENTS_OF_ADAMW)


def adamw_scalars(
    *, rate: float, decay: float, betas: tuple[float, float], eps: float, step: float, clip: float
) -> Array:
    """Return the `SCALARS` of an AdamW step, shape (1, 8), fp32.

    Args:
        step: number of this update, from 1; infinite if moments need no bias correction.
        clip: factor by which the gradients are multiplied.
    """
    root = 1 / math.sqrt(1 - betas[1] ** step)
    first = rate / (1 - betas[0] ** step)
    given = [clip, 1 - rate * decay, 1 - betas[0], betas[1], 1 - betas[1], first, root, eps]
    return np.array([given], np.float32)


def sgd_graph(*, momentum: bool) -> bytes:
    """Return the graph of an SGD step, as in `torch.optim.SGD` without dampening.

    Inputs are `WEIGHT`, `GRADIENT` and `SCALARS` (see `sgd_scalars`). If `momentum` is true, the
    momentum buffer, `moment(0)`, is also an input; the caller starts it at zero. Outputs are the
    updated weight and, if there is one, the updated momentum buffer. All are fp32 vectors.
    """
    moment, direction = names.moment(0), "g"
    nodes = [
        Node("Mul", [names.GRADIENT, "clip"], ["clipped"]),
        Node("Mul", [names.WEIGHT, "decay"], ["shrinks"]),
        Node("Add", ["clipped", "shrinks"], ["g"]),
    ]
    if momentum:
        direction = names.updated(moment)
        nodes.append(Node("Mul", [moment, "momentum"], ["rest"]))
        nodes.append(Node("Add", ["rest", "g"], [direction]))
    nodes.append(Node("Mul", [direction, "rate"], ["step"]))
    nodes.append(Node("Sub", [names.WEIGHT, "step"], [names.updated(names.WEIGHT)]))
    return _update(nodes, _SGD, int(momentum))


def sgd_scalars(*, rate: float, decay: float, momentum: float, clip: float) -> Array:
    """Return the `SCALARS` of an SGD step, shape (1, 4), fp32. See `adamw_scalars`."""
    return np.array([[clip, decay, momentum, rate]], np.float32)


def _update(nodes: list[Node], scalars: tuple[str, ...], moments: int) -> bytes:
    """Return the graph of an optimizer step, whose nodes use `scalars` by name."""
    state = [names.WEIGHT, *map(names.moment, range(moments))]
    inputs = [state[0], names.GRADIENT, *state[1:]]
    return written(
        [Node("Split", [names.SCALARS, "sizes"], list(scalars)), *nodes],
        {**dict.fromkeys(inputs, _VECTOR), names.SCALARS: ArrayType([len(scalars)])},
        {names.updated(name): _VECTOR for name in state},
        {"sizes": np.ones(len(scalars), np.int64)},
    )
