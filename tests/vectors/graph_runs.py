"""Runs of small graphs: the memory that each works in, or why that is not known before it.

Peaks are worked out by hand below, in bytes: of fp32 and int32 an element has 4, of int64 8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from cleave.machine.onnx_graph import (
    ArrayType,
    AttributeField,
    GraphField,
    ModelField,
    NodeField,
    OpsetField,
    TensorField,
    TypeField,
    ValueField,
    content,
    integer,
    written,
)
from tests.vectors.graph_models import hex_of

_INTEGER, _TEXT, _TENSOR, _GRAPH, _INTEGERS = 2, 3, 4, 5, 7  # ONNX's numbers of attributes
_ROW: Final = ArrayType(["batch", 4])
_ANY: Final = ArrayType(["a", "b"])
Attributes = Mapping[str, int | str | Sequence[int] | bytes]


@dataclass(frozen=True)
class Run:
    """A run.

    Attributes:
        model: the graph.
        inputs: how many elements each input is given; nothing for zeros, and for arrays of 16 bits
            a number in a list.
        expected: the peak in bytes, or the reason of the refusal.
        kept: of each output.
    """

    name: str
    about: str
    model: bytes
    inputs: Sequence[int | list[int] | None]
    expected: int | str
    kept: Sequence[bool] = field(default=(False,))


def run_vectors() -> list[dict[str, Any]]:
    """The vectors of `graph_runs.json`."""
    return [_vector(case) for case in all_runs()]


def sound_runs() -> list[Run]:
    """Those that can be run."""
    return [*_peaks(), *_values()]


def all_runs() -> list[Run]:
    """All of them, for tests in Python."""
    return [*sound_runs(), *_hostile(), *_refused()]


def _vector(case: Run) -> dict[str, Any]:
    expected = {"peak_bytes": case.expected}
    if isinstance(case.expected, str):
        expected = {"refused": case.expected}
    return {
        "name": case.name,
        "feature": "graphs",
        "about": case.about,
        "model": hex_of(case.model),
        "inputs": [
            {"elements": given[0], "narrow": True}
            if isinstance(given, list)
            else {"elements": given, "narrow": False}
            for given in case.inputs
        ],
        "kept": list(case.kept),
        **expected,
    }


# --- writing ----------------------------------------------------------------------------------


def _node(operation: str, inputs: str, outputs: str, attributes: Attributes | None = None) -> bytes:
    """An operation; names of arrays stand in one text, and - is one that is left out."""
    return content(
        GraphField.NODE,
        *(content(NodeField.INPUT, name.replace("-", "")) for name in inputs.split()),
        *(content(NodeField.OUTPUT, name.replace("-", "")) for name in outputs.split()),
        content(NodeField.OPERATION, operation),
        *(_attribute(name, value) for name, value in (attributes or {}).items()),
    )


def _attribute(name: str, value: int | str | Sequence[int] | bytes) -> bytes:
    if isinstance(value, int):
        kind, held = _INTEGER, integer(AttributeField.INTEGER, value)
    elif isinstance(value, str):
        kind, held = _TEXT, content(AttributeField.TEXT, value)
    elif isinstance(value, bytes):  # an array or a graph, as it is written
        kind, held = _TENSOR if value[0] >> 3 == AttributeField.TENSOR else _GRAPH, value
    else:
        kind, held = _INTEGERS, b"".join(integer(AttributeField.INTEGERS, n) for n in value)
    name_and_kind = content(AttributeField.NAME, name), integer(AttributeField.TYPE, kind)
    return content(NodeField.ATTRIBUTE, *name_and_kind, held)


def _tensor(array: np.ndarray) -> bytes:
    """A constant, as an attribute holds it."""
    return content(AttributeField.TENSOR, _constant("", array))


def _constant(name: str, array: np.ndarray) -> bytes:
    kind = {"float32": 1, "uint8": 2, "int32": 6, "int64": 7, "bool": 9, "float64": 11}
    return b"".join(
        (
            *(integer(TensorField.SIZE, size) for size in array.shape),
            integer(TensorField.TYPE, kind[array.dtype.name]),
            content(TensorField.NAME, name),
            content(TensorField.BYTES, array.tobytes()),
        )
    )


def _model(
    *nodes: bytes,
    inputs: Mapping[str, ArrayType] | None = None,
    outputs: Sequence[str] = ("y",),
    **constants: Any,
) -> bytes:
    """A model of `x`, with any number of rows of 4 elements."""
    arrays = {
        name: value if isinstance(value, np.ndarray) else np.array(value, "<i8")
        for name, value in constants.items()
    }
    plain = written([], inputs or {"x": _ROW}, dict.fromkeys(outputs, _ANY), arrays)
    return plain + content(ModelField.GRAPH, *nodes)


def _inner(*nodes: bytes, inputs: str = "", outputs: str) -> bytes:
    """A graph inside an operation, as an attribute holds it."""
    return content(
        AttributeField.GRAPH,
        *nodes,
        content(GraphField.NAME, "inside"),
        *(content(GraphField.INPUT, _array(name)) for name in inputs.split()),
        *(content(GraphField.OUTPUT, _array(name)) for name in outputs.split()),
    )


def _array(name: str) -> bytes:
    kind = content(TypeField.TENSOR, integer(1, 1))
    return content(ValueField.NAME, name) + content(ValueField.TYPE, kind)


# --- cases ------------------------------------------------------------------------------------


def _peaks() -> list[Run]:
    """Which arrays are there at the same time."""
    chain = _model(_node("Neg", "x", "a"), _node("Exp", "a", "b"), _node("Tanh", "b", "y"))
    turned = [_node("Transpose", "w", "t", {"perm": [1, 0]}), _node("MatMul", "x t", "y")]
    weights = {"x": _ROW, "w": ArrayType([8, 4])}
    summed = _model(
        _node("MatMul", "a x", "g"),
        _node("Add", "g s", "y"),
        inputs={"a": ArrayType([4, "rows"]), "x": ArrayType(["rows", 4]), "s": ArrayType([4, 4])},
    )
    late = [
        _node("ReduceSum", "x axes", "r0"),
        *(
            part
            for n in range(1, 4)
            for part in (
                _node("Expand", "x size", f"e{n}"),
                _node("Concat", f"e{n} r{n - 1}", f"c{n}", {"axis": 0}),
                _node("ReduceSum", f"c{n} axes", f"r{n}"),
            )
        ),
        _node("Identity", "r3", "y"),
    ]
    scan = _node(
        "Scan",
        "first x",
        "last y",
        {
            "body": _inner(
                _node("Add", "s r", "n"),
                _node("Expand", "n nine", "o"),
                inputs="s r",
                outputs="n o",
            ),
            "num_scan_inputs": 1,
        },
    )
    branches = _node(
        "If",
        "c",
        "y",
        {
            "then_branch": _inner(_node("Neg", "x", "t"), outputs="t"),
            "else_branch": _inner(_node("Neg", "x", "u"), _node("Exp", "u", "v"), outputs="v"),
        },
    )
    picked = {"c": ArrayType(["batch", 4], "bool"), "x": _ROW}
    return [
        Run(
            "one-operation",
            "an output that is not kept counts",
            _model(_node("Neg", "x", "y")),
            [40],
            160,
        ),
        Run(
            "kept-output",
            "one that is kept does not: it counts already",
            _model(_node("Neg", "x", "y")),
            [40],
            0,
            [True],
        ),
        Run("chain", "an array ends with the last operation that takes it", chain, [40], 320),
        Run("chain-kept", "the last is kept", chain, [40], 320, [True]),
        Run("no-rows", "arrays of no elements", chain, [0], 0),
        Run(
            "view",
            "a reshaped array is the same memory",
            _model(
                _node("Neg", "x", "a"),
                _node("Reshape", "a shape", "b"),
                _node("Exp", "b", "y"),
                shape=[2, -1],
            ),
            [40],
            320,
        ),
        Run(
            "view-as-output",
            "but an output has its own",
            _model(_node("Neg", "x", "a"), _node("Reshape", "a shape", "y"), shape=[2, -1]),
            [40],
            320,
        ),
        Run(
            "both-outputs",
            "outputs stay to the end",
            _model(
                _node("Neg", "x", "y"),
                _node("Exp", "x", "a"),
                _node("Tanh", "a", "z"),
                outputs=["y", "z"],
            ),
            [40],
            480,
            [False, False],
        ),
        Run(
            "nobody-takes-it",
            "it ends with its operation; two thirds of 320 in the late order",
            _model(_node("Neg", "x", "a"), _node("Exp", "x", "y")),
            [40],
            213,
        ),
        Run(
            "where",
            "each side is selected into memory of its own",
            _model(_node("Where", "c x x", "y"), inputs=picked),
            [40, 40],
            480,
        ),
        Run(
            "turned-matrix",
            "a product reads it as it is",
            _model(*turned, inputs=weights),
            [40, 32],
            320,
        ),
        Run(
            "turned-and-taken-otherwise",
            "then it is made",
            _model(*turned, _node("Neg", "t", "z"), inputs=weights, outputs=["y", "z"]),
            [40, 32],
            576,
            [False, False],
        ),
        Run(
            "turned-by-other-axes",
            "the order of axes is not that of a product",
            _model(
                _node("Transpose", "w", "t", {"perm": [0, 1]}),
                _node("MatMul", "x t", "y"),
                inputs={"x": _ROW, "w": ArrayType([4, 8])},
            ),
            [40, 32],
            448,
        ),
        Run(
            "product-added-to-a-sum",
            "it is made in the output's memory",
            summed,
            [40, 40, 16],
            0,
            [True],
        ),
        Run("product-added-to-no-output", "here it is not", summed, [40, 40, 16], 128),
        Run(
            "zeros-of-a-sum",
            "no memory of their own where the sum is kept",
            summed,
            [40, 40, None],
            0,
            [True],
        ),
        Run(
            "zeros",
            "for any other input they count to the end",
            _model(_node("Mul", "x w", "y"), inputs={"x": _ROW, "w": ArrayType([4])}),
            [40, None],
            176,
        ),
        Run(
            "narrow-batch",
            "16-bit elements are widened, of an input of any size for the whole run",
            chain,
            [[40]],
            480,
        ),
        Run(
            "narrow-weights",
            "others in the operations that take them",
            _model(
                _node("MatMul", "x w", "a"),
                _node("Exp", "a", "y"),
                inputs={"x": _ROW, "w": ArrayType([4, 8])},
            ),
            [40, [32]],
            640,
        ),
        Run(
            "late-order",
            "each operation as late as it can be: two thirds of that",
            _model(*late, size=[50, 4], axes=[0]),
            [4],
            (3 * 800 + 16 + 816) * 2 // 3,
        ),
        Run(
            "scan",
            "the memory of one row, the state twice, and the rows that are made",
            _model(scan, first=np.zeros(4, "<f4"), nine=[9, 4]),
            [40],
            10 * 144 + 16 + 160 + 16,
        ),
        Run(
            "branches",
            "the larger of both",
            _model(branches, inputs={"c": ArrayType([], "bool"), "x": _ROW}),
            [1, 40],
            480,
        ),
        Run(
            "three-added",
            "a sum of many has one more",
            _model(_node("Sum", "x x x", "y")),
            [40],
            320,
        ),
        Run(
            "softmax-of-rows",
            "in place",
            _model(_node("Softmax", "x", "y", {"axis": -1})),
            [40],
            160,
        ),
        Run(
            "softmax-of-columns",
            "turned before and after",
            _model(_node("Softmax", "x", "y", {"axis": 0})),
            [40],
            480,
        ),
        Run(
            "convolution",
            "the inputs of each element side by side",
            _model(
                _node("Conv", "x w", "y", {"pads": [1, 1]}),
                inputs={"x": ArrayType(["batch", 3, 8]), "w": ArrayType([5, 3, 3])},
            ),
            [48, 45],
            320 + 288 + 192 + 320,
        ),
    ]


def _values() -> list[Run]:
    """Sizes that the graph works out from those of its inputs."""

    def sized(*nodes: bytes, **constants: Any) -> bytes:
        """Zeros of the shape `s`."""
        return _model(*nodes, _node("ConstantOfShape", "s", "y"), **constants)

    shape = _node("Shape", "x", "n")
    rows = _node("Shape", "x", "n", {"start": 0, "end": 1})
    return [
        Run("shape", "rows and columns", sized(_node("Shape", "x", "s")), [40], 16 + 160),
        Run(
            "shape-from-the-end",
            "the columns alone",
            sized(_node("Shape", "x", "s", {"start": -1})),
            [40],
            8 + 16,
        ),
        Run(
            "gather",
            "one size, from the end",
            sized(
                shape,
                _node("Gather", "n last", "g"),
                _node("Unsqueeze", "g zero", "s"),
                last=-1,
                zero=[0],
            ),
            [40],
            8 + 16,
        ),
        Run(
            "concat",
            "of two sizes",
            sized(rows, _node("Concat", "n two", "s", {"axis": 0}), two=[2]),
            [40],
            16 + 80,
        ),
        Run(
            "arithmetic",
            "(10 * 6 - 4) / 8 + 1 = 8",
            sized(
                rows,
                _node("Mul", "n six", "a"),
                _node("Sub", "a four", "b"),
                _node("Div", "b eight", "c"),
                _node("Add", "c one", "s"),
                six=[6],
                four=[4],
                eight=[8],
                one=[1],
            ),
            [40],
            8 + 32,
        ),
        Run(
            "remainder",
            "10 mod 4 = 2",
            sized(rows, _node("Mod", "n four", "s"), four=[4]),
            [40],
            8 + 8,
        ),
        Run(
            "least-and-most",
            "min(10, 7), at least 3",
            sized(
                rows,
                _node("Min", "n seven", "a"),
                _node("Max", "a three", "s"),
                seven=[7],
                three=[3],
            ),
            [40],
            8 + 28,
        ),
        Run(
            "where-of-sizes",
            "-1 becomes 1",
            sized(
                _node("Equal", "given minus", "c"),
                _node("Where", "c ones given", "s"),
                given=[3, -1],
                minus=[-1],
                ones=[1, 1],
            ),
            [40],
            2 + 16 * 3,
        ),
        Run(
            "slice",
            "the last two of three",
            sized(
                _node("Slice", "given start end axes steps", "s"),
                given=[9, 3, 5],
                start=[-2],
                end=[2**63 - 1],
                axes=[0],
                steps=[1],
            ),
            [40],
            16 + 60,
        ),
        Run(
            "slice-backward",
            "a start before the first is the first",
            _model(
                _node("Slice", "x start end axes steps", "y"),
                start=[-99],
                end=[-99],
                axes=[0],
                steps=[-1],
            ),
            [40],
            16,
        ),
        Run(
            "slice-with-steps",
            "every third of 10 rows",
            _model(
                _node("Slice", "x start end axes steps", "y"),
                start=[0],
                end=[2**62],
                axes=[0],
                steps=[3],
            ),
            [40],
            64,
        ),
        Run(
            "cast",
            "through int32",
            sized(rows, _node("Cast", "n", "i", {"to": 6}), _node("Cast", "i", "s", {"to": 7})),
            [40],
            8 + 40,
        ),
        Run(
            "product-of-sizes",
            "10 * 4",
            sized(shape, _node("ReduceProd", "n", "s", {"keepdims": 1})),
            [40],
            8 + 160,
        ),
        Run(
            "range",
            "0, 1, .. 9",
            sized(
                rows,
                _node("Squeeze", "n zero", "e"),
                _node("Range", "none e one", "r"),
                _node("Slice", "r two three", "s"),
                zero=[0],
                none=0,
                one=1,
                two=[2],
                three=[3],
            ),
            [40],
            88,
        ),
        Run(
            "expanded-sizes",
            "5, 5",
            sized(_node("Expand", "five two", "s"), five=[5], two=[2]),
            [40],
            16 + 100,
        ),
        Run(
            "size",
            "40 elements, as a matrix of one row",
            sized(_node("Size", "x", "n"), _node("Reshape", "n minus", "s"), minus=[-1]),
            [40],
            8 + 160,
        ),
        Run(
            "filled-sizes",
            "of a constant that fills",
            sized(
                _node("ConstantOfShape", "two", "s", {"value": _tensor(np.array([6], "<i8"))}),
                two=[2],
            ),
            [40],
            16 + 144,
        ),
        Run(
            "reshape-copies",
            "0 is the input's own size",
            _model(_node("Reshape", "x shape", "y"), shape=[0, 2, -1]),
            [40],
            160,
        ),
        Run(
            "padding",
            "3 rows more",
            _model(_node("Pad", "x pads", "y"), pads=[1, 0, 2, 0]),
            [40],
            208,
        ),
        Run(
            "split-unevenly",
            "10 rows as 4, 4 and 2",
            _model(_node("Split", "x", "y a b", {"num_outputs": 3})),
            [40],
            160,
        ),
        Run(
            "tile",
            "twice and three times",
            _model(_node("Tile", "x times", "y"), times=[2, 3]),
            [40],
            960,
        ),
        Run(
            "elements-by-number",
            "3 rows of 10",
            _model(_node("Gather", "x rows", "y"), rows=[0, 5, 9]),
            [40],
            48,
        ),
    ]


def _hostile() -> list[Run]:
    """Small graphs that make large arrays: the peak is found, and nothing of it is made."""
    doubled = [_node("Concat", f"a{n} a{n}", f"a{n + 1}", {"axis": 0}) for n in range(25)]
    doubled[0] = _node("Concat", "x x", "a1", {"axis": 0})
    sums = [_node("Add", f"a{n} a{n}", f"a{n + 1}") for n in range(40)]
    return [
        Run(
            "expand",
            "to 2^31 elements",
            _model(_node("Expand", "x size", "y"), size=[2**29, 1, 4]),
            [4],
            2**33,
        ),
        Run(
            "doubling",
            "25 times",
            _model(*doubled, _node("ReduceSum", "a25", "y")),
            [4],
            16 * (2**25 + 2**24),
        ),
        Run(
            "constant-of-shape",
            "2^40 elements",
            _model(_node("ConstantOfShape", "size", "y"), size=[2**20, 2**20]),
            [4],
            2**42,
        ),
        Run(
            "outer-product",
            "a column and a row",
            _model(
                _node("Unsqueeze", "v last", "c"),
                _node("Mul", "c v", "y"),
                inputs={"v": ArrayType(["batch"])},
                last=[1],
            ),
            [2**20],
            2**42,
        ),
        Run(
            "range-of-2-to-the-40",
            "of integers",
            _model(_node("Range", "a b c", "y"), a=0, b=2**40, c=1),
            [4],
            2**43,
        ),
        Run(
            "padded-by-2-to-the-40",
            "on one side",
            _model(_node("Pad", "x pads", "y"), pads=[0, 0, 0, 2**40]),
            [4],
            4 * (2**40 + 4),
        ),
        Run(
            "tiled",
            "2^30 times",
            _model(_node("Tile", "x times", "y"), times=[1, 2**30]),
            [4],
            2**34,
        ),
        Run(
            "gathered",
            "a row again and again",
            _model(
                _node("Expand", "zero size", "many"),
                _node("Gather", "x many", "y"),
                zero=[0],
                size=[2**30],
            ),
            [4],
            2**33 + 2**34,
        ),
        Run(
            "sizes-that-double",
            "integers of the graph's own: 2^40",
            _model(
                _node("Identity", "one", "a0"), *sums, _node("ConstantOfShape", "a40", "y"), one=[1]
            ),
            [4],
            2**42 + 8,
        ),
        Run(
            "hidden-in-a-scan",
            "in the graph of each row",
            _model(
                _node(
                    "Scan",
                    "x",
                    "y",
                    {
                        "num_scan_inputs": 1,
                        "body": _inner(
                            _node("Expand", "r size", "w"),
                            _node("ReduceSum", "w", "o"),
                            inputs="r",
                            outputs="o",
                        ),
                    },
                ),
                size=[2**28, 4],
            ),
            [8],
            2**32 + 4 + 8,
        ),
        Run(
            "hidden-in-a-branch",
            "in the one that is not taken",
            _model(
                _node(
                    "If",
                    "c",
                    "y",
                    {
                        "then_branch": _inner(
                            _node("Expand", "x size", "t"),
                            _node("ReduceSum", "t", "a", {"keepdims": 0}),
                            outputs="a",
                        ),
                        "else_branch": _inner(
                            _node("ReduceSum", "x", "b", {"keepdims": 0}), outputs="b"
                        ),
                    },
                ),
                inputs={"c": ArrayType([], "bool"), "x": _ROW},
                size=[2**28, 1, 4],
            ),
            [1, 4],
            2**32 + 4 + 4,
        ),
        Run(
            "kept-and-large",
            "an output that is kept counts as it was said to, the rest as it is",
            _model(_node("Expand", "x size", "y"), size=[2**29, 1, 4]),
            [4],
            0,
            [True],
        ),
    ]


def _refused() -> list[Run]:
    neg = _node("Neg", "x", "y")
    negative = ArrayType([-1, -4])
    twice = content(
        GraphField.NODE,
        content(NodeField.INPUT, "x"),
        content(NodeField.OUTPUT, "y"),
        content(NodeField.OPERATION, "Softmax"),
        _attribute("axis", 0),
        _attribute("axis", -1),
    )
    deep = _node("Reshape", "x shape", "y")
    return [
        Run(
            "unknown-operation",
            "not on the list",
            _model(_node("NonZero", "x", "y")),
            [40],
            "operation",
        ),
        Run(
            "size-from-elements",
            "a size that only the values of an input tell",
            _model(
                _node("ReduceMax", "n", "m"),
                _node("Expand", "x m", "y"),
                inputs={"x": _ROW, "n": ArrayType([1], "int64")},
            ),
            [40, 1],
            "shape",
        ),
        Run(
            "size-from-floats",
            "numbers that are no integers are not followed",
            _model(
                _node("ReduceSum", "x", "m"),
                _node("Cast", "m", "n", {"to": 7}),
                _node("ConstantOfShape", "n", "y"),
            ),
            [40],
            "shape",
        ),
        Run(
            "larger-than-any",
            "2^53 elements",
            _model(_node("ConstantOfShape", "size", "y"), size=[2**26, 2**27]),
            [4],
            "size",
        ),
        Run(
            "wraps-64-bits",
            "2^32 * 2^32 is not 0",
            _model(_node("ConstantOfShape", "size", "y"), size=[2**32, 2**32]),
            [4],
            "size",
        ),
        Run(
            "wraps-in-a-product-of-sizes",
            "a size beyond 2^53 is not followed",
            _model(_node("Mul", "a a", "s"), _node("ConstantOfShape", "s", "y"), a=[2**32]),
            [4],
            "shape",
        ),
        Run(
            "large-numbers-are-not-equal",
            "2^63 - 1 less 2^63 - 9 is not followed",
            _model(
                _node("Sub", "a b", "s"),
                _node("ConstantOfShape", "s", "y"),
                a=[2**63 - 1],
                b=[2**63 - 9],
            ),
            [4],
            "shape",
        ),
        Run(
            "int32-wraps",
            "beyond 2^31 it is not followed",
            _model(
                _node("Cast", "a", "i", {"to": 6}),
                _node("Cast", "i", "s", {"to": 7}),
                _node("ConstantOfShape", "s", "y"),
                a=[2**32 + 1],
            ),
            [4],
            "shape",
        ),
        Run(
            "negative-size",
            "-5 elements",
            _model(_node("ConstantOfShape", "size", "y"), size=[-5]),
            [4],
            "shape",
        ),
        Run(
            "negative-input", "of -1 and -4 rows", _model(neg, inputs={"x": negative}), [4], "shape"
        ),
        Run(
            "padded-away",
            "-3 rows of one",
            _model(_node("Pad", "x pads", "y"), pads=[-2, 0, -2, 0]),
            [4],
            "shape",
        ),
        Run(
            "other-element-type", "fp64", _model(_node("Cast", "x", "y", {"to": 11})), [40], "type"
        ),
        Run("text", "strings", _model(_node("Cast", "x", "y", {"to": 8})), [40], "type"),
        Run(
            "taken-before-it-is-made",
            "operations are in order",
            _model(_node("Neg", "a", "y"), _node("Neg", "x", "a")),
            [40],
            "name",
        ),
        Run(
            "circle",
            "each needs the other",
            _model(_node("Add", "x b", "a"), _node("Neg", "a", "b"), _node("Neg", "a", "y")),
            [40],
            "name",
        ),
        Run("made-twice", "two arrays of one name", _model(neg, neg), [40], "name"),
        Run("attribute-twice", "readers disagree about which counts", _model(twice), [40], "name"),
        Run(
            "output-that-nothing-makes",
            "of another name",
            _model(neg, outputs=["y", "z"]),
            [40],
            "name",
            [False, False],
        ),
        Run(
            "old-operations",
            "opset 12",
            _model(neg).replace(
                content(ModelField.OPSET, integer(OpsetField.VERSION, 20)),
                content(ModelField.OPSET, integer(OpsetField.VERSION, 12)),
            ),
            [40],
            "opset",
        ),
        Run(
            "no-opset",
            "none is imported",
            _model(neg).replace(content(ModelField.OPSET, integer(OpsetField.VERSION, 20)), b""),
            [40],
            "opset",
        ),
        Run(
            "two-opsets",
            "18 and 20",
            _model(neg) + content(ModelField.OPSET, integer(OpsetField.VERSION, 18)),
            [40],
            "opset",
        ),
        Run(
            "shapes-do-not-fit",
            "4 and 3 columns",
            _model(_node("Add", "x w", "y"), w=np.zeros(3, "<f4")),
            [40],
            "shape",
        ),
        Run("too-few-elements", "10 of rows of 4", _model(neg), [10], "shape"),
        Run("zeros-of-any-size", "zeros have no number of rows", _model(neg), [None], "shape"),
        Run(
            "missing-input",
            "an operation of two inputs with one",
            _model(_node("MatMul", "x", "y")),
            [40],
            "shape",
        ),
        Run("many-dimensions", "33 of them", _model(deep, shape=[1] * 31 + [-1, 4]), [40], "shape"),
        Run(
            "branches-of-other-shapes",
            "which is taken is not known",
            _model(
                _node(
                    "If",
                    "c",
                    "y",
                    {
                        "then_branch": _inner(_node("Neg", "x", "t"), outputs="t"),
                        "else_branch": _inner(_node("ReduceSum", "x", "u"), outputs="u"),
                    },
                ),
                inputs={"c": ArrayType([], "bool"), "x": _ROW},
            ),
            [1, 40],
            "shape",
        ),
        Run(
            "state-that-grows",
            "a row more in every round",
            _model(
                _node(
                    "Scan",
                    "first x",
                    "last y",
                    {
                        "num_scan_inputs": 1,
                        "body": _inner(
                            _node("Concat", "s s", "n", {"axis": 0}),
                            _node("Neg", "r", "o"),
                            inputs="s r",
                            outputs="n o",
                        ),
                    },
                ),
                first=np.zeros(4, "<f4"),
            ),
            [40],
            "shape",
        ),
        Run("wrong-number-of-inputs", "two for one", _model(neg), [40, 40], "shape"),
    ]
