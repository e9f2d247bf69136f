"""Selection of the modules that run on a fleet, and the reasons why other modules stay local."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from torch import Tensor, nn

from cleave.errors import UsageError
from cleave.planner.plan import Method
from cleave.training.lora.quantized import QuantizedLinear
from cleave.training.tiles.offloaded_linear import (
    DTYPES,
    OffloadedLinear,
    are_experts,
    conv1d,
    offloaded_conv1d,
    offloaded_experts,
)


class OffloadChoice:
    """Selection of a model's modules to offload. The arguments are those of `offload`."""

    def __init__(self, model: nn.Module, include: Sequence[str], exclude: Sequence[str]) -> None:
        self._model, self._include, self._exclude = model, include, exclude
        self._adapters = _adapters(model)
        self._conv1d = conv1d()

    def found(self) -> dict[str, tuple[nn.Module, type[nn.Module]]]:
        """Return the modules to offload by name, each with the subclass that replaces its class.

        Raises:
            UsageError: if a module's weights have an unsupported dtype or are not on the CPU.
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
                becomes = classes.setdefault(kind, offloaded_experts(kind))
            else:
                continue
            for parameter in module.parameters(recurse=False):
                _check_weight(name, parameter)
            found[name] = module, becomes
        return found

    def report(self, found: Mapping[str, tuple[nn.Module, type[nn.Module]]]) -> OffloadReport:
        """Return a report of offloaded and local modules, from the result of `self.found`."""
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
        """Return why a module stays local, and whether it multiplies activations by parameters."""
        kind = type(module).__name__
        if isinstance(module, QuantizedLinear):
            return "tiles cannot use quantized weights", True
        if isinstance(module, nn.Embedding):
            return "rows are looked up, nothing is multiplied", False
        if all(p.dim() < 2 for p in module.parameters(recurse=False)):
            return f"{kind} has vectors only", False
        if module in self._adapters:
            return "computing an adapter here is faster than sending it", False
        if not self._wanted(name):
            return "include and exclude leave it out", True
        if isinstance(module, nn.MultiheadAttention):
            return "nn.MultiheadAttention multiplies inside torch; use layers of nn.Linear", True
        if isinstance(module, nn.Linear):
            return f"{kind} is a subclass of nn.Linear with a forward of its own", True
        return f"how {kind} multiplies is not known here", True


def _check_weight(layer: str, weight: Tensor) -> None:
    """Raise UsageError if a layer's weight has an unsupported dtype or is not on the CPU."""
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


# A user is warned if less than this fraction of the parameters that multiply activations is sent.
LEAST_SHARE: Final = 0.9

_LISTED: Final = 8  # maximum number of local modules that a report lists


@dataclass(frozen=True, slots=True)
class Stayed:
    """A module that is not offloaded.

    Attributes:
        parameters: number of the module's own parameters, without the parameters of submodules.
        reason: why the module is not offloaded.
        multiplies: whether the module multiplies activations by its parameters.
    """

    parameters: int
    reason: str
    multiplies: bool


@dataclass(frozen=True, slots=True)
class OffloadReport:
    """Result of `cleave.offload`. `print` shows the report as text.

    Attributes:
        method: `tiles` or `stages`.
        sent: number of parameters of each offloaded module, by name; empty with stages, because the
            layers are not known before the first forward pass.
        stayed: the other modules that have parameters, by name; empty with stages.
        min_flops: GEMMs with fewer floating-point operations run locally.
    """

    method: str
    sent: Mapping[str, int]
    stayed: Mapping[str, Stayed]
    min_flops: float = 0.0

    @property
    def share(self) -> float:
        """Return the offloaded fraction of parameters that multiply activations; 1 if none do."""
        sent = sum(self.sent.values())
        missed = sum(each.parameters for each in self.stayed.values() if each.multiplies)
        return sent / (sent + missed) if sent + missed else 1.0

    @property
    def shortfall(self) -> str:
        """Return a warning if `share` is below `LEAST_SHARE`; otherwise an empty string."""
        missed = {n: each for n, each in self.stayed.items() if each.multiplies}
        if self.share >= LEAST_SHARE or not missed:
            return ""
        name, most = max(missed.items(), key=lambda item: item[1].parameters)
        return (
            f"only {self.share:.0%} of the parameters that multiply went to the fleet; the most "
            f"that stayed here are those of {name!r}: {most.reason}"
        )

    def __str__(self) -> str:
        if self.method != "tiles":
            return "whole layers go to the fleet from the first forward pass on"
        count, total = len(self.sent), sum(self.sent.values())
        lines = [f"to the fleet: {count:,} layers, {total:,} parameters ({self.share:.0%})"]
        largest = sorted(self.stayed.items(), key=lambda item: -item[1].parameters)
        for name, each in largest[:_LISTED]:
            lines.append(f"here: {name}, {each.parameters:,} parameters: {each.reason}")
        if rest := largest[_LISTED:]:
            parameters = sum(each.parameters for _, each in rest)
            lines.append(f"here: {len(rest):,} more modules, {parameters:,} parameters")
        if self.min_flops:
            lines.append(f"here: products of fewer than {self.min_flops:,.0f} operations")
        return "\n".join(lines)
