"""Time a transformer layer as an ONNX graph, which is how devices run the layers of a stage.

Tiles run on torch or numpy, but graphs run on ONNX Runtime, whose kernels differ. On one core of an
AMD server, torch reaches 112 GFLOP/s, and ONNX Runtime reaches 195 GFLOP/s for this layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np

from cleave.arrays import DType
from cleave.machine.backends import sustained_s
from cleave.machine.graph_session import GraphError, OpenGraph, available
from cleave.machine.onnx_graph import ArrayType, Node, written

# Offered memory below which a device rarely gets a layer. It need not load ONNX Runtime on joining.
LEAST_MEMORY_BYTES: Final = 2**28

_WIDTH: Final = 768
_HEADS: Final = 12
_TOKENS: Final = 128
_ROWS: Final = 2  # sequences; more on a processor that computes these in less than `_LEAST_S`
_MOST_ROWS: Final = 128
_LEAST_S: Final = 0.02
_LONGEST_S: Final = 2.0  # a slower processor, such as a GPU emulated in software, runs it once


def measured_graphs(
    make_session: Callable[[bytes, Sequence[DType | None], DType | None], OpenGraph],
    products: DType | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the FLOP/s that this machine sustains in a layer of OPT-125M's width.

    Times the forward pass for sequences of 128 tokens: 2 of them, or up to 128 on a fast processor.
    At 100 GFLOP/s, this takes 0.4 s. Parameters stay in the processor's memory between runs.
    Returns 0 if this machine cannot run graphs.

    Args:
        make_session: opens a graph, such as `cleave.machine.graph_choice.GraphChoice`.
        products: the 16-bit dtype in which matrix products may be computed; None for fp32.

    Example:
        >>> measured_graphs(GraphChoice())
    """
    if not available():
        return 0.0
    try:
        session = make_session(layer(), (), products)
    except GraphError:
        return 0.0
    rows = _ROWS
    while True:
        random = np.random.default_rng(0)
        given = {
            name: session.upload(
                random.standard_normal(shape, np.float32) / np.float32(_WIDTH**0.5)
            )
            for name, shape in _shapes(rows).items()
        }
        run = partial(session.run_into, given, {})
        if rows == _ROWS and (once_s := _once_s(run, clock)) > _LONGEST_S:
            return layer_flops(rows) / once_s
        took_s = max(sustained_s(run, clock=clock), 1e-9)
        if took_s >= _LEAST_S or rows >= _MOST_ROWS:
            return layer_flops(rows) / took_s
        rows = min(_MOST_ROWS, rows * max(2, int(_LEAST_S / took_s)))


def _once_s(run: Callable[[], object], clock: Callable[[], float]) -> float:
    """Return the duration of a single run, in seconds."""
    began_s = clock()
    run()
    return clock() - began_s


def layer_flops(rows: int = _ROWS) -> float:
    """Return the FLOPs of `layer`'s matrix multiplications for `rows` sequences.

    A multiply-add counts as two FLOPs.
    """
    tokens = rows * _TOKENS
    return 2 * tokens * 12 * _WIDTH**2 + 2 * tokens * 2 * _TOKENS * _WIDTH


def layer() -> bytes:
    """Return the timed layer as a serialized ONNX graph. The layer's MLP is 4 x 768 wide."""
    nodes = [
        Node("LayerNormalization", ["x", "scale", "shift"], ["normal"]),
        *(Node("MatMul", ["normal", f"w_{name}"], [f"{name}_flat"]) for name in "qkv"),
        *(Node("Reshape", [f"{name}_flat", "apart"], [name]) for name in "qkv"),
        Node("Einsum", ["q", "k"], ["scores"], {"equation": "bthd,bshd->bhts"}),
        Node("Mul", ["scores", "sharpness"], ["scaled"]),
        Node("Softmax", ["scaled"], ["weights"], {"axis": -1}),
        Node("Einsum", ["weights", "v"], ["mixed"], {"equation": "bhts,bshd->bthd"}),
        Node("Reshape", ["mixed", "together"], ["mixed_flat"]),
        Node("MatMul", ["mixed_flat", "w_o"], ["attended"]),
        Node("Add", ["x", "attended"], ["between"]),
        Node("LayerNormalization", ["between", "scale", "shift"], ["normal_between"]),
        Node("MatMul", ["normal_between", "w_up"], ["up"]),
        Node("Relu", ["up"], ["active"]),
        Node("MatMul", ["active", "w_down"], ["down"]),
        Node("Add", ["between", "down"], ["y"]),
    ]
    constants = {
        "apart": np.array([0, 0, _HEADS, _WIDTH // _HEADS], "<i8"),
        "together": np.array([0, 0, _WIDTH], "<i8"),
        "sharpness": np.array([(_HEADS / _WIDTH) ** 0.5], "<f4"),
    }
    inputs = {name: ArrayType(shape) for name, shape in _shapes(_ROWS).items()}
    inputs["x"] = ArrayType(["batch", _TOKENS, _WIDTH])
    return written(nodes, inputs, {"y": inputs["x"]}, constants)


def _shapes(rows: int) -> dict[str, tuple[int, ...]]:
    return {
        "x": (rows, _TOKENS, _WIDTH),
        "scale": (_WIDTH,),
        "shift": (_WIDTH,),
        **{f"w_{name}": (_WIDTH, _WIDTH) for name in "qkvo"},
        "w_up": (_WIDTH, 4 * _WIDTH),
        "w_down": (4 * _WIDTH, _WIDTH),
    }
