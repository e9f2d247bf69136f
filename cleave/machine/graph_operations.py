"""Compute the output shapes of all supported graph operations (docs/protocol.md, *Operations*).

Because a shape may depend on integer inputs, the elements of small integer arrays are tracked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, TypeAlias

from cleave.machine.graph_arrays import (
    BOOL,
    FLOAT32,
    FOLLOWED,
    INT32,
    INT64,
    LARGEST_NUMBER,
    MOST_VALUES,
    Operation,
    Refusal,
    Shape,
    Sized,
    UnboundedError,
)

Given: TypeAlias = Sequence[Sized | None]  # None for an omitted optional input


@dataclass(frozen=True, slots=True)
class Made:
    """An operation's outputs in order, and the size of its temporary memory in bytes."""

    outputs: Sequence[Sized]
    working_bytes: int = 0


_Rule: TypeAlias = Callable[[Operation, Sized, Given], Sized | Made]


def made_by(operation: Operation, given: Given) -> Made:
    """Return an operation's outputs and temporary memory.

    Raises:
        UnboundedError: if the operation is unsupported or a shape cannot be computed.
    """
    rule = _RULES.get(operation.name)
    if rule is None:
        raise UnboundedError(
            Refusal.OPERATION, f"graphs do not support the operation {operation.name[:60]}"
        )
    found = rule(operation, _input(operation, given, 0), given)
    return Made([found]) if isinstance(found, Sized) else found


# --- helpers of the rules -----------------------------------------------------------------------


def _input(operation: Operation, given: Given, number: int) -> Sized:
    found = given[number] if number < len(given) else None
    if found is None:
        raise operation.refused(f"it has no input {number}")
    return found


def _values(operation: Operation, given: Given, number: int) -> tuple[int, ...]:
    """Return the elements of an integer input, or raise UnboundedError if they are not tracked."""
    found = _input(operation, given, number).values
    if found is None:
        raise operation.refused(f"its input {number} says a size and is not known before the run")
    return found


def _optional_values(operation: Operation, given: Given, number: int) -> tuple[int, ...] | None:
    there = number < len(given) and given[number] is not None
    return _values(operation, given, number) if there else None


def _axis(operation: Operation, axis: int, rank: int) -> int:
    if not -rank <= axis < rank:
        raise operation.refused(f"axis {axis} does not exist in {rank} dimensions")
    return axis % rank


def _axes(operation: Operation, axes: Sequence[int], rank: int) -> list[int]:
    found = [_axis(operation, axis, rank) for axis in axes]
    if len(set(found)) < len(found):
        raise operation.refused(f"an axis stands twice in {list(axes)}")
    return found


def _broadcast(operation: Operation, shapes: Sequence[Shape]) -> Shape:
    rank = max(len(shape) for shape in shapes)
    found = [1] * rank
    for shape in shapes:
        for at, size in enumerate(shape, rank - len(shape)):
            if found[at] == 1:
                found[at] = size
            elif size not in (1, found[at]):
                raise operation.refused("the shapes of its inputs do not fit")
    return tuple(found)


def followed(shape: Shape, type: int, values: Sequence[int] | None) -> Sized:
    """Return an array's `Sized`, with elements only for a small integer or boolean array."""
    if (
        values is None
        or type not in FOLLOWED
        or len(shape) > 1
        or len(values) > MOST_VALUES
        or len(values) != prod(shape)
    ):
        return Sized(shape, type)
    return Sized(shape, type, tuple(values))


def _one_by_one(
    operation: Operation, arrays: Sequence[Sized], type: int, each: Callable[..., int | None] | None
) -> Sized:
    """Return the `Sized` of an elementwise result. `each` computes one tracked element."""
    shape = _broadcast(operation, [array.shape for array in arrays])
    count = prod(shape)
    rows = [array.values for array in arrays]
    if each is None or len(shape) > 1 or count > MOST_VALUES or None in rows:
        return Sized(shape, type)
    spread = [row * count if len(row) == 1 else row for row in rows if row is not None]
    largest = 2**31 if type == INT32 else LARGEST_NUMBER
    values = []
    for place in zip(*spread, strict=True) if count else ():
        found = each(*place)
        if found is None or not -largest < found < largest:
            return Sized(shape, type)
        values.append(found)
    return followed(shape, type, values)


def _exact(calculate: Callable[..., int | None]) -> Callable[..., int | None]:
    """Wrap a calculation to return None if an operand is too large to be tracked exactly."""

    def calculated(*numbers: int) -> int | None:
        if any(abs(number) >= LARGEST_NUMBER for number in numbers):
            return None
        return calculate(*numbers)

    return calculated


