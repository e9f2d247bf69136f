"""Selection of the modules that run on a fleet, and the reason why each other module is local."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn

from cleave.errors import UsageError
from cleave.planner.plan import Method
from cleave.training.lora.quantized import QuantizedLinear
from cleave.training.tiles.experts import are_experts, offloaded_experts
from cleave.training.tiles.offload_report import OffloadReport, Stayed
from cleave.training.tiles.offloaded_linear import (
    DTYPES,
    OffloadedLinear,
    conv1d,
    offloaded_conv1d,
    product,
)


class OffloadChoice:
    """Selects the modules of a model to offload, and reports why other modules stay local.

    Args:
        model: the model.
        include, exclude: patterns for module names; see `cleave.training.tiles.offload.offload`.
    """

    def __init__(self, model: nn.Module, include: Sequence[str], exclude: Sequence[str]) -> None:
        self._model, self._include, self._exclude = model, include, exclude
        self._adapters = _adapters(model)
        self._conv1d = conv1d()

    def found(self) -> dict[str, tuple[nn.Module, type[nn.Module]]]:
        """Select the modules to offload.

        Returns:
            For each module name, the module and the class that it gets when offloaded.

        Raises:
            UsageError: a module's weights have an unsupported dtype or are not on the CPU.
        """
        found = {}
        classes: dict[type[nn.Module], type[nn.Module]] = {}
        for name, module in self._model.named_modules():
            kind = type(module)
            if not self._wanted(name) or module in self._adapters:
                continue
            if kind is nn.Linear:
                becomes: type[nn.Module] = OffloadedLinear
            elif kind is self._conv1d:
                becomes = classes.setdefault(kind, offloaded_conv1d(kind))
            elif are_experts(module):
                becomes = classes.setdefault(kind, offloaded_experts(kind, product))
            else:
                continue
            for parameter in module.parameters(recurse=False):
                _check_weight(name, parameter)
            found[name] = module, becomes
        return found

    def report(self, found: Mapping[str, tuple[nn.Module, type[nn.Module]]]) -> OffloadReport:
        """Return the report of offloaded and local modules.

        Args:
            found: the result of `found`.
        """
        counted: set[int] = set()

        def own(module: nn.Module) -> int:
            fresh = [p for p in module.parameters(recurse=False) if id(p) not in counted]
            counted.update(id(p) for p in fresh)
            size = sum(p.numel() for p in fresh)
            if isinstance(module, QuantizedLinear):
                size += module.in_features * module.out_features
            return size

        # Count offloaded modules first, so that a tied LM head counts as offloaded.
        sent = {name: own(module) for name, (module, _) in found.items()}
        stayed = {}
        for name, module in self._model.named_modules():
            if name not in found and (size := own(module)):
                stayed[name or type(module).__name__] = Stayed(size, *self._why(name, module))
        return OffloadReport(Method.TILES.value, sent, stayed)

    def _wanted(self, name: str) -> bool:
        included = not self._include or any(fnmatchcase(name, p) for p in self._include)
        return included and not any(fnmatchcase(name, p) for p in self._exclude)

    def _why(self, name: str, module: nn.Module) -> tuple[str, bool]:
        """Return why a module stayed local, and whether it multiplies by its parameters."""
        kind = type(module).__name__
        if isinstance(module, QuantizedLinear):
            return "tiles take no quantized weights", True
        if isinstance(module, nn.Embedding):
            return "rows are looked up, nothing is multiplied", False
        if all(p.dim() < 2 for p in module.parameters(recurse=False)):
            return f"{kind} has vectors only", False
        if module in self._adapters:
            return "an adapter is done sooner than sent", False
        if not self._wanted(name):
            return "include and exclude leave it out", True
        if isinstance(module, nn.MultiheadAttention):
            return "nn.MultiheadAttention multiplies inside torch; use layers of nn.Linear", True
        if isinstance(module, nn.Linear):
            return f"{kind} is a subclass of nn.Linear with a forward of its own", True
        return f"how {kind} multiplies is not known here", True


def _check_weight(layer: str, weight: Tensor) -> None:
    """Check that a weight can be sent to devices.

    Args:
        layer: name of the module, for the error message.
        weight: the weight.

    Raises:
        UsageError: the weight has an unsupported dtype or is not on the CPU.
    """
    if weight.device.type != "cpu":
        raise UsageError(
            f"layer {layer!r} lies on {weight.device}; the parameter server keeps the model in "
            f"host memory: call model.to('cpu') first"
        )
    if weight.dtype not in DTYPES:
        raise UsageError(
            f"layer {layer!r} has {weight.dtype} weights; use float32, bfloat16 or float16"
        )


def _adapters(model: nn.Module) -> set[nn.Module]:
    """Return the modules of `peft`'s LoRA adapters, whose small GEMMs are faster locally."""
    return {
        small
        for module in model.modules()
        for name in getattr(module, "adapter_layer_names", ())
        if name.startswith("lora_") and isinstance(part := getattr(module, name, None), nn.Module)
        for small in part.modules()
    }
