"""Linear layers whose multiplications run on a fleet.

`offload` changes the `nn.Linear` layers (and transformers' `Conv1D`) of a model into offloaded ones
in place: the module objects and parameters stay the same, and the class becomes a subclass whose
forward and backward send their three GEMMs (forward, input gradient, weight gradient) to a fleet.
`restore` changes them back.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cleave import arrays
from cleave.errors import UsageError
from cleave.fleet.fleet import Fleet
from cleave.fleet.product import Multiplier, Operand, Pending, Side
from cleave.planner.methods import Method

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ATTRIBUTE = "_cleave_operand"


class _Operands:
    """Gives tensors their operands, one to a tensor that is used twice.

    An operand must live as long as its tensor's values may be needed again, and no longer, or
    activation checkpointing would save nothing. An activation (a tensor with a `grad_fn`) holds its
    operand itself. A leaf (a weight, an input) may be changed through `.data` or numpy without
    autograd's knowledge, so its operand lives only from a layer's forward to its backward.
    """

    def __init__(self, fleet: Multiplier) -> None:
        self.fleet = fleet
        self.held: list[Operand] = []  # of weights, across accumulated micro-batches
        self.holding = False
        self._leaves: weakref.WeakValueDictionary[tuple[Any, ...], Operand] = (
            weakref.WeakValueDictionary()
        )

    def of(self, tensor: Tensor) -> Operand:
        """Return the operand of a tensor, whose leading dimensions become rows."""
        if tensor.is_inference():  # has no version to tell changes by
            return self._new(tensor)
        version = tensor._version
        if tensor.grad_fn is not None:
            known: tuple[int, Operand] | None = getattr(tensor, _ATTRIBUTE, None)
            if known is not None and known[0] == version:
                return known[1]
            operand = self._new(tensor)
            setattr(tensor, _ATTRIBUTE, (version, operand))
            return operand
        key = (tensor.data_ptr(), version, tuple(tensor.shape), tensor.stride(), tensor.dtype)
        leaf = self._leaves.get(key)
        if leaf is None:
            leaf = self._leaves[key] = self._new(tensor)
            if self.holding and isinstance(tensor, nn.Parameter):
                self.held.append(leaf)
        return leaf

    def _new(self, tensor: Tensor) -> Operand:
        """Make an operand of a tensor's memory, without copying."""
        return self.fleet.operand(arrays.from_torch(tensor.detach().reshape(-1, tensor.shape[-1])))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Operands:
        return self  # a copied model multiplies on the same fleet

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError(
            "an offloaded model cannot be pickled; call cleave.restore(model) first, "
            "or save model.state_dict()"
        )


class _LinearFunction(torch.autograd.Function):
    """Computes y = x @ W^T + bias, or x @ W + bias, with all three GEMMs on the fleet."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        operands: _Operands,
        weight_transposed: bool,
    ) -> Tensor:
        """Return y; the fleet fills its memory."""
        x_operand, w_operand = operands.of(x), operands.of(weight)
        width = weight.shape[1] if weight_transposed else weight.shape[0]
        y = torch.empty(x.numel() // max(1, x.shape[-1]), width, dtype=x.dtype)
        if x.shape[-1] == 0:
            y = torch.zeros(x.shape[:-1].numel(), width, dtype=x.dtype)
        else:
            _multiply(
                operands.fleet, Side(x_operand), Side(w_operand, not weight_transposed), y
            ).result()
        if bias is not None:
            y += bias
        ctx.save_for_backward(x, weight)
        ctx.operands, ctx.weight_transposed, ctx.has_bias = (
            operands,
            weight_transposed,
            bias is not None,
        )
        # Leaves have no other owner of their operands until backward; see `_Operands`.
        ctx.leaves = [
            operand
            for tensor, operand in ((x, x_operand), (weight, w_operand))
            if tensor.grad_fn is None
        ]
        return y.view(*x.shape[:-1], width)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients; the fleet fills the memory of those of x and the weight."""
        (dy,) = grads
        x, weight = ctx.saved_tensors
        operands: _Operands = ctx.operands
        need_x, need_w, need_bias, *_ = ctx.needs_input_grad
        dy2 = dy.reshape(-1, dy.shape[-1])
        dx = dw = dbias = None
        futures = []
        if dy2.shape[0] == 0 or 0 in weight.shape:
            dx = torch.zeros_like(x) if need_x else None
            dw = torch.zeros_like(weight) if need_w else None
        else:
            x_side, w_side = Side(operands.of(x)), Side(operands.of(weight), ctx.weight_transposed)
            dy_operand = operands.fleet.operand(arrays.from_torch(dy2))
            # Both are in flight before either is waited for.
            if need_x:
                dx = torch.empty(x.shape, dtype=x.dtype)
                dx2 = dx.view(-1, x.shape[-1])
                futures.append(_multiply(operands.fleet, Side(dy_operand), w_side, dx2))
            if need_w:
                dw = torch.empty(weight.shape, dtype=weight.dtype)
                x_turned, dy_turned = Side(x_side.operand, True), Side(dy_operand, True)
                left, right = (
                    (x_turned, Side(dy_operand)) if ctx.weight_transposed else (dy_turned, x_side)
                )
                futures.append(_multiply(operands.fleet, left, right, dw))
            # The PS has this to do while the fleet multiplies.
            dbias = dy2.sum(0) if ctx.has_bias and need_bias else None
            for future in futures:
                future.result()
        if dbias is None and ctx.has_bias and need_bias:
            dbias = dy2.sum(0)
        ctx.leaves = None
        return dx, dw, dbias, None, None