# --- rules ------------------------------------------------------------------------------------


def _arithmetic(calculate: Callable[[int, int], int | None] | None = None) -> _Rule:
    def rule(operation: Operation, first: Sized, given: Given) -> Made:
        arrays = [_input(operation, given, number) for number in range(max(len(given), 1))]
        each = _exact(calculate) if calculate and len(arrays) == 2 else None
        found = _one_by_one(operation, arrays, arrays[0].type, each)
        return Made([found], found.nbytes if len(arrays) > 2 else 0)

    return rule


def _comparison(calculate: Callable[[int, int], bool] | None = None) -> _Rule:
    def rule(operation: Operation, first: Sized, given: Given) -> Sized:
        arrays = [_input(operation, given, number) for number in range(2)]
        return _one_by_one(operation, arrays, BOOL, _exact(calculate) if calculate else None)

    return rule


def _where(operation: Operation, first: Sized, given: Given) -> Made:
    condition, yes, no = (_input(operation, given, number) for number in range(3))
    found = _one_by_one(
        operation, [condition, yes, no], yes.type, _exact(lambda c, a, b: a if c else b)
    )
    return Made([found], 2 * found.nbytes)  # ONNX Runtime holds both selections at the same time


def _cast(operation: Operation, first: Sized, given: Given) -> Sized:
    to = operation.integer("to", 0)
    if to == BOOL:
        return _one_by_one(operation, [first], to, lambda a: int(a != 0))
    return _one_by_one(operation, [first], to, _exact(lambda a: a))


def _softmax(operation: Operation, first: Sized, given: Given) -> Made:
    rank = max(len(first.shape), 1)
    last = _axis(operation, operation.integer("axis", -1), rank) == rank - 1
    return Made([Sized(first.shape, first.type)], 0 if last else 2 * first.nbytes)


def _layer_normalization(operation: Operation, first: Sized, given: Given) -> Made:
    axis = _axis(operation, operation.integer("axis", -1), len(first.shape))
    rest = Sized((*first.shape[:axis], *(1 for _ in first.shape[axis:])), FLOAT32)
    return Made([Sized(first.shape, first.type), rest, rest])


def _reduced(operation: Operation, first: Sized, given: Given) -> Sized:
    rank = len(first.shape)
    axes = _optional_values(operation, given, 1)
    if not axes:
        if operation.integer("noop_with_empty_axes", 0):
            return Sized(first.shape, first.type)
        axes = tuple(range(rank))
    gone = _axes(operation, axes, rank)
    shape = _without(first.shape, gone, keep=operation.integer("keepdims", 1))
    values = first.values
    if operation.name != "ReduceProd" or values is None or not gone:
        return Sized(shape, first.type)
    product = 1
    for value in values:
        product = min(product * min(abs(value), LARGEST_NUMBER), LARGEST_NUMBER)
    negative = any(value < 0 for value in values)
    largest = 2**31 if first.type == INT32 else LARGEST_NUMBER
    found = None if negative or product >= largest else [product]
    return followed(shape, first.type, found)


def _arg(operation: Operation, first: Sized, given: Given) -> Sized:
    axis = _axis(operation, operation.integer("axis", 0), len(first.shape))
    return Sized(_without(first.shape, [axis], keep=operation.integer("keepdims", 1)), INT64)


def _without(shape: Shape, axes: Sequence[int], *, keep: int) -> Shape:
    return tuple(
        1 if at in axes else size for at, size in enumerate(shape) if keep or at not in axes
    )


def _matmul(operation: Operation, first: Sized, given: Given) -> Sized:
    a, b = first, _input(operation, given, 1)
    if not a.shape or not b.shape:
        raise operation.refused("an input has no dimension")
    left = a.shape if len(a.shape) > 1 else (1, *a.shape)
    right = b.shape if len(b.shape) > 1 else (*b.shape, 1)
    if left[-1] != right[-2]:
        raise operation.refused(f"shapes {list(a.shape)} and {list(b.shape)} do not fit")
    batch = _broadcast(operation, [left[:-2], right[:-2]])
    rows = left[-2:-1] if len(a.shape) > 1 else ()
    columns = right[-1:] if len(b.shape) > 1 else ()
    return Sized((*batch, *rows, *columns), a.type)


def _gemm(operation: Operation, first: Sized, given: Given) -> Sized:
    a, b = first, _input(operation, given, 1)
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise operation.refused("an input is not a matrix")
    rows, depth = a.shape[::-1] if operation.integer("transA", 0) else a.shape
    other, columns = b.shape[::-1] if operation.integer("transB", 0) else b.shape
    if depth != other:
        raise operation.refused(f"shapes {list(a.shape)} and {list(b.shape)} do not fit")
    return Sized((rows, columns), a.type)


