"""Functions that offload a model's GEMMs or whole layers to a fleet, and restore the model.

With the method `tiles`, the class of each linear layer is replaced with a subclass that sends three
GEMMs (forward, input gradient, weight gradient) to the fleet.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Final

from torch import Tensor, nn

from cleave.errors import UsageError
from cleave.fleet.fleet import Fleet
from cleave.fleet.local_fallback import Fallback, FallbackFleet, FleetPresence
from cleave.fleet.product import Multiplier
from cleave.machine.backends import TorchBackend
from cleave.planner.plan import Method
from cleave.training.loop.job import FallbackMode
from cleave.training.lora.quantized import QuantizedLinear
from cleave.training.stages.staged_module import go_by_stages, go_plainly, passes_of
from cleave.training.tiles.offloaded_linear import (
    DTYPES,
    OffloadedLinear,
    Operands,
    are_experts,
    conv1d,
    offloaded_conv1d,
    offloaded_experts,
)

_log = logging.getLogger(__name__)

# A user is warned if less than this fraction of the parameters that multiply activations is sent.
LEAST_SHARE: Final = 0.9

_LISTED: Final = 8  # maximum number of local modules that a report lists


@dataclass(frozen=True, slots=True)
class Stayed:
    """A module that is not offloaded.

    Attributes:
        parameters: number of the module's own parameters, without the parameters of submodules.
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
            f"only {self.share:.0%} of the parameters that multiply are offloaded; the largest "
            f"module that stays local is {name!r}: {most.reason}"
        )

    def __str__(self) -> str:
        if self.method != "tiles":
            return "whole layers run on the fleet from the first forward pass"
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