def _multiply(fleet: Multiplier, a: Side, b: Side, out: Tensor) -> Pending:
    """Start out = a @ b; blocks are written into `out`'s own memory."""
    return fleet.submit(a, b, arrays.from_torch(out))


def _product(
    module: Any, x: Tensor, weight: Tensor, bias: Tensor | None, weight_transposed: bool
) -> Tensor:
    """Cast for autocast, check dtypes, and return y."""
    if torch.is_autocast_enabled("cpu"):  # as F.linear is cast under autocast
        dtype = torch.get_autocast_dtype("cpu")
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if x.dtype not in _DTYPES or x.dtype is not weight.dtype:
        raise UsageError(
            f"an offloaded layer got {x.dtype} input for {weight.dtype} weights; "
            f"use float32, bfloat16 or float16 for both"
        )
    y: Tensor = _LinearFunction.apply(x, weight, bias, module._cleave, weight_transposed)  # type: ignore[no-untyped-call]
    return y


class OffloadedLinear(nn.Linear):
    """Multiplies on a fleet what an `nn.Linear` multiplies here."""

    _cleave: _Operands

    def forward(self, input: Tensor) -> Tensor:
        """Return y of shape (..., out_features) for an input of shape (..., in_features)."""
        return _product(self, input, self.weight, self.bias, weight_transposed=False)


def _conv1d() -> type[nn.Module] | None:
    """Return transformers' Conv1D (GPT-2's linear layer, with a weight (in, out)), or None."""
    try:
        from transformers.pytorch_utils import Conv1D
    except ImportError:
        return None
    cls: type[nn.Module] = Conv1D
    return cls


