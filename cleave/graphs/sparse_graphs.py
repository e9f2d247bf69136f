"""Graphs for sparse exchanges of weights, as in SparseLoCo (arXiv 2508.15706).

A device adds the difference of a round to its *error*: the part of earlier differences that it has
not returned. It returns the largest elements of each chunk of the sum, in 2 bits each, and keeps
the rest as its error. The 2 bits are the sign, and whether the magnitude is above the mean
magnitude of the chunk's returned elements. All magnitudes above the mean are replaced with their
own mean, as are all magnitudes below it.

Each element is sent as one fp16 number that encodes its index in the chunk and its 2 bits.

The server sends the change of its weights as a mask with one bit per element, and one byte per
changed element.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from cleave import graph_names as names
from cleave.graphs.exchange_graphs import (
    LARGEST,
    codes_from,
    half_constants,
    half_nodes,
    numbers_of,
    quantized,
)
from cleave.machine.graph_session import Array
from cleave.machine.onnx_graph import ArrayType, Node, written

DECAY: Final = 0.95  # factor of the error in each round, as published
_CHUNK: Final = 4096  # maximum number of elements in a chunk, as published
_SHARE: Final = 64  # a device returns one in this number of elements
_LARGE, _NEGATIVE, _FORMS = 1, 2, 4  # the 2 bits of an element, and the number of their values
_BYTE: Final = 8  # bits
_FP32, _INT32 = 1, 6  # ONNX's codes of element types
_VECTOR: Final = ArrayType(["elements"])


@dataclass(frozen=True, slots=True)
class Chunks:
    """A vector as `rows` chunks of `columns` elements. The last `padding` elements are zeros.

    Attributes:
        columns: a multiple of 8, so that a mask of chunks consists of whole bytes.
    """

    rows: int
    columns: int
    padding: int

    @staticmethod
    def of(elements: int) -> Chunks:
        """Return chunks of at most 4096 elements, with little padding."""
        rows = -(-elements // _CHUNK)
        columns = _BYTE * -(-elements // (rows * _BYTE))
        return Chunks(rows, columns, rows * columns - elements)

    @property
    def kept(self) -> int:
        """Return the number of elements of each chunk that a device returns."""
        return -(-self.columns // _SHARE)

    def cut(self, values: Array) -> Array:
        """Return the chunks of a vector, shape (rows, columns)."""
        return np.pad(values.reshape(-1), (0, self.padding)).reshape(self.rows, self.columns)

    def joined(self, chunks: Array) -> Array:
        """Return the vector whose chunks `cut` returned."""
        return chunks.reshape(-1)[: chunks.size - self.padding]

    def cut_nodes(self, vector: str, out: str) -> list[Node]:
        """Return graph nodes that implement `cut`. They need the constants from `constants`."""
        if not self.padding:
            return [Node("Reshape", [vector, "shape"], [out])]
        padded = f"{out} padded"
        return [
            Node("Concat", [vector, "padding"], [padded], {"axis": 0}),
            Node("Reshape", [padded, "shape"], [out]),
        ]

    def joined_nodes(self, chunks: str, out: str) -> list[Node]:
        """Return graph nodes that implement `joined`. They need the constants from `constants`."""
        if not self.padding:
            return [Node("Reshape", [chunks, "flat"], [out])]
        padded = f"{out} padded"
        return [
            Node("Reshape", [chunks, "flat"], [padded]),
            Node("Slice", [padded, "first", "end"], [out]),
        ]

    def constants(self) -> dict[str, Array]:
        """Return the constants that `cut_nodes` and `joined_nodes` need."""
        found: dict[str, Array] = {
            "shape": np.array([self.rows, self.columns], np.int64),
            "flat": np.array([-1], np.int64),
        }
        if self.padding:
            found |= {
                "padding": np.zeros(self.padding, np.float32),
                "first": np.zeros(1, np.int64),
                "end": np.array([-self.padding], np.int64),
            }
        return found


def sparse_difference_graph(chunks: Chunks) -> bytes:
    """Return a graph that computes `CODES`, `SCALES` and `updated(ERROR)`.

    The inputs are `START`, `WEIGHT` and `ERROR`. `CODES` has one fp16 number for each returned
    element, and `SCALES` has two magnitudes for each chunk. `sparse_difference` decodes them.
    """
    error = names.updated(names.ERROR)
    nodes = [
        Node("Sub", [names.START, names.WEIGHT], ["difference"]),
        Node("Mul", [names.ERROR, "decay"], ["decayed"]),
        Node("Add", ["decayed", "difference"], ["whole"]),
        *chunks.cut_nodes("whole", "rows"),
        Node("Abs", ["rows"], ["sizes"]),
        Node("TopK", ["sizes", "kept"], ["largest", "at"], {"axis": 1}),
        Node("GatherElements", ["rows", "at"], ["values"], {"axis": 1}),
        # Two magnitudes per chunk. If a count is 0, the sum is 0, too, so divide it by 1.
        Node("ReduceMean", ["largest", "last"], ["mean"], {"keepdims": 1}),
        Node("Greater", ["largest", "mean"], ["is large"]),
        Node("Cast", ["is large"], ["large"], {"to": _FP32}),
        Node("ReduceSum", ["large", "last"], ["large count"], {"keepdims": 1}),
        Node("Sub", ["all", "large count"], ["small count"]),
        Node("Mul", ["largest", "large"], ["large ones"]),
        Node("Sub", ["largest", "large ones"], ["small ones"]),
        Node("ReduceSum", ["large ones", "last"], ["large sum"], {"keepdims": 1}),
        Node("ReduceSum", ["small ones", "last"], ["small sum"], {"keepdims": 1}),
        Node("Max", ["large count", "one"], ["large divisor"]),
        Node("Max", ["small count", "one"], ["small divisor"]),
        Node("Div", ["large sum", "large divisor"], ["large mean"]),
        Node("Div", ["small sum", "small divisor"], ["small mean"]),
        Node("Concat", ["small mean", "large mean"], ["means"], {"axis": 1}),
        Node("Reshape", ["means", "flat"], [names.SCALES]),
        Node("Where", ["is large", "large mean", "small mean"], ["magnitude"]),
        Node("Less", ["values", "zero"], ["is negative"]),
        Node("Neg", ["magnitude"], ["opposed"]),
        Node("Where", ["is negative", "opposed", "magnitude"], ["returned"]),
        Node("Sub", ["values", "returned"], ["unreturned"]),
        Node("ScatterElements", ["rows", "at", "unreturned"], ["rest"], {"axis": 1}),
        *chunks.joined_nodes("rest", error),
        Node("Cast", ["at"], ["place"], {"to": _FP32}),
        Node("Mul", ["place", "forms"], ["begin of place"]),
        Node("Where", ["is negative", "is negative bit", "zero"], ["sign"]),
        Node("Add", ["sign", "large"], ["form"]),
        Node("Add", ["begin of place", "form"], ["code"]),
        Node("Reshape", ["code", "flat"], ["all codes"]),
        *half_nodes("all codes", names.CODES),
    ]
    return written(
        nodes,
        dict.fromkeys((names.START, names.WEIGHT, names.ERROR), _VECTOR),
        {names.CODES: ArrayType(["kept"]), names.SCALES: ArrayType(["scales"]), error: _VECTOR},
        {
            **chunks.constants(),
            **half_constants(),
            "decay": np.array([DECAY], np.float32),
            "kept": np.array([chunks.kept], np.int64),
            "last": np.array([1], np.int64),
            "all": np.array([chunks.kept], np.float32),
            "zero": np.zeros(1, np.float32),
            "is negative bit": np.array([_NEGATIVE], np.float32),
            "forms": np.array([_FORMS], np.float32),
        },
    )


def sparse_difference(halves: Array, scales: Array, chunks: Chunks) -> Array:
    """Return the difference that a device returned, as an fp32 vector.

    If an index is outside its chunk, which only a faulty device returns, all elements are NaN.
    """
    codes = numbers_of(halves).reshape(chunks.rows, chunks.kept)
    places, forms = codes // _FORMS, codes % _FORMS
    found = np.zeros((chunks.rows, chunks.columns), np.float32)
    if places.min() < 0 or places.max() >= chunks.columns:
        found[:] = np.nan
    else:
        sizes = np.take_along_axis(scales.reshape(chunks.rows, 2), forms % _NEGATIVE, 1)
        np.put_along_axis(found, places, np.where(forms < _NEGATIVE, sizes, -sizes), 1)
    return chunks.joined(found)


def sparse_change(change: Array, chunks: Chunks) -> tuple[Array, Array, Array]:
    """Return the mask, codes and scales that the server sends for the change of a vector.

    The first code stands for 0. The other codes belong, in order, to the elements whose bit in the
    mask is set. Each chunk has one scale.
    """
    codes, scales = quantized(chunks.cut(change), chunks.columns)
    changes = codes != LARGEST
    codes = np.concatenate([np.array([LARGEST], np.uint8), codes[changes]])
    return np.packbits(changes, bitorder="little"), codes, scales


def changed(mask: Array, codes: Array, scales: Array, chunks: Chunks) -> Array:
    """Return the change of a vector, fp32, given the results of `sparse_change`."""
    found = np.zeros(chunks.rows * chunks.columns, np.float32)
    found[np.unpackbits(mask, bitorder="little").view(bool)] = codes_from(codes[1:])
    return chunks.joined(found.reshape(chunks.rows, -1) * scales[:, None])


def sparse_added_graph(chunks: Chunks) -> bytes:
    """Return a graph that computes `updated(WEIGHT)` from `START`, `MASK`, `CODES` and `SCALES`.

    `sparse_change` returns the last three inputs.
    """
    nodes = [
        # Bit n of a byte is 1 if the byte divided by 2**n, and rounded down, is odd.
        Node("Cast", [names.MASK], ["bytes"], {"to": _FP32}),
        Node("Reshape", ["bytes", "column"], ["each byte"]),
        Node("Div", ["each byte", "powers of 2"], ["quotients"]),
        Node("Floor", ["quotients"], ["wholes"]),
        Node("Mul", ["wholes", "half"], ["halved"]),
        Node("Floor", ["halved"], ["halves"]),
        Node("Add", ["halves", "halves"], ["even"]),
        Node("Sub", ["wholes", "even"], ["odd"]),
        Node("Cast", ["odd"], ["bits"], {"to": _INT32}),
        Node("Reshape", ["bits", "flat"], ["changes"]),
        # An element's code has the index of its change, from 1. All other elements have code 0.
        Node("CumSum", ["changes", "axis"], ["count"]),
        Node("Mul", ["count", "changes"], ["places"]),
        Node("Gather", [names.CODES, "places"], ["found"], {"axis": 0}),
        Node("Cast", ["found"], ["numbers"], {"to": _FP32}),
        Node("Sub", ["numbers", "most"], ["steps"]),
        Node("Reshape", ["steps", "shape"], ["rows"]),
        Node("Reshape", [names.SCALES, "column"], ["scale"]),
        Node("Mul", ["rows", "scale"], ["scaled"]),
        *chunks.joined_nodes("scaled", "update"),
        Node("Add", [names.START, "update"], [names.updated(names.WEIGHT)]),
    ]
    return written(
        nodes,
        {
            names.START: _VECTOR,
            names.MASK: ArrayType(["bytes"], "uint8"),
            names.CODES: ArrayType(["codes"], "uint8"),
            names.SCALES: ArrayType(["chunks"]),
        },
        {names.updated(names.WEIGHT): _VECTOR},
        {
            **chunks.constants(),
            "column": np.array([-1, 1], np.int64),
            "powers of 2": (2.0 ** np.arange(_BYTE)).astype(np.float32),
            "half": np.array([0.5], np.float32),
            "axis": np.zeros(1, np.int64),
            "most": np.array([LARGEST], np.float32),
        },
    )
