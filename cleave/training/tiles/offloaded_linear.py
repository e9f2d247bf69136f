"""Linear layers and mixture-of-experts modules whose matrix multiplications run on a fleet."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cleave import arrays
from cleave.arrays import Buffer
from cleave.errors import UsageError
from cleave.fleet.product import Multiplier, Operand, Pending, Side
from cleave.graphs.model_state import content

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ATTRIBUTE = "_cleave_operand"
_UNSUPPORTED: Final = (
    "is not supported by offloaded layers, only backward passes are; call cleave.restore(model) "
    "first, or exclude these layers with exclude"
)


class Operands:
    """Cache of a fleet's operands by tensor. Several uses of a tensor share one operand.

    An operand must be freed as soon as its tensor's values are no longer needed. Otherwise,
    activation checkpointing would save no memory. An activation (a tensor with a `grad_fn`) holds a
    reference to its operand, so both are freed together. A leaf tensor (a weight or model input)
    may change through `.data` or numpy without autograd's knowledge. So the operand of a leaf
    exists only from a layer's forward pass to the layer's backward pass.

    A weight that is gathered for each pass gets different memory in every pass. Its operand belongs
    to the parameter, and exists until the next weight update; see `bind`.

    Args:
        fleet: computes the GEMMs.
        min_flops: GEMMs with fewer floating-point operations run locally.
    """

    def __init__(self, fleet: Multiplier, min_flops: float = 0.0) -> None:
        self.fleet, self.min_flops = fleet, min_flops
        # References that make devices retain weights during gradient accumulation.
        self.held: list[Operand] = []
        self.holding = False
        self._leaves: weakref.WeakValueDictionary[tuple[Any, ...], Operand] = (
            weakref.WeakValueDictionary()
        )
        self._whole: dict[int, nn.Parameter] = {}  # gathered weights, by current memory address
        self._gathered: weakref.WeakValueDictionary[int, Operand] = (  # by `id` of the parameter
            weakref.WeakValueDictionary()
        )

    def bind(self, weight: nn.Parameter) -> None:
        """Record that a weight was gathered into new memory, and bind its operand to the memory."""
        self._whole[weight.data_ptr()] = weight
        if (operand := self._gathered.get(id(weight))) is not None:
            operand.bind(self._view(weight))

    def unbind(self, weight: nn.Parameter, *, done: bool) -> None:
        """Record that the memory of a gathered weight is about to be freed.

        Args:
            done: whether all GEMMs with the weight are complete. A running GEMM keeps a reference
                to the memory.
        """
        self._whole.pop(weight.data_ptr(), None)  # empty weights share one address
        operand = self._gathered.get(id(weight))
        if operand is None:
            return
        if done:
            operand.unbind()
        else:
            del self._gathered[id(weight)]

    def updated(self) -> None:
        """Discard the operands of gathered weights, because the optimizer changed the weights."""
        self._gathered.clear()

    def of(self, tensor: Tensor) -> Operand:
        """Flatten a tensor to a matrix with the same last dimension, and return its operand."""
        if tensor.is_inference():  # inference tensors have no version counter
            return self._new(tensor)
        version = tensor._version
        if tensor.grad_fn is not None:
            known: tuple[int, Operand] | None = getattr(tensor, _ATTRIBUTE, None)
            if known is not None and known[0] == version:
                return known[1]
            operand = self._new(tensor)
            setattr(tensor, _ATTRIBUTE, (version, operand))
            return operand
        place = tensor.data_ptr(), tuple(tensor.shape), tensor.stride()
        weight = self._whole.get(tensor.data_ptr())
        if weight is not None and place[1:] == (tuple(weight.shape), weight.stride()):
            return self._of_gathered(weight)
        # With `holding`, an operand may outlive the backward pass. So the key includes the values.
        key = (*place, version, tensor.dtype, content(tensor) if self.holding else b"")
        leaf = self._leaves.get(key)
        if leaf is None:
            leaf = self._leaves[key] = self._new(tensor)
            if self.holding and isinstance(tensor, nn.Parameter):
                self.held.append(leaf)
        return leaf

    def _of_gathered(self, weight: nn.Parameter) -> Operand:
        operand = self._gathered.get(id(weight))
        if operand is None:
            operand = self._gathered[id(weight)] = self._new(weight)
            if self.holding:
                self.held.append(operand)
        return operand

    def _new(self, tensor: Tensor) -> Operand:
        """Create an operand that shares the tensor's memory."""
        return self.fleet.operand(self._view(tensor))

    @staticmethod
    def _view(tensor: Tensor) -> Buffer:
        return arrays.from_torch(tensor.detach().reshape(-1, tensor.shape[-1]))

    def __deepcopy__(self, memo: dict[int, Any]) -> Operands:
        return self  # a copied model multiplies on the same fleet

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError(
            "an offloaded model cannot be pickled; call cleave.restore(model) first, "
            "or save model.state_dict()"
        )