def offload(
    model: nn.Module,
    fleet: Multiplier,
    *,
    method: str = "tiles",
    audit: float = 0.05,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    min_flops: float = 0.0,
    fallback: str = "wait",
    fallback_after_s: float = 30.0,
) -> OffloadReport:
    """Run a model's linear layers (tiles) or whole decoder layers (stages) on a fleet.

    With the method `tiles`, modules of class `nn.Linear`, and transformers' `Conv1D` and
    mixture-of-experts modules, are changed in place. The module objects, parameters, hooks and
    state dict stay the same. The caller's training loop, optimizer and autocast work as before.
    Subclasses of `nn.Linear` and `Conv1D` are not offloaded. LoRA adapters of `peft` stay local,
    but their base layers are offloaded.

    With the method `stages`, the `forward` of a transformers causal language model is replaced.
    Devices run the forward and backward passes of the decoder layers, and this process computes the
    rest. The backward pass of each forward pass must run before the next forward pass. The
    gradients of all layers become available at the same time.

    Example:
        cleave.offload(model, cleave.emulated(8))

    Args:
        model: model on the CPU. With tiles, its weights are float32, bfloat16 or float16. With
            stages, its weights are float32; under autocast, tensors are sent in bfloat16.
        fleet: fleet from `cleave.emulated`, or the `fleet` of a server from `cleave.serve`.
        method: `tiles` or `stages`.
        audit: with stages, the probability that this process checks a device in a step by
            recomputing one of the device's results.
        include: with tiles, patterns for the names of modules to offload, such as `model.layers.*`.
            An empty list includes all modules.
        exclude: with tiles, patterns for the names of modules that stay local. They take precedence
            over `include`.
        min_flops: with tiles, GEMMs with fewer floating-point operations run locally.
        fallback: what happens while no device is connected. With `wait`, training waits for a
            device. With `local`, this process computes until a device connects. Each change
            is logged, except with `wait` if the method is `stages` or the fleet is emulated.
        fallback_after_s: with `fallback="local"`, seconds on the fleet's clock without devices
            before this process computes.

    Returns:
        A report of the offloaded modules and the local modules. A Python warning is also issued if
        `include` and `exclude` are empty, and less than 90 % of the parameters that multiply
        activations are offloaded.

    Raises:
        UsageError: if an argument is invalid, or if the model has no suitable layer, is already
            offloaded, is not on the CPU, or has weights of an unsupported dtype.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"offload takes a torch module, not {_kind(model)}, as its first argument")
    if not callable(getattr(fleet, "submit", None)):
        server = hasattr(fleet, "fleet")
        advice = "pass server.fleet" if server else "pass cleave.emulated(8) or server.fleet"
        raise UsageError(f"the second argument of offload is {_kind(fleet)}, not a fleet; {advice}")
    if not 0 <= audit <= 1:
        raise UsageError(f"audit must be a probability from 0 to 1, not {audit}")
    if method not in (Method.TILES.value, Method.STAGES.value):
        raise UsageError(f"method is {method!r}; use 'tiles' or 'stages'")
    for option, patterns in (("include", include), ("exclude", exclude)):
        if isinstance(patterns, str):
            raise UsageError(
                f"{option} is {patterns!r}; use a list of patterns, such as [{patterns!r}]"
            )
    for option, number in (("min_flops", min_flops), ("fallback_after_s", fallback_after_s)):
        if not isinstance(number, int | float):
            raise UsageError(f"{option} must be a number, not {number!r}")
    if not 0 <= min_flops < float("inf"):
        raise UsageError(f"min_flops must be 0 or more operations, not {min_flops}")
    modes = [mode.value for mode in FallbackMode]
    if fallback not in modes:
        raise UsageError(f"fallback is {fallback!r}; use one of {', '.join(modes)}")
    if not 0 <= fallback_after_s < float("inf"):
        raise UsageError(f"fallback_after_s must be 0 or more seconds, not {fallback_after_s}")
    if method == Method.STAGES.value:
        if include or exclude or min_flops:
            raise UsageError("include, exclude and min_flops apply only to method 'tiles'")
        local = fallback == FallbackMode.LOCAL.value
        return _offload_by_stages(model, fleet, audit, fallback_after_s if local else None)
    how: Any = {"fallback": fallback, "fallback_after_s": fallback_after_s}
    report = send(model, fleet, include=include, exclude=exclude, min_flops=min_flops, **how)
    if report.shortfall and not include and not exclude:
        warnings.warn(f"{report.shortfall}; print the report of offload for details", stacklevel=2)
    return report


def send(
    model: nn.Module,
    fleet: Multiplier,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    min_flops: float = 0.0,
    fallback: str = "wait",
    fallback_after_s: float = 30.0,
) -> OffloadReport:
    """Offload a model by tiles, as `offload` does, but never issue a Python warning."""
    _refuse_offloaded(model)
    if passes_of(_without_wrapper(model)) is not None:
        raise UsageError("the model is already offloaded; call cleave.restore(model) first")
    chosen = _Choice(model, include, exclude)
    found = chosen.found()
    if not found:
        raise UsageError(
            f"{type(model).__name__} has no nn.Linear or Conv1D layer to offload"
            + (" among the layers that include and exclude select" if include or exclude else "")
        )
    operands = Operands(_with_fallback(fleet, fallback, fallback_after_s), min_flops)
    for module, becomes in found.values():
        object.__setattr__(module, "_cleave", operands)
        module.__class__ = becomes
    return replace(chosen.report(found), min_flops=min_flops)


class _Choice:
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
            return "include and exclude do not select it", True
        if isinstance(module, nn.MultiheadAttention):
            return "nn.MultiheadAttention multiplies inside torch; use layers of nn.Linear", True
        if isinstance(module, nn.Linear):
            return f"{kind} is a subclass of nn.Linear with its own forward", True
        return f"Cleave does not know how {kind} multiplies", True


def _check_weight(layer: str, weight: Tensor) -> None:
    """Raise UsageError if a layer's weight has an unsupported dtype or is not on the CPU."""
    if weight.device.type != "cpu":
        raise UsageError(
            f"layer {layer!r} is on {weight.device}; the parameter server keeps the model in host "
            "memory, so call model.to('cpu') first"
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


def _refuse_offloaded(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if hasattr(module, "_cleave"):
            raise UsageError(
                f"layer {name!r} is already offloaded; call cleave.restore(model) first"
            )


def _with_fallback(fleet: Multiplier, fallback: str, after_s: float) -> Multiplier:
    """Wrap a fleet to log when no device is connected and, with `local`, to multiply locally.

    A fleet that handles the absence of devices itself is returned unchanged.
    """
    local = fallback == FallbackMode.LOCAL.value
    if not isinstance(fleet, Fleet):
        if local:
            raise UsageError(f"fallback 'local' needs a fleet of devices, not {_kind(fleet)}")
        return fleet  # other multipliers handle the absence of devices themselves
    if not local and fleet.clock == "virtual":  # this fleet raises an error if no device will join
        return fleet
    here = Fallback(TorchBackend(), after_s) if local else None
    return FallbackFleet(fleet, _tell, here, say=_log.warning)


def _tell(presence: FleetPresence) -> None:
    level = logging.INFO if presence is FleetPresence.PRESENT else logging.WARNING
    _log.log(level, _PRESENCE[presence])


_PRESENCE: Final = {
    FleetPresence.PRESENT: "a device has joined; products run on the fleet again",
    FleetPresence.ABSENT: "no device is connected; waiting for one",
    FleetPresence.LOCAL: "no device is connected; computing products here until one joins",
}


def _kind(value: object) -> str:
    """Return the name of a value's type with an indefinite article."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def _offload_by_stages(
    model: nn.Module, fleet: Multiplier, audit: float, local_after_s: float | None
) -> OffloadReport:
    """Replace a model's forward pass with a `StagedForward`; see `offload`."""
    from transformers import PreTrainedModel

    from cleave.training.stages.staged_forward import StagedForward  # imports ONNX, transformers

    inner = _without_wrapper(model)
    if passes_of(inner) is not None:
        raise UsageError("the model is already offloaded; call cleave.restore(model) first")
    if not isinstance(inner, PreTrainedModel):
        raise UsageError(
            f"method 'stages' needs a transformers causal language model, not {_kind(inner)}; "
            f"offload this model by tiles"
        )
    if not isinstance(fleet, Fleet):
        raise UsageError(f"stages need a fleet of devices, not {_kind(fleet)}")
    _refuse_offloaded(model)
    if "forward" in vars(inner):
        raise UsageError(
            f"the forward of {_kind(inner)} was replaced, for example by accelerate's prepare; "
            f"offload the model before preparing it"
        )
    for name, parameter in inner.named_parameters():
        if parameter.device.type != "cpu":
            raise UsageError(
                f"parameter {name!r} is on {parameter.device}, but stages need the model in host "
                "memory; call model.to('cpu') first"
            )
    go_by_stages(inner, StagedForward(inner, fleet, audit, local_after_s))
    return OffloadReport(Method.STAGES.value, {}, {})


def _without_wrapper(model: Any) -> nn.Module:
    """Return the model inside `peft`'s wrapper; `model` itself if it has no wrapper."""
    inner: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner


@contextmanager
def offloaded(
    model: nn.Module,
    fleet: Multiplier,
    *,
    method: str = "tiles",
    audit: float = 0.05,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    min_flops: float = 0.0,
    fallback: str = "wait",
    fallback_after_s: float = 30.0,
) -> Iterator[nn.Module]:
    """Return a context manager that offloads a model on entry and restores it on exit.

    Arguments and errors are those of `offload`. The context manager yields the model.
    """
    offload(
        model,
        fleet,
        method=method,
        audit=audit,
        include=include,
        exclude=exclude,
        min_flops=min_flops,
        fallback=fallback,
        fallback_after_s=fallback_after_s,
    )
    try:
        yield model
    finally:
        restore(model)


def restore(model: nn.Module) -> nn.Module:
    """Undo `offload` and return the model. A model that is not offloaded is left unchanged."""
    inner = _without_wrapper(model)
    if (passes := passes_of(inner)) is not None:
        passes.close()
        go_plainly(inner)
    for module in model.modules():
        if "_cleave" in module.__dict__:
            object.__delattr__(module, "_cleave")
            module.__class__ = type(module).__mro__[1]
    return model


class hold_weights:  # noqa: N801 - reads as a statement
    """Context manager in which devices retain received weights, for gradient accumulation.

    The weights must not change within the context. Leave the context before the optimizer step.
    """

    def __init__(self, model: nn.Module) -> None:
        self._sets: set[Operands] = {
            module.__dict__["_cleave"] for module in model.modules() if "_cleave" in module.__dict__
        }

    def __enter__(self) -> None:
        for operands in self._sets:
            operands.holding = True

    def __exit__(self, *_: object) -> None:
        for operands in self._sets:
            operands.holding = False
            operands.held.clear()
