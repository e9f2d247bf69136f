"""Self-test of graph runners: small graphs whose results reveal low precision.

A runner may compute fp32 graphs in 16 bits, or in the 19 bits of TF32. Imprecise results look
plausible but change the trained model. So each runner computes small graphs on inputs for which low
precision causes large errors, and the results are compared with fp64 results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from cleave.arrays import Array, DType
from cleave.machine.graph_session import OpenGraph
from cleave.machine.onnx_graph import ArrayType, Node, written

LARGEST_ERROR: Final = 2e-5
"""Relative error at which a runner is rejected. In the trials, the error of fp32 is at most 2e-6,
and the error of TF32 is 3e-4."""

_SEED: Final = 20
_DEPTH: Final = 4096  # number of terms in a dot product, as in wide layers


@dataclass(frozen=True, slots=True)
class Trial:
    """A test graph with its inputs and the expected fp64 outputs.

    Errors are relative to each element if `each` is true, and otherwise to the largest element.
    `allowed_bf16` is the error that products in bf16 explain; 0 for a trial without products.
    """

    name: str
    model: bytes
    given: Mapping[str, Array]
    wanted: Mapping[str, Array]
    each: bool = False
    allowed_bf16: float = 0.0

    def error(self, graph: OpenGraph) -> float:
        """Run the trial and return the largest relative error (infinite for NaN or bad shapes)."""
        found = graph.run(self.given)
        return max(
            _error(found[name], wanted, np.abs(wanted) if self.each else np.abs(wanted).max())
            for name, wanted in self.wanted.items()
        )


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The largest relative error in a trial, the error allowed in it, and the trial's name."""

    error: float
    trial: str
    allowed: float = LARGEST_ERROR


def accuracy(
    open_graph: Callable[[bytes], OpenGraph],
    products: DType | None = None,
    largest_error: float = LARGEST_ERROR,
) -> Accuracy:
    """Run all trials and return the worst result.

    Args:
        products: the 16-bit dtype of matrix products; None for fp32.
        largest_error: allowed error, unless products in bf16 explain a larger error.
    """
    found = (
        Accuracy(
            trial.error(open_graph(trial.model)),
            trial.name,
            max(largest_error, trial.allowed_bf16 if products else 0.0),
        )
        for trial in trials()
    )
    return max(found, key=lambda accuracy: accuracy.error / accuracy.allowed)


def trials() -> Iterator[Trial]:
    """Yield all trials. Every call yields the same trials with the same inputs."""
    random = np.random.default_rng(_SEED)

    def normal(*shape: int) -> Array:
        return random.standard_normal(shape, np.float32)

    yield _products(normal(8, _DEPTH), normal(_DEPTH, 64), normal(_DEPTH, 32), normal(_DEPTH, 16))
    yield _attention(normal(4, 32, 64), normal(4, 64, 32), normal(4, 32, 64))
    yield _exponentials(np.linspace(-20, 20, 4001, dtype=np.float32).reshape(1, -1))
    yield _curves(np.linspace(-9, 9, 4001, dtype=np.float32).reshape(1, -1))
    yield _normalization(3 * normal(8, 768) + 1, normal(768), normal(768))
    yield _rows(normal(64, 32), random.integers(0, 64, (48,)), random.integers(0, 16, (48, 32)))
    yield _reductions(random.random((4, 16 * _DEPTH), np.float32))


def _products(x: Array, w: Array, left: Array, right: Array) -> Trial:
    """Return a trial of long dot products in which the terms largely cancel."""
    model = written(
        [
            Node("MatMul", ["x", "w"], ["y"]),
            Node("Transpose", ["left"], ["turned"]),
            Node("MatMul", ["turned", "right"], ["dw"]),
        ],
        {
            "x": _batch(_DEPTH),
            "w": ArrayType(w.shape),
            "left": _batch(32),
            "right": _batch(16),
        },
        {"y": _batch(64), "dw": ArrayType([32, 16])},
    )
    given = {"x": x, "w": w, "left": left, "right": right}
    wide = {name: array.astype(np.float64) for name, array in given.items()}
    wanted = {"y": wide["x"] @ wide["w"], "dw": wide["left"].T @ wide["right"]}
    # Rounding to bf16 explains an error of 0.004. Audits explain errors up to this limit.
    return Trial("deep products", model, given, wanted, allowed_bf16=0.006)


