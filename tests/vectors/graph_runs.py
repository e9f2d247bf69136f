"""Runs of small graphs: the memory that each works in, or why that is not known before it.

Peaks are worked out by hand below, in bytes: of fp32 and int32 an element has 4, of int64 8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

_INTEGER, _TENSOR, _GRAPH, _INTEGERS = 2, 4, 5, 7  # ONNX's numbers of attributes
_ROW: Final = ArrayType(["batch", 4])
_ANY: Final = ArrayType(["a", "b"])


@dataclass(frozen=True)
class Run:
    """A run.

    Attributes:
        model: the graph.
        expected: the peak in bytes, or the reason of the refusal.
        inputs: how many elements each input is given; nothing for zeros, and for arrays of 16 bits
            a number in a list. By default, ten rows of four.
        kept: of each output.
    """

    name: str
    about: str
    model: bytes
    expected: int | str
    inputs: Sequence[int | list[int] | None] = (40,)
    kept: Sequence[bool] = (False,)


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


def _operations(text: str, **held: bytes) -> bytes:
    """Write the operations of a text like `n = Shape x start=0; s = Concat n two axis=0`.

    Args:
        text: outputs, then the operation with its inputs and attributes. A comma makes an attribute
            a list.
        held: attributes that are arrays or graphs, as they are written. The text names them without
            a value: `body=`.
    """
    return b"".join(_operation(line, held) for line in text.split(";"))


def _operation(line: str, held: Mapping[str, bytes]) -> bytes:
    outputs, _, right = line.partition(" = ")
    operation, *words = right.split()
    attributes = [word.split("=") for word in words if "=" in word]
    return content(
        GraphField.NODE,
        *(content(NodeField.INPUT, word) for word in words if "=" not in word),
        *(content(NodeField.OUTPUT, name) for name in outputs.split()),
        content(NodeField.OPERATION, operation),
        *(_attribute(name, value, held) for name, value in attributes),
    )


def _attribute(name: str, value: str, held: Mapping[str, bytes]) -> bytes:
    numbers = [int(number) for number in value.split(",") if number]
    if not numbers:
        written_as = held[name]
        kind = _TENSOR if written_as[0] >> 3 == AttributeField.TENSOR else _GRAPH
    elif "," in value:
        kind, written_as = _INTEGERS, b"".join(integer(AttributeField.INTEGERS, n) for n in numbers)
    else:
        kind, written_as = _INTEGER, integer(AttributeField.INTEGER, numbers[0])
    name_and_kind = content(AttributeField.NAME, name), integer(AttributeField.TYPE, kind)
    return content(NodeField.ATTRIBUTE, *name_and_kind, written_as)


def _tensor(array: np.ndarray) -> bytes:
    """A constant, as an attribute holds it."""
    kind = {"float32": 1, "uint8": 2, "int32": 6, "int64": 7, "bool": 9, "float64": 11}
    held = b"".join(
        (
            *(integer(TensorField.SIZE, size) for size in array.shape),
            integer(TensorField.TYPE, kind[array.dtype.name]),
            content(TensorField.NAME, ""),
            content(TensorField.BYTES, array.tobytes()),
        )
    )
    return content(AttributeField.TENSOR, held)


def _model(
    *operations: str | bytes,
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
    nodes = (_operations(each) if isinstance(each, str) else each for each in operations)
    return plain + content(ModelField.GRAPH, *nodes)


def _inner(operations: str, *, inputs: str = "", outputs: str) -> bytes:
    """A graph inside an operation, as an attribute holds it."""
    return content(
        AttributeField.GRAPH,
        _operations(operations),
        content(GraphField.NAME, "inside"),
        *(content(GraphField.INPUT, _array(name)) for name in inputs.split()),
        *(content(GraphField.OUTPUT, _array(name)) for name in outputs.split()),
    )


def _array(name: str) -> bytes:
    kind = content(TypeField.TENSOR, integer(1, 1))
    return content(ValueField.NAME, name) + content(ValueField.TYPE, kind)


def _if(yes: bytes, no: bytes, **constants: Any) -> bytes:
    """A model that takes one of two graphs."""
    node = _operations("y = If c then_branch= else_branch=", then_branch=yes, else_branch=no)
    return _model(node, inputs={"c": ArrayType([], "bool"), "x": _ROW}, **constants)


# --- cases ------------------------------------------------------------------------------------


def _peaks() -> list[Run]:
    """Which arrays are there at the same time."""
    neg, chain = _model("y = Neg x"), _model("a = Neg x; b = Exp a; y = Tanh b")
    turned = "t = Transpose w perm=1,0; y = MatMul x t"
    weights, other_weights = ({"x": _ROW, "w": ArrayType(sides)} for sides in ([8, 4], [4, 8]))
    summed = _model(
        "g = MatMul a x; y = Add g s",
        inputs={"a": ArrayType([4, "rows"]), "x": ArrayType(["rows", 4]), "s": ArrayType([4, 4])},
    )
    late = "".join(
        f"e{n} = Expand x size; c{n} = Concat e{n} r{n - 1} axis=0; r{n} = ReduceSum c{n} axes; "
        for n in range(1, 4)
    )
    scan = _operations(
        "last y = Scan first x body= num_scan_inputs=1",
        body=_inner("n = Add s r; o = Expand n nine", inputs="s r", outputs="n o"),
    )
    return [
        Run("one-operation", "an output that is not kept counts", neg, 160),
        Run("kept-output", "one that is kept does not: it counts already", neg, 0, kept=[True]),
        Run("chain", "an array ends with the last operation that takes it", chain, 320),
        Run("chain-kept", "the last is kept", chain, 320, kept=[True]),
        Run("no-rows", "arrays of no elements", chain, 0, [0]),
        Run("view", "a reshaped array is the same memory",
            _model("a = Neg x; b = Reshape a shape; y = Exp b", shape=[2, -1]), 320),
        Run("view-as-output", "but an output has its own",
            _model("a = Neg x; y = Reshape a shape", shape=[2, -1]), 320),
        Run("both-outputs", "outputs stay to the end",
            _model("y = Neg x; a = Exp x; z = Tanh a", outputs=["y", "z"]), 480,
            kept=[False, False]),
        Run("nobody-takes-it", "it ends with its operation; two thirds of 320 in the late order",
            _model("a = Neg x; y = Exp x"), 213),
        Run("where", "each side is selected into memory of its own",
            _model("y = Where c x x", inputs={"c": ArrayType(["batch", 4], "bool"), "x": _ROW}),
            480, [40, 40]),
        Run("turned-matrix", "a product reads it as it is", _model(turned, inputs=weights), 320,
            [40, 32]),
        Run("turned-and-taken-otherwise", "then it is made",
            _model(turned, "z = Neg t", inputs=weights, outputs=["y", "z"]), 576, [40, 32],
            [False, False]),
        Run("turned-by-other-axes", "the order of axes is not that of a product",
            _model("t = Transpose w perm=0,1; y = MatMul x t", inputs=other_weights), 448,
            [40, 32]),
        Run("product-added-to-a-sum", "it is made in the output's memory", summed, 0, [40, 40, 16],
            [True]),
        Run("product-added-to-no-output", "here it is not", summed, 128, [40, 40, 16]),
        Run("zeros-of-a-sum", "no memory of their own where the sum is kept", summed, 0,
            [40, 40, None], [True]),
        Run("zeros", "for any other input they count to the end",
            _model("y = Mul x w", inputs={"x": _ROW, "w": ArrayType([4])}), 176, [40, None]),
        Run("narrow-batch",
            "16-bit elements are widened, of an input of any size for the whole run", chain, 480,
            [[40]]),
        Run("narrow-weights", "others in the operations that take them",
            _model("a = MatMul x w; y = Exp a", inputs=other_weights), 640, [40, [32]]),
        Run("late-order", "each operation as late as it can be: two thirds of that",
            _model(f"r0 = ReduceSum x axes; {late}y = Identity r3", size=[50, 4], axes=[0]),
            (3 * 800 + 16 + 816) * 2 // 3, [4]),
        Run("scan", "the memory of one row, the state twice, and the rows that are made",
            _model(scan, first=np.zeros(4, "<f4"), nine=[9, 4]), 10 * 144 + 16 + 160 + 16),
        Run("branches", "the larger of both",
            _if(_inner("t = Neg x", outputs="t"), _inner("u = Neg x; v = Exp u", outputs="v")),
            480, [1, 40]),
        Run("three-added", "a sum of many has one more", _model("y = Sum x x x"), 320),
        Run("softmax-of-rows", "in place", _model("y = Softmax x axis=-1"), 160),
        Run("softmax-of-columns", "turned before and after", _model("y = Softmax x axis=0"), 480),
        Run("convolution", "the inputs of each element side by side",
            _model("y = Conv x w pads=1,1",
                inputs={"x": ArrayType(["batch", 3, 8]), "w": ArrayType([5, 3, 3])}),
            320 + 288 + 192 + 320, [48, 45]),
    ]  # fmt: skip


def _values() -> list[Run]:
    """Sizes that the graph works out from those of its inputs."""

    def sized(operations: str | bytes, **constants: Any) -> bytes:
        """Zeros of the shape `s`."""
        return _model(operations, "y = ConstantOfShape s", **constants)

    shape, rows = "n = Shape x; ", "n = Shape x start=0 end=1; "
    sliced = "y = Slice x start end axes steps"
    filled = _operations("s = ConstantOfShape two value=", value=_tensor(np.array([6], "<i8")))
    return [
        Run("shape", "rows and columns", sized("s = Shape x"), 16 + 160),
        Run("shape-from-the-end", "the columns alone", sized("s = Shape x start=-1"), 8 + 16),
        Run("gather", "one size, from the end",
            sized(shape + "g = Gather n last; s = Unsqueeze g zero", last=-1, zero=[0]), 8 + 16),
        Run("concat", "of two sizes", sized(rows + "s = Concat n two axis=0", two=[2]), 16 + 80),
        Run("arithmetic", "(10 * 6 - 4) / 8 + 1 = 8",
            sized(rows + "a = Mul n six; b = Sub a four; c = Div b eight; s = Add c one", six=[6],
                four=[4], eight=[8], one=[1]), 8 + 32),
        Run("remainder", "10 mod 4 = 2", sized(rows + "s = Mod n four", four=[4]), 8 + 8),
        Run("least-and-most", "min(10, 7), at least 3",
            sized(rows + "a = Min n seven; s = Max a three", seven=[7], three=[3]), 8 + 28),
        Run("where-of-sizes", "-1 becomes 1",
            sized("c = Equal given minus; s = Where c ones given", given=[3, -1], minus=[-1],
                ones=[1, 1]), 2 + 16 * 3),
        Run("slice", "the last two of three",
            sized("s = Slice given start end axes steps", given=[9, 3, 5], start=[-2],
                end=[2**63 - 1], axes=[0], steps=[1]), 16 + 60),
        Run("slice-backward", "a start before the first is the first",
            _model(sliced, start=[-99], end=[-99], axes=[0], steps=[-1]), 16),
        Run("slice-with-steps", "every third of 10 rows",
            _model(sliced, start=[0], end=[2**62], axes=[0], steps=[3]), 64),
        Run("cast", "through int32", sized(rows + "i = Cast n to=6; s = Cast i to=7"), 8 + 40),
        Run("product-of-sizes", "10 * 4", sized(shape + "s = ReduceProd n keepdims=1"), 8 + 160),
        Run("range", "0, 1, .. 9",
            sized(rows + "e = Squeeze n zero; r = Range none e one; s = Slice r two three",
                zero=[0], none=0, one=1, two=[2], three=[3]), 88),
        Run("expanded-sizes", "5, 5", sized("s = Expand five two", five=[5], two=[2]), 16 + 100),
        Run("size", "40 elements, as a matrix of one row",
            sized("n = Size x; s = Reshape n minus", minus=[-1]), 8 + 160),
        Run("filled-sizes", "of a constant that fills", sized(filled, two=[2]), 16 + 144),
        Run("reshape-copies", "0 is the input's own size",
            _model("y = Reshape x shape", shape=[0, 2, -1]), 160),
        Run("padding", "3 rows more", _model("y = Pad x pads", pads=[1, 0, 2, 0]), 208),
        Run("split-unevenly", "10 rows as 4, 4 and 2", _model("y a b = Split x num_outputs=3"),
            160),
        Run("tile", "twice and three times", _model("y = Tile x times", times=[2, 3]), 960),
        Run("elements-by-number", "3 rows of 10", _model("y = Gather x rows", rows=[0, 5, 9]), 48),
    ]  # fmt: skip


def _hostile() -> list[Run]:
    """Small graphs that make large arrays: the peak is found, and nothing of it is made."""
    doubled = "".join(f"a{n + 1} = Concat a{n} a{n} axis=0; " for n in range(1, 25))
    sums = "".join(f"a{n + 1} = Add a{n} a{n}; " for n in range(40))
    expanded = _model("y = Expand x size", size=[2**29, 1, 4])
    scan = _operations(
        "y = Scan x num_scan_inputs=1 body=",
        body=_inner("w = Expand r size; o = ReduceSum w", inputs="r", outputs="o"),
    )
    return [
        Run("expand", "to 2^31 elements", expanded, 2**33, [4]),
        Run("doubling", "25 times", _model(f"a1 = Concat x x axis=0; {doubled}y = ReduceSum a25"),
            16 * (2**25 + 2**24), [4]),
        Run("constant-of-shape", "2^40 elements",
            _model("y = ConstantOfShape size", size=[2**20, 2**20]), 2**42, [4]),
        Run("outer-product", "a column and a row",
            _model("c = Unsqueeze v last; y = Mul c v", inputs={"v": ArrayType(["batch"])},
                last=[1]), 2**42, [2**20]),
        Run("range-of-2-to-the-40", "of integers", _model("y = Range a b c", a=0, b=2**40, c=1),
            2**43, [4]),
        Run("padded-by-2-to-the-40", "on one side",
            _model("y = Pad x pads", pads=[0, 0, 0, 2**40]), 4 * (2**40 + 4), [4]),
        Run("tiled", "2^30 times", _model("y = Tile x times", times=[1, 2**30]), 2**34, [4]),
        Run("gathered", "a row again and again",
            _model("many = Expand zero size; y = Gather x many", zero=[0], size=[2**30]),
            2**33 + 2**34, [4]),
        Run("sizes-that-double", "integers of the graph's own: 2^40",
            _model(f"a0 = Identity one; {sums}y = ConstantOfShape a40", one=[1]), 2**42 + 8, [4]),
        Run("hidden-in-a-scan", "in the graph of each row", _model(scan, size=[2**28, 4]),
            2**32 + 4 + 8, [8]),
        Run("hidden-in-a-branch", "in the one that is not taken",
            _if(_inner("t = Expand x size; a = ReduceSum t keepdims=0", outputs="a"),
                _inner("b = ReduceSum x keepdims=0", outputs="b"), size=[2**28, 1, 4]),
            2**32 + 4 + 4, [1, 4]),
        Run("kept-and-large", "an output that is kept counts as it was said to, the rest as it is",
            expanded, 0, [4], [True]),
    ]  # fmt: skip


def _refused() -> list[Run]:
    neg, opset = _model("y = Neg x"), content(ModelField.OPSET, integer(OpsetField.VERSION, 20))
    older, newer = (content(ModelField.OPSET, integer(OpsetField.VERSION, n)) for n in (12, 18))
    zeros, sized = "y = ConstantOfShape size", "y = ConstantOfShape s"
    growing = _operations(
        "last y = Scan first x num_scan_inputs=1 body=",
        body=_inner("n = Concat s s axis=0; o = Neg r", inputs="s r", outputs="n o"),
    )
    return [
        Run("unknown-operation", "not on the list", _model("y = NonZero x"), "operation"),
        Run("size-from-elements", "a size that only the values of an input tell",
            _model("m = ReduceMax n; y = Expand x m",
                inputs={"x": _ROW, "n": ArrayType([1], "int64")}), "shape", [40, 1]),
        Run("size-from-floats", "numbers that are no integers are not followed",
            _model("m = ReduceSum x; n = Cast m to=7; y = ConstantOfShape n"), "shape"),
        Run("larger-than-any", "2^53 elements", _model(zeros, size=[2**26, 2**27]), "size", [4]),
        Run("wraps-64-bits", "2^32 * 2^32 is not 0", _model(zeros, size=[2**32] * 2), "size", [4]),
        Run("wraps-in-a-product-of-sizes", "a size beyond 2^53 is not followed",
            _model("s = Mul a a", sized, a=[2**32]), "shape", [4]),
        Run("large-numbers-are-not-equal", "2^63 - 1 less 2^63 - 9 is not followed",
            _model("s = Sub a b", sized, a=[2**63 - 1], b=[2**63 - 9]), "shape", [4]),
        Run("int32-wraps", "beyond 2^31 it is not followed",
            _model("i = Cast a to=6; s = Cast i to=7", sized, a=[2**32 + 1]), "shape", [4]),
        Run("negative-size", "-5 elements", _model(zeros, size=[-5]), "shape", [4]),
        Run("negative-input", "of -1 and -4 rows",
            _model("y = Neg x", inputs={"x": ArrayType([-1, -4])}), "shape", [4]),
        Run("padded-away", "-3 rows of one", _model("y = Pad x pads", pads=[-2, 0, -2, 0]),
            "shape", [4]),
        Run("other-element-type", "fp64", _model("y = Cast x to=11"), "type"),
        Run("text", "strings", _model("y = Cast x to=8"), "type"),
        Run("taken-before-it-is-made", "operations are in order", _model("y = Neg a; a = Neg x"),
            "name"),
        Run("circle", "each needs the other", _model("a = Add x b; b = Neg a; y = Neg a"), "name"),
        Run("made-twice", "two arrays of one name", _model("y = Neg x; y = Neg x"), "name"),
        Run("attribute-twice", "readers disagree about which counts",
            _model("y = Softmax x axis=0 axis=-1"), "name"),
        Run("output-that-nothing-makes", "of another name",
            _model("y = Neg x", outputs=["y", "z"]), "name", kept=[False, False]),
        Run("old-operations", "opset 12", neg.replace(opset, older), "opset"),
        Run("no-opset", "none is imported", neg.replace(opset, b""), "opset"),
        Run("two-opsets", "18 and 20", neg + newer, "opset"),
        Run("shapes-do-not-fit", "4 and 3 columns", _model("y = Add x w", w=np.zeros(3, "<f4")),
            "shape"),
        Run("too-few-elements", "10 of rows of 4", neg, "shape", [10]),
        Run("zeros-of-any-size", "zeros have no number of rows", neg, "shape", [None]),
        Run("missing-input", "an operation of two inputs with one", _model("y = MatMul x"),
            "shape"),
        Run("many-dimensions", "33 of them",
            _model("y = Reshape x shape", shape=[1] * 31 + [-1, 4]), "shape"),
        Run("branches-of-other-shapes", "which is taken is not known",
            _if(_inner("t = Neg x", outputs="t"), _inner("u = ReduceSum x", outputs="u")), "shape",
            [1, 40]),
        Run("state-that-grows", "a row more in every round",
            _model(growing, first=np.zeros(4, "<f4")), "shape"),
        Run("wrong-number-of-inputs", "two for one", neg, "shape", [40, 40]),
    ]  # fmt: skip