def _conv(operation: Operation, first: Sized, given: Given) -> Made:
    x, w = first, _input(operation, given, 1)
    rank = len(x.shape) - 2
    auto = operation.attributes.get("auto_pad")
    strides = operation.integers("strides") or [1] * rank
    dilations = operation.integers("dilations") or [1] * rank
    pads = operation.integers("pads") or [0] * 2 * rank
    sizes = [len(w.shape) - 2, len(strides), len(dilations), len(pads) - rank]
    if rank < 1 or sizes != [rank] * 4 or (auto is not None and auto.text != "NOTSET"):
        raise operation.refused("its attributes do not fit its inputs")
    if min(*strides, *dilations) < 1 or min(pads) < 0:
        raise operation.refused("its attributes do not fit its inputs")
    spatial = []
    for at, size in enumerate(x.shape[2:]):
        window = dilations[at] * (w.shape[2 + at] - 1) + 1
        room = size + pads[at] + pads[rank + at] - window
        if room < 0 or w.shape[2 + at] < 1:
            raise operation.refused(f"shapes {list(x.shape)} and {list(w.shape)} do not fit")
        spatial.append(room // strides[at] + 1)
    found = Sized((x.shape[0], w.shape[0], *spatial), x.type)
    columns = Sized((*w.shape[1:], *spatial), x.type)  # im2col buffer of one sample
    return Made([found], columns.nbytes + x.nbytes + found.nbytes)


def _shape(operation: Operation, first: Sized, given: Given) -> Sized:
    shape = first.shape
    rank = len(shape)
    found = shape[slice(*(
        min(max(end + rank if end < 0 else end, 0), rank)
        for end in (operation.integer("start", 0), operation.integer("end", rank))
    ))]  # fmt: skip
    return followed((len(found),), INT64, found)


def _size(operation: Operation, first: Sized, given: Given) -> Sized:
    return followed((), INT64, [first.elements])


def _reshape(operation: Operation, first: Sized, given: Given) -> Sized:
    wanted = list(_values(operation, given, 1))
    if not operation.integer("allowzero", 0):
        for at, size in enumerate(wanted):
            if size == 0:
                if at >= len(first.shape):
                    raise operation.refused(f"shape {list(first.shape)} has no axis {at}")
                wanted[at] = first.shape[at]
    if wanted.count(-1) == 1:
        rest = prod(size for size in wanted if size != -1)
        wanted[wanted.index(-1)] = first.elements // rest if rest > 0 else 0
    found = Sized(tuple(wanted), first.type)
    if found.elements != first.elements:
        raise operation.refused(f"shape {list(first.shape)} does not become {wanted}")
    return followed(found.shape, first.type, first.values)


def _transpose(operation: Operation, first: Sized, given: Given) -> Sized:
    rank = len(first.shape)
    order = operation.integers("perm")
    if order is None:
        order = range(rank)[::-1]
    if sorted(order) != list(range(rank)):
        raise operation.refused(f"{list(order)} is not a permutation of {rank} axes")
    return Sized(tuple(first.shape[axis] for axis in order), first.type)


def _squeeze(operation: Operation, first: Sized, given: Given) -> Sized:
    axes = _optional_values(operation, given, 1)
    if axes is None:
        gone = [at for at, size in enumerate(first.shape) if size == 1]
    else:
        gone = _axes(operation, axes, len(first.shape))
    if any(first.shape[at] != 1 for at in gone):
        raise operation.refused(f"shape {list(first.shape)} is not 1 in {gone}")
    return followed(_without(first.shape, gone, keep=0), first.type, first.values)


def _unsqueeze(operation: Operation, first: Sized, given: Given) -> Sized:
    axes = _values(operation, given, 1)
    rank = len(first.shape) + len(axes)
    new = _axes(operation, axes, rank)
    sizes = iter(first.shape)
    shape = tuple(1 if at in new else next(sizes) for at in range(rank))
    return followed(shape, first.type, first.values)


def _flatten(operation: Operation, first: Sized, given: Given) -> Sized:
    rank = len(first.shape)
    axis = operation.integer("axis", 1)
    if not -rank <= axis <= rank:
        raise operation.refused(f"axis {axis} does not exist in {rank} dimensions")
    axis += rank if axis < 0 else 0
    return Sized((prod(first.shape[:axis]), prod(first.shape[axis:])), first.type)


def _expand(operation: Operation, first: Sized, given: Given) -> Sized:
    wanted = _values(operation, given, 1)
    if any(size < 0 for size in wanted):
        raise operation.refused(f"the shape {list(wanted)} is not valid")
    shape = _broadcast(operation, [first.shape, wanted])
    values = first.values
    if values is not None and len(values) == 1 and prod(shape) <= MOST_VALUES:
        values *= prod(shape)
    return followed(shape, first.type, values)


def _tile(operation: Operation, first: Sized, given: Given) -> Sized:
    times = _values(operation, given, 1)
    if len(times) != len(first.shape):
        raise operation.refused(f"shape {list(first.shape)} is not repeated {list(times)} times")
    return Sized(tuple(map(int.__mul__, first.shape, times)), first.type)


def _concat(operation: Operation, first: Sized, given: Given) -> Sized:
    arrays = [_input(operation, given, number) for number in range(max(len(given), 1))]
    first = arrays[0]
    axis = _axis(operation, operation.integer("axis", 0), len(first.shape))
    rests = {_without(array.shape, [axis], keep=1) for array in arrays if len(array.shape) > axis}
    if len(rests) > 1 or any(len(array.shape) != len(first.shape) for array in arrays):
        raise operation.refused("shapes do not fit")
    total = sum(array.shape[axis] for array in arrays)
    shape = (*first.shape[:axis], total, *first.shape[axis + 1 :])
    rows = [array.values for array in arrays if array.values is not None]
    known = total <= MOST_VALUES and len(rows) == len(arrays)
    values = [value for row in rows for value in row] if known else None
    return followed(shape, first.type, values)


def _split(operation: Operation, first: Sized, given: Given) -> Made:
    axis = _axis(operation, operation.integer("axis", 0), len(first.shape))
    size = first.shape[axis]
    parts = _optional_values(operation, given, 1)
    if parts is None:
        count = len(operation.outputs)
        if operation.integer("num_outputs", count) != count:
            raise operation.refused("it has not as many outputs as it says")
        each = -(-size // count)
        parts = tuple(max(0, min(each, size - at * each)) for at in range(count))
    if sum(parts) != size or len(parts) != len(operation.outputs):
        raise operation.refused(f"{size} is not cut into {list(parts)}")
    return Made(
        [Sized((*first.shape[:axis], part, *first.shape[axis + 1 :]), first.type) for part in parts]
    )


def _slice(operation: Operation, first: Sized, given: Given) -> Sized:
    rank = len(first.shape)
    starts, ends = (_values(operation, given, number) for number in (1, 2))
    axes = _optional_values(operation, given, 3)
    steps = _optional_values(operation, given, 4)
    places_of = _axes(operation, range(len(starts)) if axes is None else axes, rank)
    steps = (1,) * len(starts) if steps is None else steps
    if not len(starts) == len(ends) == len(places_of) == len(steps) or 0 in steps:
        raise operation.refused("its inputs do not fit each other")
    shape = list(first.shape)
    values = first.values
    for start, end, axis, step in zip(starts, ends, places_of, steps, strict=True):
        size = shape[axis]
        places = _places(start, end, step, size)
        shape[axis] = len(places)
        if values is not None:
            values = tuple(values[at] for at in places)
    return followed(tuple(shape), first.type, values)


def _places(start: int, end: int, step: int, size: int) -> range:
    """Return the indices that a slice selects, with bounds clamped as in ONNX."""
    start, end = (at + size if at < 0 else at for at in (start, end))
    if step > 0:
        return range(min(max(start, 0), size), min(max(end, 0), size), step)
    return range(min(max(start, 0), size - 1), min(max(end, -1), size - 1), step)


def _gather(operation: Operation, first: Sized, given: Given) -> Sized:
    places = _input(operation, given, 1)
    axis = _axis(operation, operation.integer("axis", 0), len(first.shape))
    shape = (*first.shape[:axis], *places.shape, *first.shape[axis + 1 :])
    values = None
    if first.values is not None and places.values is not None:
        count = len(first.values)
        if all(-count <= at < count for at in places.values):
            values = [first.values[at] for at in places.values]
    return followed(shape, first.type, values)


def _gather_nd(operation: Operation, first: Sized, given: Given) -> Sized:
    places = _input(operation, given, 1)
    batch = operation.integer("batch_dims", 0)
    if not places.shape or not 0 <= batch < len(places.shape):
        raise operation.refused("its indices have no last dimension")
    at = batch + places.shape[-1]
    if at > len(first.shape):
        raise operation.refused(f"shape {list(first.shape)} has no {at} axes")
    return Sized((*places.shape[:-1], *first.shape[at:]), first.type)


def _pad(operation: Operation, first: Sized, given: Given) -> Sized:
    pads = _values(operation, given, 1)
    axes = _optional_values(operation, given, 3)
    found = _axes(operation, range(len(first.shape)) if axes is None else axes, len(first.shape))
    if len(pads) != 2 * len(found):
        raise operation.refused(f"{len(pads)} sizes do not pad {len(found)} axes")
    shape = list(first.shape)
    for number, axis in enumerate(found):
        shape[axis] += pads[number] + pads[len(found) + number]
    return Sized(tuple(shape), first.type)


def _range(operation: Operation, first: Sized, given: Given) -> Sized:
    start, limit, step = (_values(operation, given, number) for number in range(3))
    numbers = (*start, *limit, *step)
    if len(numbers) != 3 or not numbers[2] or max(map(abs, numbers)) >= LARGEST_NUMBER:
        raise operation.refused(f"the range {list(numbers)} is not valid")
    found = range(*numbers)
    values = list(found) if len(found) <= MOST_VALUES else None
    return followed((len(found),), first.type, values)


def _top(operation: Operation, first: Sized, given: Given) -> Made:
    count = _values(operation, given, 1)
    axis = _axis(operation, operation.integer("axis", -1), len(first.shape))
    if len(count) != 1:
        raise operation.refused("it says no number of elements")
    shape = (*first.shape[:axis], count[0], *first.shape[axis + 1 :])
    return Made([Sized(shape, first.type), Sized(shape, INT64)], first.nbytes)


_SAME: Final = (
    *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BitwiseNot", "Ceil", "Celu"),
    *("Clip", "Cos", "Cosh", "CumSum", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid"),
    *("HardSwish", "LeakyRelu", "Log", "Mish", "PRelu", "Reciprocal", "Relu", "Round"),
    *("Selu", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus"),
    *("Softsign", "Sqrt", "Tan", "Tanh", "ThresholdedRelu", "Trilu"),
)
_REDUCING: Final = (
    *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean"),
    *("ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare"),
)
_BROADCAST: Final = ("BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Pow", "Sum")

_RULES: Final[Mapping[str, _Rule]] = {
    **dict.fromkeys(_SAME, lambda operation, first, given: Sized(first.shape, first.type)),
    **dict.fromkeys(
        ("IsInf", "IsNaN", "Not"), lambda operation, first, given: Sized(first.shape, BOOL)
    ),
    **dict.fromkeys(_BROADCAST, _arithmetic()),
    **dict.fromkeys(("And", "Or", "Xor"), _comparison()),
    **dict.fromkeys(_REDUCING, _reduced),
    **dict.fromkeys(("ArgMax", "ArgMin"), _arg),
    **dict.fromkeys(("LogSoftmax", "Softmax"), _softmax),
    "Add": _arithmetic(int.__add__),
    "Cast": _cast,
    "CastLike": lambda operation, first, given: Sized(
        first.shape, _input(operation, given, 1).type
    ),
    "Concat": _concat,
    "Conv": _conv,
    "Div": _arithmetic(lambda a, b: a // b if a >= 0 and b > 0 else None),
    "Equal": _comparison(int.__eq__),
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "GatherElements": lambda operation, first, given: Sized(
        _input(operation, given, 1).shape, first.type
    ),
    "GatherND": _gather_nd,
    "Gemm": _gemm,
    "Greater": _comparison(int.__gt__),
    "GreaterOrEqual": _comparison(int.__ge__),
    "Identity": lambda operation, first, given: first,
    "LayerNormalization": _layer_normalization,
    "Less": _comparison(int.__lt__),
    "LessOrEqual": _comparison(int.__le__),
    "MatMul": _matmul,
    "Max": _arithmetic(max),
    "Min": _arithmetic(min),
    "Mod": _arithmetic(lambda a, b: a % b if a >= 0 and b > 0 else None),
    "Mul": _arithmetic(int.__mul__),
    "Neg": lambda operation, first, given: _one_by_one(
        operation, [first], first.type, _exact(lambda a: -a)
    ),
    "Pad": _pad,
    "Range": _range,
    "Reshape": _reshape,
    **dict.fromkeys(
        ("ScatterElements", "ScatterND"),
        lambda operation, first, given: Made(
            [Sized(first.shape, first.type)], _input(operation, given, 1).nbytes
        ),
    ),
    "Shape": _shape,
    "Size": _size,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "Sub": _arithmetic(int.__sub__),
    "Tile": _tile,
    "TopK": _top,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    "Where": _where,
}