def _offloaded_conv1d(base: type[nn.Module]) -> type[nn.Module]:
    """Return the class that transformers' Conv1D layers get."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return _product(self, x, self.weight, self.bias, weight_transposed=True)

    return type("OffloadedConv1D", (base,), {"forward": forward, "__doc__": "Conv1D on a fleet."})


def offload(
    model: nn.Module, fleet: Multiplier, *, method: str = "tiles", audit: float = 0.05
) -> nn.Module:
    """Send a model's linear layers, or whole layers, to a fleet from now on.

    By tiles, every `nn.Linear` and transformers `Conv1D` in `model` is changed in place: same
    object, same parameters, hooks and state dict. The caller's loop, optimizer and autocast work as
    before. Subclasses of these layers keep their own forward.

    By stages, the `forward` of a causal language model of transformers is replaced: devices do the
    forward and backward passes of its layers, and this process the rest. Each forward pass must be
    followed by its backward pass before the next one, and each backward pass brings all gradients.

    Args:
        model: on the CPU, with float32, bfloat16 or float16 weights; by stages with float32 ones,
            and under autocast numbers travel in bfloat16.
        fleet: from `cleave.emulated`, or that of a server from `cleave.serve`.
        method: `tiles` or `stages`.
        audit: by stages, the chance that a device's part of a step is computed again here.

    Returns:
        `model` itself.

    Raises:
        UsageError: when the model has no such layer, is offloaded already, is not on the CPU, or
            has weights of another dtype.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"offload takes a torch module, not {_kind(model)}, as its first argument")
    if not callable(getattr(fleet, "submit", None)):
        server = hasattr(fleet, "fleet")
        advice = "give server.fleet" if server else "give cleave.emulated(8), or server.fleet"
        raise UsageError(f"the second argument of offload is {_kind(fleet)}, no fleet: {advice}")
    if not 0 <= audit <= 1:
        raise UsageError(f"audit is {audit}; give a chance, from 0 to 1")
    if method not in (Method.TILES.value, Method.STAGES.value):
        raise UsageError(f"method is {method!r}; use 'tiles' or 'stages'")
    if method == Method.STAGES.value:
        return _offload_by_stages(model, fleet, audit)
    conv1d = _conv1d()
    found: list[nn.Module] = []
    for name, module in model.named_modules():
        if hasattr(module, "_cleave"):
            raise UsageError(
                f"layer {name!r} is offloaded already; call cleave.restore(model) first"
            )
        if type(module) is nn.Linear or (conv1d is not None and type(module) is conv1d):
            weight = module.weight
            if not isinstance(weight, Tensor) or weight.device.type != "cpu":
                raise UsageError(
                    f"layer {name!r} lies on {getattr(weight, 'device', 'no device')}; the "
                    f"parameter server keeps the model in host memory: call model.to('cpu') first"
                )
            if weight.dtype not in _DTYPES:
                raise UsageError(
                    f"layer {name!r} has {weight.dtype} weights; use float32, bfloat16 or float16"
                )
            found.append(module)
    if not found:
        raise UsageError(f"{type(model).__name__} has no nn.Linear or Conv1D layer to offload")
    operands = _Operands(fleet)
    turned = None if conv1d is None else _offloaded_conv1d(conv1d)
    for module in found:
        object.__setattr__(module, "_cleave", operands)
        module.__class__ = OffloadedLinear if type(module) is nn.Linear else turned or nn.Module
    return model


def _kind(value: object) -> str:
    """Say in words what kind of object a value is."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def _offload_by_stages(model: nn.Module, fleet: Multiplier, audit: float) -> nn.Module:
    """Replace a model's forward by one that goes by stages."""
    from cleave.training.staged_forward import StagedForward  # with ONNX and transformers

    if isinstance(vars(model).get("forward"), StagedForward):
        raise UsageError("the model is offloaded already; call cleave.restore(model) first")
    if not isinstance(fleet, Fleet):
        raise UsageError(f"stages need a fleet of devices, not a {type(fleet).__name__}")
    vars(model)["forward"] = StagedForward(model, fleet, audit)
    return model


@contextmanager
def offloaded(
    model: nn.Module, fleet: Multiplier, *, method: str = "tiles", audit: float = 0.05
) -> Iterator[nn.Module]:
    """Offload a model in a `with` block, and make it a plain one again at its end.

    Args:
        model, fleet, method, audit: see `offload`.

    Raises:
        UsageError: see `offload`.
    """
    offload(model, fleet, method=method, audit=audit)
    try:
        yield model
    finally:
        restore(model)


def restore(model: nn.Module) -> nn.Module:
    """Change an offloaded model back into a plain one.

    Returns:
        `model` itself; a model that is not offloaded is returned unchanged.
    """
    if (staged := getattr(vars(model).get("forward"), "close", None)) is not None:
        staged()
        del vars(model)["forward"]
    for module in model.modules():
        if "_cleave" in module.__dict__:
            object.__delattr__(module, "_cleave")
            module.__class__ = type(module).__mro__[1]
    return model


class hold_weights:  # noqa: N801 - reads as a statement
    """Lets devices keep the weights sent to them, in a context for accumulated micro-batches.

    The weights must not change in it: leave it before the optimizer steps.
    """

    def __init__(self, model: nn.Module) -> None:
        self._sets: set[_Operands] = {
            module.__dict__["_cleave"] for module in model.modules() if "_cleave" in module.__dict__
        }

    def __enter__(self) -> None:
        for operands in self._sets:
            operands.holding = True

    def __exit__(self, *_: object) -> None:
        for operands in self._sets:
            operands.holding = False
            operands.held.clear()
