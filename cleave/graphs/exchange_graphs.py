"""Graphs that devices run to exchange weights with the server in local updates.

After a round, a device subtracts its weights from its weights at the start of the round, and
returns the difference. It then adds the change of the server's weights to its weights at the start
of the round. Graphs take weights as vectors, so one graph serves all parameters.

With `int8`, each block of elements has one scale, and an element is a whole number from -123 to 123
times the scale. Devices return only floating-point arrays, so two whole numbers are sent as the
bits of one fp16 number. Only normal fp16 numbers are used, because some devices round subnormal
numbers to 0.
"""

from __future__ import annotations

from math import gcd
from typing import Final

import numpy as np

from cleave import graph_names as names
from cleave.machine.graph_session import Array
from cleave.machine.onnx_graph import ArrayType, Node, written

_VECTOR: Final = ArrayType(["elements"])
_TINY: Final = 1e-30  # smallest scale, so that a block of zeros can be divided by its scale
_BLOCK: Final = 256  # maximum number of elements with one scale
_LEAST_BLOCK: Final = 32  # with smaller blocks, scales would be a large part of the traffic
LARGEST: Final = 123  # largest magnitude of a code
_CODES: Final = 2 * LARGEST + 1
_NORMAL: Final = 30 * 1024  # number of positive normal fp16 numbers
_FRACTIONS: Final = 1024  # number of fp16 numbers between two powers of 2
_BIAS: Final = 15  # of the exponents of fp16


def zeros_graph() -> bytes:
    """Return a graph that computes `MOMENT`: zeros in the shape of `WEIGHT`."""
    return _of_two("Sub", names.WEIGHT, names.WEIGHT, names.MOMENT)


def estimate_graph(scalars: int) -> bytes:
    """Return a graph that estimates AdamW's second moments from a parameter's first gradient.

    The inputs are `GRADIENT`, and `SCALARS`, the coefficients of an optimizer step. The first
    coefficient is the gradient's factor. All elements of the output `MOMENT` are the mean square of
    the gradient times this factor.
    """
    nodes = [
        Node("Split", [names.SCALARS, "sizes"], ["factor", "others"]),
        Node("Mul", [names.GRADIENT, "factor"], ["g"]),
        Node("Mul", ["g", "g"], ["squares"]),
        Node("ReduceMean", ["squares"], ["mean"], {"keepdims": 1}),
        Node("Sub", ["g", "g"], ["zeros"]),
        Node("Add", ["zeros", "mean"], [names.MOMENT]),
    ]
    return written(
        nodes,
        {names.GRADIENT: _VECTOR, names.SCALARS: ArrayType([scalars])},
        {names.MOMENT: _VECTOR},
        {"sizes": np.array([1, scalars - 1], np.int64)},
    )


def clip_graph(scalars: int) -> bytes:
    """Return a graph that clips gradients by their norm, as `torch.nn.utils.clip_grad_norm_` does.

    The inputs are `SCALARS`, the coefficients of an optimizer step, and `total(SQUARES)`, the sum
    of squared gradient elements. The first coefficient is the maximum norm. The graph replaces it
    with the factor by which gradients are multiplied.
    """
    squares, made = names.total(names.SQUARES), names.updated(names.SCALARS)
    nodes = [
        Node("Split", [names.SCALARS, "sizes"], ["largest", "others"]),
        Node("Sqrt", [squares], ["norm"]),
        Node("Add", ["norm", "epsilon"], ["divisor"]),
        Node("Div", ["largest", "divisor"], ["ratio"]),
        Node("Min", ["ratio", "one"], ["factor"]),
        Node("Concat", ["factor", "others"], [made], {"axis": 0}),
    ]
    return written(
        nodes,
        {names.SCALARS: ArrayType([scalars]), squares: ArrayType([1])},
        {made: ArrayType([scalars])},
        {
            "sizes": np.array([1, scalars - 1], np.int64),
            "epsilon": np.array([1e-6], np.float32),
            "one": np.ones(1, np.float32),
        },
    )


