"""The operations of graphs in PyTorch (docs/protocol.md, *Operations*).

Sizes and indices, such as the shape for `Reshape`, are computed on the CPU, so that the host never
waits for an accelerator. If an operation has arrays on both, they are moved to the accelerator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any, Final, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cleave.errors import CleaveError

Attributes: TypeAlias = Mapping[str, Any]
Operation: TypeAlias = Callable[..., Tensor | Sequence[Tensor]]

DTYPES: Final = {
    1: torch.float32,
    2: torch.uint8,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
}
"""Maps ONNX's codes of element types to dtypes."""


class OperationError(CleaveError):
    """An operation has an attribute that is not supported in PyTorch."""


def operation(name: str, attributes: Attributes) -> Operation:
    """Return a function that computes an operation from its input tensors.

    An omitted optional input is None. The function returns a tensor, or several in order.

    Args:
        name: the name in ONNX, such as `MatMul`.

    Raises:
        OperationError: if the operation or an attribute is not supported.
    """
    if (simple := _SIMPLE.get(name)) is not None:
        return simple
    if (built := _BUILT.get(name)) is not None:
        return built(attributes)
    raise OperationError(f"PyTorch does not run the operation {name[:60]} of graphs")


def _numbers(given: Tensor | None) -> list[int] | None:
    return None if given is None else [int(number) for number in given.reshape(-1).tolist()]


def _wrapped(places: Tensor, size: int) -> Tensor:
    """Return indices in which negative numbers count from the end of an axis."""
    return torch.where(places < 0, places + size, places)


# --- without attributes -------------------------------------------------------------------------


