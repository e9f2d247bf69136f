"""Offloading of transformers' mixture-of-experts modules.

The weights of all experts are slices of 3-D parameters. The eager forward pass of such a module
multiplies by the slice of one expert after another, with `F.linear` or `@`. An offloaded module
runs the eager forward pass, and sends these matrix multiplications to the fleet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cleave.errors import UsageError

_DIMENSIONS: Final = 3  # experts, outputs, inputs
_PRODUCTS: Final = (torch.matmul, Tensor.matmul, Tensor.__matmul__)

Product = Callable[[Tensor, Tensor, "Tensor | None", bool], Tensor]
"""Function of x, weight, bias and `transposed` that computes a linear layer on the fleet.

The weight has shape (in, out) if `transposed` is True, else shape (out, in). The bias may be None.
"""


def auxiliary_weight(model: nn.Module) -> float:
    """Return the weight of a mixture-of-experts model's load-balancing loss.

    The weight is 0 if the model does not use this loss. A model of transformers uses it if the
    configuration sets `output_router_logits`.

    Raises:
        UsageError: the configuration sets `output_router_logits`, but the model has no attribute
            with the weight.
    """
    config: Any = getattr(model, "config", None)
    if not getattr(config, "output_router_logits", False):
        return 0.0
    for name in ("router_aux_loss_coef", "aux_loss_coef"):
        if (weight := getattr(model, name, None)) is not None:
            return float(weight)
    raise UsageError(
        f"the config asks for the auxiliary loss of experts (output_router_logits), whose weight "
        f"{type(model).__name__} does not name; set output_router_logits to false to train without"
    )


def are_experts(module: nn.Module) -> bool:
    """Return whether a module is a mixture-of-experts module that can be offloaded."""
    own = module.parameters(recurse=False)
    forward = type(module).forward
    return any(p.dim() == _DIMENSIONS for p in own) and hasattr(forward, "__wrapped__")


class _Products(TorchFunctionMode):
    """Redirects multiplications by expert weights to a fleet while the mode is active.

    Args:
        parameters: 3-D parameters whose slices are the expert weights.
        product: computes a linear layer on the fleet.
    """

    def __init__(self, parameters: Sequence[Tensor], product: Product) -> None:
        super().__init__()
        self._parameters = {id(p) for p in parameters}
        self._product = product

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
            return self._product(x, weight, bias[0] if bias else None, False)
        if func in _PRODUCTS and not given and self._is_expert(args[1]):
            return self._product(args[0], args[1], None, True)
        return func(*args, **given)

    def _is_expert(self, weight: Tensor) -> bool:
        return weight.dim() == _DIMENSIONS - 1 and id(weight._base) in self._parameters


def offloaded_experts(base: type[nn.Module], product: Callable[..., Tensor]) -> type[nn.Module]:
    """Return a subclass of a mixture-of-experts class that multiplies on a fleet.

    Args:
        base: original class of the module.
        product: function that computes a linear layer. The arguments of the function are the
            module, x, weight, bias, and whether the weight has shape (in, out).
    """
    eager: Callable[..., Any] = base.forward.__wrapped__  # type: ignore[attr-defined]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
            return product(self, x, weight, bias, transposed)

        with _Products(list(self.parameters(recurse=False)), multiply):
            return eager(self, *args, **kwargs)

    name = f"Offloaded{base.__name__}"
    return type(name, (base,), {"forward": forward, "__doc__": "Experts on a fleet."})