class _LinearFunction(torch.autograd.Function):
    """Autograd function x @ W^T + bias, or x @ W + bias, with all three GEMMs on the fleet."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        operands: Operands,
        weight_transposed: bool,
    ) -> Tensor:
        """Return the output y. The fleet writes blocks directly into the memory of y."""
        x_operand, w_operand = operands.of(x), operands.of(weight)
        width = weight.shape[1] if weight_transposed else weight.shape[0]
        # y must not be a view, as autograd forbids in-place changes of returned views.
        y = torch.empty(*x.shape[:-1], width, dtype=x.dtype)
        if x.shape[-1] == 0:
            y.zero_()
        else:
            w_side = Side(w_operand, not weight_transposed)
            _multiply(operands.fleet, Side(x_operand), w_side, y.view(-1, width)).result()
        if bias is not None:
            y += bias
        ctx.save_for_backward(x, weight)
        ctx.operands, ctx.weight_transposed = operands, weight_transposed
        ctx.has_bias = bias is not None
        # Only these references keep the operands of leaf tensors alive until the backward pass.
        pairs = (x, x_operand), (weight, w_operand)
        ctx.leaves = [operand for tensor, operand in pairs if tensor.grad_fn is None]
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of each argument of `forward`; None if a gradient is not needed."""
        (dy,) = grads
        x, weight = ctx.saved_tensors
        operands: Operands = ctx.operands
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
            # Submit both GEMMs before waiting, so that they run concurrently.
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
            # The PS computes the bias gradient while the fleet multiplies.
            dbias = dy2.sum(0) if ctx.has_bias and need_bias else None
            for future in futures:
                future.result()
        if dbias is None and ctx.has_bias and need_bias:
            dbias = dy2.sum(0)
        ctx.leaves = None
        return dx, dw, dbias, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Raise UsageError, because forward-mode differentiation is not supported."""
        raise UsageError(f"forward-mode AD {_UNSUPPORTED}")


def _multiply(fleet: Multiplier, a: Side, b: Side, out: Tensor) -> Pending:
    """Start computing out = a @ b on the fleet, which writes into the memory of `out`."""
    return fleet.submit(a, b, arrays.from_torch(out))


def product(
    module: Any, x: Tensor, weight: Tensor, bias: Tensor | None, weight_transposed: bool
) -> Tensor:
    """Compute a linear layer whose GEMMs run on the fleet.

    GEMMs smaller than `min_flops` run locally. Under autocast, x, weight and bias are cast first.

    Args:
        module: an offloaded module.
        x: input, shape (..., in).
        weight: shape (out, in); shape (in, out) if `weight_transposed`.
        bias: shape (out,).

    Returns:
        x @ W^T + bias; x @ W + bias if `weight_transposed`. The shape is (..., out).
    """
    # A compiled graph cannot contain calls of the fleet, so this causes a graph break.
    if torch.compiler.is_compiling():
        outside: Callable[..., Tensor] = torch.compiler.disable(_product)  # type: ignore[no-untyped-call]
        return outside(module, x, weight, bias, weight_transposed)
    return _product(module, x, weight, bias, weight_transposed)


def _product(
    module: Any, x: Tensor, weight: Tensor, bias: Tensor | None, weight_transposed: bool
) -> Tensor:
    operands: Operands = module._cleave
    if 2 * x.numel() * weight.shape[1 if weight_transposed else 0] < operands.min_flops:
        return nn.functional.linear(x, weight.T if weight_transposed else weight, bias)
    if torch.is_autocast_enabled("cpu"):  # autocast casts the arguments of F.linear, too
        dtype = torch.get_autocast_dtype("cpu")
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if x.dtype not in DTYPES or x.dtype is not weight.dtype:
        raise UsageError(
            f"an offloaded layer got {x.dtype} input for {weight.dtype} weights; "
            f"use float32, bfloat16 or float16 for both"
        )
    try:
        y: Tensor = _LinearFunction.apply(x, weight, bias, operands, weight_transposed)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if "functorch" in str(error):
            raise UsageError(f"torch.func {_UNSUPPORTED}") from error
        raise
    return y


class OffloadedLinear(nn.Linear):
    """An `nn.Linear` whose GEMMs run on a fleet."""

    _cleave: Operands

    def forward(self, input: Tensor) -> Tensor:
        """Map an input of shape (..., in_features) to an output of shape (..., out_features)."""
        return product(self, input, self.weight, self.bias, weight_transposed=False)


def conv1d() -> type[nn.Module] | None:
    """Return transformers' `Conv1D` class (for GPT-2); None if transformers is not installed."""
    try:
        from transformers.pytorch_utils import Conv1D
    except ImportError:
        return None
    cls: type[nn.Module] = Conv1D
    return cls