def _divided(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    if a.is_floating_point():
        return torch.div(a, b, out=out)
    return torch.div(a, b, rounding_mode="trunc")


def _expanded(x: Tensor, sizes: Tensor) -> Tensor:
    return x.expand(np.broadcast_shapes(tuple(x.shape), tuple(_numbers(sizes) or ())))


def _squeezed(x: Tensor, axes: Tensor | None = None) -> Tensor:
    gone = _numbers(axes)
    return x.squeeze() if gone is None else x.squeeze(tuple(gone))


def _unsqueezed(x: Tensor, axes: Tensor) -> Tensor:
    numbers = _numbers(axes) or []
    rank = x.dim() + len(numbers)
    for axis in sorted(axis % rank for axis in numbers):
        x = x.unsqueeze(axis)
    return x


def _sliced(
    x: Tensor,
    starts: Tensor,
    ends: Tensor,
    axes: Tensor | None = None,
    steps: Tensor | None = None,
) -> Tensor:
    firsts, lasts = _numbers(starts) or [], _numbers(ends) or []
    along = _numbers(axes) or list(range(len(firsts)))
    strides = _numbers(steps) or [1] * len(firsts)
    for first, last, axis, step in zip(firsts, lasts, along, strides, strict=True):
        size = x.shape[axis]
        first, last = (at + size if at < 0 else at for at in (first, last))
        if step > 0:
            first, last = (min(max(at, 0), size) for at in (first, last))
            x = x[(*[slice(None)] * (axis % x.dim()), slice(first, max(first, last), step))]
            continue
        places = range(min(max(first, 0), size - 1), min(max(last, -1), size - 1), step)
        x = x.index_select(axis, torch.tensor([*places], dtype=torch.int64, device=x.device))
    return x


def _range(start: Tensor, limit: Tensor, step: Tensor) -> Tensor:
    return torch.arange(start.item(), limit.item(), step.item(), dtype=start.dtype)


def _of_all(calculate: Callable[[Tensor, Tensor], Tensor]) -> Operation:
    return lambda *given: reduce(calculate, given)


def _clipped(x: Tensor, least: Tensor | None = None, most: Tensor | None = None) -> Tensor:
    return x if least is None and most is None else torch.clamp(x, least, most)


def _relu_gradient(dy: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
    made = torch.empty_like(dy) if out is None else out
    torch.ops.aten.threshold_backward.grad_input(dy, y, 0, grad_input=made)
    return made


_SIMPLE: Final[Mapping[str, Operation]] = {
    **{
        name: getattr(torch, name.lower())
        for name in (
            *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Cos", "Cosh"),
            *("Erf", "Exp", "Floor", "Log", "Neg", "Reciprocal", "Relu", "Round", "Sigmoid"),
            *("Sign", "Sin", "Sinh", "Sqrt", "Tan", "Tanh", "Where", "IsNaN", "MatMul"),
        )
    },
    "Add": torch.add,
    "And": torch.logical_and,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseNot": torch.bitwise_not,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
    "CastLike": lambda x, like: x.to(like.dtype),
    "Clip": _clipped,
    "Div": _divided,
    "Equal": torch.eq,
    "Expand": _expanded,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "HardSwish": F.hardswish,
    "Identity": lambda x: x,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Max": _of_all(torch.maximum),
    "Min": _of_all(torch.minimum),
    "Mish": F.mish,
    "Mul": torch.mul,
    "Not": torch.logical_not,
    "Or": torch.logical_or,
    "PRelu": lambda x, slope: torch.where(x < 0, slope * x, x),
    "Pow": lambda a, b: torch.pow(a, b).to(a.dtype),
    "Range": _range,
    "ReluGradient": _relu_gradient,
    "Size": lambda x: torch.tensor(x.numel()),
    "Slice": _sliced,
    "Softplus": lambda x: F.softplus(x, threshold=80),
    "Softsign": F.softsign,
    "Squeeze": _squeezed,
    "Sub": torch.sub,
    "Sum": _of_all(torch.add),
    "Tile": lambda x, times: x.repeat(_numbers(times) or []),
    "Unsqueeze": _unsqueezed,
    "Xor": torch.logical_xor,
}

# --- with attributes ----------------------------------------------------------------------------


def _reshape(of: Attributes) -> Operation:
    def run(x: Tensor, wanted: Tensor) -> Tensor:
        sizes = _numbers(wanted) or []
        if not of.get("allowzero", 0):
            sizes = [size or x.shape[at] for at, size in enumerate(sizes)]
        return x.reshape(sizes)

    return run


def _flatten(of: Attributes) -> Operation:
    def run(x: Tensor) -> Tensor:
        axis = of.get("axis", 1)
        axis += x.dim() if axis < 0 else 0
        return x.reshape(math.prod(x.shape[:axis]), -1)

    return run


def _transpose(of: Attributes) -> Operation:
    order = of.get("perm")
    return lambda x: x.permute(order or list(range(x.dim()))[::-1])


def _gather(of: Attributes) -> Operation:
    axis = of.get("axis", 0)

    def run(x: Tensor, places: Tensor) -> Tensor:
        at = axis % x.dim()
        found = x.index_select(at, _wrapped(places, x.shape[at]).reshape(-1))
        return found.reshape((*x.shape[:at], *places.shape, *x.shape[at + 1 :]))

    return run


def _gather_elements(of: Attributes) -> Operation:
    axis = of.get("axis", 0)
    return lambda x, places: torch.gather(x, axis, _wrapped(places, x.shape[axis]).long())


def _gather_nd(of: Attributes) -> Operation:
    batch = of.get("batch_dims", 0)

    def run(x: Tensor, places: Tensor) -> Tensor:
        found = [
            torch.arange(size, device=x.device).reshape(
                [-1 if at == axis else 1 for at in range(places.dim() - 1)]
            )
            for axis, size in enumerate(places.shape[:batch])
        ]
        for number, each in enumerate(places.unbind(-1)):
            found.append(_wrapped(each, x.shape[batch + number]))
        return x[tuple(found)]

    return run


_ADDED: Final = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def _scatter_elements(of: Attributes) -> Operation:
    axis, how = of.get("axis", 0), _text(of.get("reduction", "none"))

    def run(x: Tensor, places: Tensor, updates: Tensor) -> Tensor:
        at = _wrapped(places, x.shape[axis]).long()
        if how == "none":
            return x.scatter(axis, at, updates)
        return x.scatter_reduce(axis, at, updates, _ADDED[how], include_self=True)

    return run


def _scatter_nd(of: Attributes) -> Operation:
    how = _text(of.get("reduction", "none"))
    if how not in ("none", "add"):
        raise OperationError(f"PyTorch does not run ScatterND with the reduction {how}")

    def run(x: Tensor, places: Tensor, updates: Tensor) -> Tensor:
        at = tuple(_wrapped(each, x.shape[n]) for n, each in enumerate(places.unbind(-1)))
        return x.index_put(at, updates, accumulate=how == "add")

    return run


def _gemm(of: Attributes) -> Operation:
    alpha, beta = of.get("alpha", 1.0), of.get("beta", 1.0)

    def run(a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
        a = a.T if of.get("transA", 0) else a
        b = b.T if of.get("transB", 0) else b
        product = a @ b
        if alpha != 1.0:
            product = alpha * product
        return product if c is None else product.to(c.dtype) + (c if beta == 1.0 else beta * c)

    return run


def _layer_normalization(of: Attributes) -> Operation:
    axis, epsilon = of.get("axis", -1), of.get("epsilon", 1e-5)

    def run(x: Tensor, scale: Tensor, shift: Tensor | None = None) -> Sequence[Tensor]:
        shape = x.shape[axis % x.dim() :]
        scale = scale.expand(shape)
        shift = None if shift is None else shift.expand(shape)
        return torch.native_layer_norm(x, shape, scale, shift, epsilon)

    return run


def _softmax(of: Attributes) -> Operation:
    axis = of.get("axis", -1)
    return lambda x, out=None: torch.softmax(x, axis, out=_by_row(out, axis))


def _by_row(out: Tensor | None, axis: int) -> Tensor | None:
    """Return the result's memory if PyTorch reads each row before it overwrites that row."""
    is_safe = out is not None and out.device.type == "cpu" and axis in (-1, out.dim() - 1)
    return out if is_safe else None


def _softmax_gradient(of: Attributes) -> Operation:
    axis, calculate = of["axis"], torch.ops.aten._softmax_backward_data.out

    def run(dy: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
        shape = np.broadcast_shapes(tuple(dy.shape), tuple(y.shape))
        dy, y = dy.expand(shape), y.expand(shape)
        if (made := _by_row(out, axis)) is None:
            made = torch.empty(shape, dtype=y.dtype, device=y.device)
        calculate(dy, y, axis, y.dtype, grad_input=made)
        return made

    return run


def _reduced(calculate: Callable[[Tensor, list[int], bool], Tensor], of: Attributes) -> Operation:
    keep, nothing = bool(of.get("keepdims", 1)), bool(of.get("noop_with_empty_axes", 0))

    def run(x: Tensor, axes: Tensor | None = None) -> Tensor:
        along = _numbers(axes)
        if not along:
            if nothing:
                return x
            along = list(range(x.dim()))
        return calculate(x, along, keep).to(x.dtype)

    return run


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted((axis % x.dim() for axis in axes), reverse=True):
        x = x.prod(axis, keepdim=keep)
    return x


_REDUCTIONS: Final[Mapping[str, Callable[[Tensor, list[int], bool], Tensor]]] = {
    "ReduceL1": lambda x, axes, keep: x.abs().sum(axes, keepdim=keep),
    "ReduceL2": lambda x, axes, keep: x.square().sum(axes, keepdim=keep).sqrt(),
    "ReduceLogSum": lambda x, axes, keep: x.sum(axes, keepdim=keep).log(),
    "ReduceLogSumExp": lambda x, axes, keep: torch.logsumexp(x, axes, keepdim=keep),
    "ReduceMax": lambda x, axes, keep: torch.amax(x, axes, keepdim=keep),
    "ReduceMean": lambda x, axes, keep: x.mean(axes, keepdim=keep),
    "ReduceMin": lambda x, axes, keep: torch.amin(x, axes, keepdim=keep),
    "ReduceProd": _product,
    "ReduceSum": lambda x, axes, keep: x.sum(axes, keepdim=keep),
    "ReduceSumSquare": lambda x, axes, keep: x.square().sum(axes, keepdim=keep),
}


def _arg(calculate: Callable[..., Tensor], of: Attributes) -> Operation:
    axis, keep = of.get("axis", 0), bool(of.get("keepdims", 1))

    def run(x: Tensor) -> Tensor:
        if not of.get("select_last_index", 0):
            return calculate(x, axis, keepdim=keep)
        return x.shape[axis] - 1 - calculate(x.flip(axis), axis, keepdim=keep)

    return run


def _cumulated(of: Attributes) -> Operation:
    back, exclusive = of.get("reverse", 0), of.get("exclusive", 0)

    def run(x: Tensor, axis: Tensor) -> Tensor:
        along = int(axis.item())
        x = x.flip(along) if back else x
        found = x.cumsum(along, dtype=x.dtype)
        found = found - x if exclusive else found
        return found.flip(along) if back else found

    return run


def _padded(of: Attributes) -> Operation:
    if (mode := _text(of.get("mode", "constant"))) != "constant":
        raise OperationError(f"PyTorch does not run Pad with the mode {mode}")

    def run(
        x: Tensor, pads: Tensor, value: Tensor | None = None, axes: Tensor | None = None
    ) -> Tensor:
        sizes = _numbers(pads) or []
        along = _numbers(axes) or list(range(x.dim()))
        each = [0] * 2 * x.dim()  # the last axis first, as in PyTorch
        for number, axis in enumerate(along):
            at = 2 * (x.dim() - 1 - axis % x.dim())
            each[at], each[at + 1] = sizes[number], sizes[len(along) + number]
        return F.pad(x, each, value=0 if value is None else value.item())

    return run


def _split(of: Attributes) -> Operation:
    axis = of.get("axis", 0)

    def run(x: Tensor, parts: Tensor | None = None) -> Sequence[Tensor]:
        sizes = _numbers(parts)
        if sizes is None:
            size, count = x.shape[axis], of["outputs"]
            each = -(-size // count)
            sizes = [max(0, min(each, size - at * each)) for at in range(count)]
        return torch.split(x, sizes, axis)

    return run


def _top(of: Attributes) -> Operation:
    axis, largest = of.get("axis", -1), bool(of.get("largest", 1))
    ordered = bool(of.get("sorted", 1))
    return lambda x, count: x.topk(int(count.item()), axis, largest, ordered)


def _triangle(of: Attributes) -> Operation:
    cut = torch.triu if of.get("upper", 1) else torch.tril
    return lambda x, k=None: cut(x, 0 if k is None else int(k.item()))


def _shape(of: Attributes) -> Operation:
    return lambda x: torch.tensor(x.shape[of.get("start", 0) : of.get("end")], dtype=torch.int64)


def _filled(of: Attributes) -> Operation:
    value = of.get("value")
    one = torch.zeros(1) if value is None else value.reshape(-1)
    return lambda shape: torch.full(_numbers(shape) or [], one.item(), dtype=one.dtype)


def _constant(of: Attributes) -> Operation:
    (value,) = (of[name] for name in of if name.startswith("value"))
    if not isinstance(value, Tensor):
        dtype = torch.float32 if isinstance(value, float) else torch.int64
        if isinstance(value, list) and value and isinstance(value[0], float):
            dtype = torch.float32
        value = torch.tensor(value, dtype=dtype)
    return lambda: value.clone()  # a later operation may overwrite it


def _shifted(of: Attributes) -> Operation:
    left = _text(of.get("direction", "")) == "LEFT"
    return torch.bitwise_left_shift if left else torch.bitwise_right_shift


def _infinite(of: Attributes) -> Operation:
    down, up = of.get("detect_negative", 1), of.get("detect_positive", 1)

    def run(x: Tensor) -> Tensor:
        return (torch.isneginf(x) & bool(down)) | (torch.isposinf(x) & bool(up))

    return run


def _convolved(of: Attributes) -> Operation:
    if _text(of.get("auto_pad", "NOTSET")) != "NOTSET":
        raise OperationError("PyTorch does not run Conv with automatic padding")

    def run(x: Tensor, w: Tensor, shift: Tensor | None = None) -> Tensor:
        rank = x.dim() - 2
        pads = of.get("pads", [0] * 2 * rank)
        both = [pads[at + rank * end] for at in range(rank)[::-1] for end in (0, 1)]
        calculate = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[rank]
        strides, gaps = of.get("strides", [1] * rank), of.get("dilations", [1] * rank)
        return calculate(F.pad(x, both), w, shift, strides, 0, gaps, of.get("group", 1))

    return run


def _selu(of: Attributes) -> Operation:
    alpha, gamma = of.get("alpha", 1.67326319217681884765625), of.get("gamma", 1.0507009873554805)
    return lambda x: gamma * F.elu(x, alpha)


def _random_like(of: Attributes) -> Operation:
    low, high = of.get("low", 0.0), of.get("high", 1.0)
    made: list[torch.Generator] = []  # its own, so that the process's random numbers stay the same

    def run(x: Tensor) -> Tensor:
        if not made:
            made.append(torch.Generator(x.device))
            made[0].seed()
        return torch.empty_like(x).uniform_(low, high, generator=made[0])

    return run


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


_BUILT: Final[Mapping[str, Callable[[Attributes], Operation]]] = {
    "ArgMax": partial(_arg, torch.argmax),
    "ArgMin": partial(_arg, torch.argmin),
    "BitShift": _shifted,
    "Cast": lambda of: lambda x: x.to(DTYPES[of["to"]]),
    "Celu": lambda of: partial(F.celu, alpha=of.get("alpha", 1.0)),
    "Concat": lambda of: lambda *given: torch.cat(given, of["axis"]),
    "Constant": _constant,
    "ConstantOfShape": _filled,
    "Conv": _convolved,
    "CumSum": _cumulated,
    "Einsum": lambda of: partial(torch.einsum, _text(of["equation"])),
    "Elu": lambda of: partial(F.elu, alpha=of.get("alpha", 1.0)),
    "Flatten": _flatten,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Gelu": lambda of: partial(F.gelu, approximate=_text(of.get("approximate", "none"))),
    "Gemm": _gemm,
    "HardSigmoid": lambda of: (
        lambda x: torch.clamp(of.get("alpha", 0.2) * x + of.get("beta", 0.5), 0, 1)
    ),
    "IsInf": _infinite,
    "LayerNormalization": _layer_normalization,
    "LeakyRelu": lambda of: partial(F.leaky_relu, negative_slope=of.get("alpha", 0.01)),
    "LogSoftmax": lambda of: lambda x: torch.log_softmax(x, of.get("axis", -1)),
    "Mod": lambda of: torch.fmod if of.get("fmod", 0) else torch.remainder,
    "Pad": _padded,
    "RandomUniformLike": _random_like,  # only the PS's own graphs may have it
    "Reshape": _reshape,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "Selu": _selu,
    "Shape": _shape,
    "Softmax": _softmax,
    "SoftmaxGradient": _softmax_gradient,
    "Split": _split,
    "ThresholdedRelu": lambda of: lambda x: torch.where(x > of.get("alpha", 1.0), x, 0),
    "TopK": _top,
    "Transpose": _transpose,
    "Trilu": _triangle,
    **{name: partial(_reduced, calculate) for name, calculate in _REDUCTIONS.items()},
}