def difference_graph() -> bytes:
    """Return a graph that computes `GRADIENT`, the difference between `START` and `WEIGHT`."""
    return _of_two("Sub", names.START, names.WEIGHT, names.GRADIENT)


def added_graph() -> bytes:
    """Return a graph that computes `updated(WEIGHT)`, the sum of `START` and `GRADIENT`."""
    return _of_two("Add", names.START, names.GRADIENT, names.updated(names.WEIGHT))


def mixed_graph(part: float) -> bytes:
    """Return a graph that computes `updated(WEIGHT)`, a weighted average of `START` and `WEIGHT`.

    Args:
        part: weight of `WEIGHT` in the average; alpha in Streaming DiLoCo (arXiv 2501.18512).
    """
    out = names.updated(names.WEIGHT)
    nodes = [
        Node("Sub", [names.WEIGHT, names.START], ["difference"]),
        Node("Mul", ["difference", "part"], ["kept"]),
        Node("Add", [names.START, "kept"], [out]),
    ]
    inputs = dict.fromkeys((names.START, names.WEIGHT), _VECTOR)
    return written(nodes, inputs, {out: _VECTOR}, {"part": np.array([part], np.float32)})


def _of_two(op: str, one: str, other: str, out: str) -> bytes:
    """Return a graph with a single operator on two vectors."""
    node = Node(op, [one, other], [out])
    return written([node], dict.fromkeys((one, other), _VECTOR), {out: _VECTOR})


def block_of(elements: int) -> int:
    """Return the number of elements per scale; 0 if a vector cannot be sent in 8 bits."""
    block = gcd(elements, _BLOCK)
    return block if block >= _LEAST_BLOCK else 0


def coded_difference_graph(block: int) -> bytes:
    """Return a graph that computes `CODES` and `SCALES` from `START` and `WEIGHT`.

    `CODES` has one fp16 number per two elements; `codes_of` decodes it. `SCALES` has one number per
    block of `block` elements.
    """
    nodes = [
        Node("Sub", [names.START, names.WEIGHT], ["difference"]),
        Node("Reshape", ["difference", "blocks"], ["rows"]),
        Node("Abs", ["rows"], ["sizes"]),
        Node("ReduceMax", ["sizes", "last"], ["largest"], {"keepdims": 1}),
        Node("Div", ["largest", "most"], ["tight"]),
        Node("Max", ["tight", "tiny"], ["scale"]),
        Node("Reshape", ["scale", "flat"], [names.SCALES]),
        Node("Div", ["rows", "scale"], ["scaled"]),
        Node("Round", ["scaled"], ["rounded"]),
        Node("Add", ["rounded", "most"], ["places"]),
        Node("Reshape", ["places", "pairs"], ["paired"]),
        Node("Mul", ["paired", "weights"], ["weighted"]),
        Node("ReduceSum", ["weighted", "last"], ["place"], {"keepdims": 0}),
        *half_nodes("place", names.CODES),
    ]
    return written(
        nodes,
        {names.START: _VECTOR, names.WEIGHT: _VECTOR},
        {names.CODES: ArrayType(["pairs"]), names.SCALES: ArrayType(["blocks"])},
        {
            "blocks": np.array([-1, block], np.int64),
            "pairs": np.array([-1, 2], np.int64),
            "flat": np.array([-1], np.int64),
            "last": np.array([1], np.int64),
            "most": np.array([LARGEST], np.float32),
            "tiny": np.array([_TINY], np.float32),
            "weights": np.array([_CODES, 1], np.float32),
            **half_constants(),
        },
    )