def offloaded_conv1d(base: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of Conv1D whose GEMMs run on a fleet. The weight has shape (in, out)."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return product(self, x, self.weight, self.bias, weight_transposed=True)

    return type("OffloadedConv1D", (base,), {"forward": forward, "__doc__": "Conv1D on a fleet."})


_DIMENSIONS: Final = 3  # experts, outputs, inputs
_PRODUCTS: Final = (torch.matmul, Tensor.matmul, Tensor.__matmul__)


def auxiliary_weight(model: nn.Module) -> float:
    """Return the coefficient of a mixture-of-experts model's load-balancing loss; 0 if unused.

    Raises:
        UsageError: if the configuration sets `output_router_logits` without a coefficient.
    """
    config: Any = getattr(model, "config", None)
    if not getattr(config, "output_router_logits", False):
        return 0.0
    for name in ("router_aux_loss_coef", "aux_loss_coef"):
        if (weight := getattr(model, name, None)) is not None:
            return float(weight)
    raise UsageError(
        f"the config enables the auxiliary loss of mixtures of experts (output_router_logits), "
        f"but {type(model).__name__} has no coefficient for it; set output_router_logits to false"
    )


def are_experts(module: nn.Module) -> bool:
    """Return True if a module is a mixture-of-experts module that can be offloaded."""
    own = module.parameters(recurse=False)
    forward = type(module).forward
    return any(p.dim() == _DIMENSIONS for p in own) and hasattr(forward, "__wrapped__")


class _Products(TorchFunctionMode):
    """Torch function mode that calls `product` for multiplications by slices of parameters.

    `module` is the offloaded mixture-of-experts module that owns the parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        self._parameters = {id(p) for p in module.parameters(recurse=False)}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func is nn.functional.linear and not given and self._is_expert(args[1]):
            x, weight, *bias = args
            return product(self._module, x, weight, bias[0] if bias else None, False)
        if func in _PRODUCTS and not given and self._is_expert(args[1]):
            return product(self._module, args[0], args[1], None, True)
        return func(*args, **given)

    def _is_expert(self, weight: Tensor) -> bool:
        return weight.dim() == _DIMENSIONS - 1 and id(weight._base) in self._parameters


def offloaded_experts(base: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a mixture-of-experts class whose GEMMs run on a fleet.

    The weights of all experts are slices of 3-D parameters. The eager forward pass multiplies by
    one expert's slice after another, with `F.linear` or `@`.
    """
    eager: Callable[..., Any] = base.forward.__wrapped__  # type: ignore[attr-defined]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _Products(self):
            return eager(self, *args, **kwargs)

    name = f"Offloaded{base.__name__}"
    return type(name, (base,), {"forward": forward, "__doc__": "Experts on a fleet."})