def _attention(q: Array, k: Array, v: Array) -> Trial:
    """Return a trial of attention: two matrix multiplications and a softmax, with varied scores."""
    model = written(
        [
            Node("MatMul", ["q", "k"], ["scores"]),
            Node("Softmax", ["scores"], ["weights"], {"axis": -1}),
            Node("MatMul", ["weights", "v"], ["y"]),
        ],
        {"q": _batch(32, 64), "k": _batch(64, 32), "v": _batch(32, 64)},
        {"y": _batch(32, 64)},
    )
    scores = q.astype(np.float64) @ k
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    given, wanted = {"q": q, "k": k, "v": v}, {"y": weights @ v.astype(np.float64)}
    # The scores reach 30, so errors of 2**-9 in them become errors of 6 % in their exponentials.
    return Trial("softmax", model, given, wanted, allowed_bf16=0.1)


def _exponentials(x: Array) -> Trial:
    model = written(
        [Node("Exp", ["x"], ["y"])], {"x": _batch(x.shape[1])}, {"y": _batch(x.shape[1])}
    )
    return Trial("exponentials", model, {"x": x}, {"y": np.exp(x.astype(np.float64))}, each=True)


def _curves(x: Array) -> Trial:
    operations = ("Sigmoid", "Tanh", "Erf")
    width = x.shape[1]
    model = written(
        [Node(operation, ["x"], [operation]) for operation in operations],
        {"x": _batch(width)},
        {operation: _batch(width) for operation in operations},
    )
    wide = x.astype(np.float64)
    wanted = {
        "Sigmoid": 1 / (1 + np.exp(-wide)),
        "Tanh": np.tanh(wide),
        "Erf": np.array([[math.erf(value) for value in wide[0]]]),
    }
    return Trial("curves", model, {"x": x}, wanted)


def _normalization(x: Array, scale: Array, shift: Array) -> Trial:
    width = x.shape[1]
    model = written(
        [
            Node("LayerNormalization", ["x", "scale", "shift"], ["layer"]),
            Node("Mul", ["x", "x"], ["squares"]),
            Node("ReduceMean", ["squares", "last"], ["mean"]),
            Node("Sqrt", ["mean"], ["root"]),
            Node("Reciprocal", ["root"], ["inverse"]),
            Node("Mul", ["x", "inverse"], ["rms"]),
        ],
        {"x": _batch(width), "scale": ArrayType([width]), "shift": ArrayType([width])},
        {"layer": _batch(width), "rms": _batch(width)},
        {"last": np.array([-1], "<i8")},
    )
    wide = x.astype(np.float64)
    centred = wide - wide.mean(-1, keepdims=True)
    layer = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale + shift
    rms = wide / np.sqrt((wide**2).mean(-1, keepdims=True))
    given = {"x": x, "scale": scale, "shift": shift}
    return Trial("normalization", model, given, {"layer": layer, "rms": rms})


def _rows(table: Array, rows: Array, places: Array) -> Trial:
    """Return a trial that gathers rows of a table and adds their elements with a scatter."""
    model = written(
        [
            Node("Gather", ["table", "rows"], ["found"], {"axis": 0}),
            Node("ScatterElements", ["zeros", "places", "found"], ["y"], {"reduction": "add"}),
        ],
        {
            "table": _batch(32),
            "rows": ArrayType(rows.shape, "int64"),
            "places": ArrayType(places.shape, "int64"),
            "zeros": ArrayType([16, 32]),
        },
        {"found": ArrayType([48, 32]), "y": ArrayType([16, 32])},
    )
    zeros = np.zeros((16, 32), np.float32)
    found = table.astype(np.float64)[rows]
    y = zeros.astype(np.float64)
    np.add.at(y, (places, np.arange(32)), found)
    given = {"table": table, "rows": rows, "places": places, "zeros": zeros}
    return Trial("gather and scatter", model, given, {"found": found, "y": y})


def _reductions(x: Array) -> Trial:
    """Return a trial of long sums of positive numbers, for which 16-bit accumulation fails."""
    model = written(
        [
            Node("ReduceSum", ["x", "last"], ["sum"]),
            Node("LogSoftmax", ["x"], ["logs"], {"axis": -1}),
        ],
        {"x": _batch(x.shape[1])},
        {"sum": _batch(1), "logs": _batch(x.shape[1])},
        {"last": np.array([-1], "<i8")},
    )
    wide = x.astype(np.float64)
    logs = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    return Trial("reductions", model, {"x": x}, {"sum": wide.sum(-1, keepdims=True), "logs": logs})


def _batch(*shape: int) -> ArrayType:
    return ArrayType(["batch", *shape])


def _error(found: Array, wanted: Array, scale: Array) -> float:
    if found.shape != wanted.shape:
        return math.inf
    off = float((np.abs(found.astype(np.float64) - wanted) / scale).max())
    return math.inf if math.isnan(off) else off