def half_nodes(number: str, out: str) -> list[Node]:
    """Return nodes that encode whole numbers below 61,440 as normal fp16 numbers.

    `numbers_of` decodes them. The graph needs the constants from `half_constants`.
    """
    return [  # the bits of an fp16 number are its sign, exponent and fraction
        Node("GreaterOrEqual", [number, "normal"], ["negative"]),
        Node("Sub", [number, "normal"], ["after"]),
        Node("Where", ["negative", "after", number], ["positive"]),
        Node("Div", ["positive", "fractions"], ["quotient"]),
        Node("Floor", ["quotient"], ["exponent"]),
        Node("Mul", ["exponent", "fractions"], ["begin"]),
        Node("Sub", ["positive", "begin"], ["fraction"]),
        Node("Div", ["fraction", "fractions"], ["part"]),
        Node("Add", ["part", "one"], ["significand"]),
        Node("Cast", ["exponent"], ["number"], {"to": 7}),
        Node("Gather", ["powers", "number"], ["power"]),
        Node("Mul", ["significand", "power"], ["size"]),
        Node("Neg", ["size"], ["opposite"]),
        Node("Where", ["negative", "opposite", "size"], [out]),
    ]


def half_constants() -> dict[str, Array]:
    """Return the constants that `half_nodes` needs."""
    powers = 2.0 ** np.arange(1 - _BIAS, 1 - _BIAS + _NORMAL // _FRACTIONS)
    return {
        "normal": np.array([_NORMAL], np.float32),
        "fractions": np.array([_FRACTIONS], np.float32),
        "one": np.ones(1, np.float32),
        "powers": powers.astype(np.float32),
    }


def numbers_of(halves: Array) -> Array:
    """Decode fp16 numbers to whole numbers, int64; meaningless for numbers that are not normal."""
    bits = halves.astype(np.float16).view(np.uint16).astype(np.int64)
    found: Array = (bits & 0x7FFF) - _FRACTIONS + (bits >> 15) * _NORMAL
    return found


def codes_of(halves: Array) -> Array:
    """Decode `CODES` to whole numbers, fp32: two for each fp16 number in `halves`."""
    place = numbers_of(halves)
    pairs = np.stack([place // _CODES, place % _CODES], 1).reshape(-1)
    return (pairs - LARGEST).astype(np.float32)


def dequantized(codes: Array, scales: Array) -> Array:
    """Return the elements, fp32, given their whole numbers and the scale of each block."""
    found: Array = (codes.reshape(len(scales), -1) * scales[:, None]).reshape(-1)
    return found


def quantized(values: Array, block: int) -> tuple[Array, Array]:
    """Return the codes (uint8, from 0) and scales that the server sends for a vector."""
    rows = values.reshape(-1, block)
    scales = np.maximum(np.abs(rows).max(1) / np.float32(LARGEST), np.float32(_TINY))
    codes = np.round(rows / scales[:, None]) + LARGEST
    return codes.reshape(-1).astype(np.uint8), scales.astype(np.float32)


def codes_from(sent: Array) -> Array:
    """Decode the codes from `quantized` to whole numbers, fp32."""
    found: Array = sent.astype(np.float32) - np.float32(LARGEST)
    return found


def coded_added_graph(block: int) -> bytes:
    """Return a graph that computes `updated(WEIGHT)` from `START`, `CODES` and `SCALES`.

    `quantized` returns `CODES` and `SCALES`.
    """
    nodes = [
        Node("Cast", [names.CODES], ["numbers"], {"to": 1}),
        Node("Sub", ["numbers", "most"], ["wholes"]),
        Node("Reshape", ["wholes", "blocks"], ["rows"]),
        Node("Reshape", [names.SCALES, "column"], ["scale"]),
        Node("Mul", ["rows", "scale"], ["scaled"]),
        Node("Reshape", ["scaled", "flat"], ["update"]),
        Node("Add", [names.START, "update"], [names.updated(names.WEIGHT)]),
    ]
    return written(
        nodes,
        {
            names.START: _VECTOR,
            names.CODES: ArrayType(["elements"], "uint8"),
            names.SCALES: ArrayType(["blocks"]),
        },
        {names.updated(names.WEIGHT): _VECTOR},
        {
            "blocks": np.array([-1, block], np.int64),
            "column": np.array([-1, 1], np.int64),
            "flat": np.array([-1], np.int64),
            "most": np.array([LARGEST], np.float32),
        },
    )
