"""Create and load models with LoRA adapters, using `peft`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from cleave.errors import CleaveError, UsageError, to_install
from cleave.training.loop.checkpoint import WEIGHTS, LoadedCheckpoint, bytes_of
from cleave.training.lora.quantized import QuantizedLinear, quantize_frozen
from cleave.training.lora.spec import ALL_LINEAR, LoraSpec
from cleave.training.stages.staged_module import passes_of
from cleave.training.tiles.offloaded_linear import conv1d
from cleave.workload.build import (
    ModelSource,
    hub_folder,
    load_folder,
    load_model,
    quiet_transformers,
    resolve_model,
)
from cleave.workload.registry import ModelSpec
from cleave.workload.stages import BLOCK, Bits

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

ADAPTER_CONFIG: Final = "adapter_config.json"  # this file exists only in folders with adapters

_ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"

FROZEN: Final = "frozen"  # key of the frozen weights' digest in a checkpoint's metadata

_WHOLE: Final = "sha256:"


def load_adapted(source: ModelSource, lora: LoraSpec, *, seed: int) -> tuple[PeftModel, ModelSpec]:
    """Load a model and add LoRA adapters.

    If `lora.bits` is set, weights are not upcast to fp32 before they are quantized. `seed`
    determines the initial values of the adapters, and of the weights if `source` has none.

    Raises:
        UsageError: if the model cannot be loaded, or the settings are not compatible with it.
    """
    model, spec = load_model(source, seed=seed, narrow=bool(lora.bits))
    return add_adapters(model, lora, seed=seed), spec


def add_adapters(model: PreTrainedModel, spec: LoraSpec, *, seed: int = 0) -> PeftModel:
    """Freeze a model's weights and add LoRA adapters in place.

    The initial adapters do not change the model's output, because their matrix B is zero. If
    `spec.bits` is set, the frozen linear layers are quantized, and all other parameters become
    float32. `model` itself can still be called.

    Returns:
        `peft`'s wrapper of the model, with methods to save and merge the adapters.

    Raises:
        UsageError: if the settings do not match the model, or if `peft` is not installed.
    """
    config = spec.config()
    from peft import get_peft_model

    linear = {name.rpartition(".")[2] for name, m in model.named_modules() if is_linear(m)}
    modules = {name.rpartition(".")[2] for name, _ in model.named_modules()} - {""}
    for asked, known in ((spec.targets, linear | {ALL_LINEAR}), (spec.save, modules)):
        if missing := [name for name in asked if name not in known]:
            raise UsageError(
                f"--lora names {missing[0]!r}, which {type(model).__name__} does not have; it has "
                f"{', '.join(sorted(linear))}"
            )
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(seed)
        adapted = get_peft_model(model, config)
    if spec.bits:
        bits = Bits(spec.bits)
        if why := _quantize(adapted, bits):
            raise UsageError(f"--lora has bits={int(bits)}, but {why}; omit bits")
    return adapted


def quantize(model: Any, bits: int = 4) -> None:
    """Quantize the frozen linear layers of a model to 4 or 8 bits in place (QLoRA).

    Call this function after `peft.get_peft_model`. The model must be on the CPU. Adapters and other
    trained modules are not quantized. All unquantized parameters are converted to float32. The
    original weights cannot be recovered.

    Example:
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM"))
        cleave.quantize(model, bits=4)

    Args:
        model: model whose weights `peft` has frozen.
        bits: 4 (NF4, arXiv 2305.14314) or 8 (integers). Each block of 64 weights has one scale.

    Raises:
        UsageError: if an argument is invalid, the model is offloaded, or no layer can be quantized.
            In the last case, all parameters have already been converted to float32.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"quantize takes a torch module, not {type(model).__name__}")
    if bits not in tuple(Bits):
        raise UsageError(f"bits is {bits}; use 4 or 8")
    inner = getattr(model, "get_base_model", lambda: model)()
    if passes_of(inner) is not None or any(hasattr(m, "_cleave") for m in model.modules()):
        raise UsageError("the model is offloaded; quantize it before, or call cleave.restore first")
    if why := _quantize(model, Bits(bits)):
        raise UsageError(f"{why}; use a model whose layers peft has frozen")


def _quantize(model: Any, bits: Bits) -> str:
    """Quantize the frozen linear layers, except in adapters and fully trained modules.

    All unquantized parameters are converted to fp32. DoRA's weight norms are recomputed from the
    quantized weights, so that the initial adapters still do not change the model's output.

    Returns:
        An empty string, or the reason why no layer can be quantized.
    """
    # `peft`'s wrapper of a fully trained module also contains a frozen copy of the module.
    keep = {
        m
        for whole in model.modules()
        if type(whole).__name__ == "ModulesToSaveWrapper"
        for m in whole.modules()
    }
    keep |= {  # adapters, which are frozen if `peft` loaded them for inference
        m
        for layer in model.modules()
        if hasattr(layer, "base_layer")
        for name, child in layer.named_children()
        if name != "base_layer"
        for m in child.modules()
    }
    quantize_frozen(model, bits, keep)
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    for module in model.modules():
        for name, norms in getattr(module, "lora_magnitude_vector", {}).items():
            norms.update_layer(
                base_layer=module.get_base_layer(),
                lora_A=module.lora_A[name].weight,
                lora_B=module.lora_B[name].weight,
                scaling=module.scaling[name],
            )
    if any(isinstance(module, QuantizedLinear) for module in model.modules()):
        return ""
    kinds = sorted({type(m).__name__ for m in model.modules() if is_linear(m)})
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return (
        f"no layer of {type(base).__name__} can be quantized: this needs frozen nn.Linear layers "
        f"whose input size is a multiple of {BLOCK}, and the model's linear layers are "
        f"{', '.join(kinds) or 'none of these'}"
    )


def is_linear(module: nn.Module) -> bool:
    """Return True if a module is an `nn.Linear` or transformers' `Conv1D`."""
    return isinstance(module, (nn.Linear, conv1d() or nn.Linear))


def frozen_digest(model: nn.Module) -> str:
    """Return a digest of a model's frozen weights; empty if no weight is frozen.

    Checkpoints with adapters store this digest instead of the frozen weights.
    """
    found = hashlib.sha256()
    frozen: list[tuple[str, Tensor]] = [
        (n, p) for n, p in model.named_parameters() if not p.requires_grad
    ]
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            frozen += [(f"{name}.{n}", b) for n, b in module.named_buffers(recurse=False)]
    for name, parameter in frozen:
        found.update(f"{name} {tuple(parameter.shape)}".encode())
        found.update(f" {parameter.dtype}".encode())
        found.update(bytes_of(parameter))
    return _WHOLE + found.hexdigest() if frozen else ""


def check_frozen(model: nn.Module, meta: Mapping[str, Any], name: str) -> None:
    """Raise CleaveError if a model's frozen weights do not match the digest in `meta`."""
    if frozen_digest(model) != meta.get(FROZEN, ""):
        raise CleaveError(
            f"the weights of {name!r} have changed since the adapters were trained; restore the "
            f"old weights, or resume with --accept-changes"
        )


def adapted_model(job: Mapping[str, Any], checkpoint: LoadedCheckpoint) -> PeftModel:
    """Load the base model named in a run's settings, with the adapters of a checkpoint.

    Raises:
        CleaveError: if the base model is missing, has changed, or does not match the checkpoint.
    """
    seed = job.get("seed", 0)
    adapted, _ = load_adapted(resolve_model(job["model"]), LoraSpec.of(job["lora"]), seed=seed)
    model = adapted.get_base_model()
    check_frozen(model, checkpoint.meta, job["model"])
    load_trained(model, checkpoint.tensors, job["model"])
    return adapted


def trained_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's trained parameters by name, detached from autograd."""
    return {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}


def fixed_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's frozen parameters and persistent buffers by name."""
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    fixed = frozen | {n for n, _ in model.named_buffers()}
    return {n: tensor for n, tensor in model.state_dict().items() if n in fixed}


def load_trained(model: nn.Module, tensors: Mapping[str, Tensor], name: str) -> None:
    """Overwrite a model's trained parameters with the values in a checkpoint's tensors.

    Raises:
        CleaveError: if a parameter is missing from the checkpoint, or its shape differs.
    """
    for parameter, values in trained_parameters(model).items():
        saved = tensors.get(WEIGHTS + parameter)
        if saved is None or saved.shape != values.shape:
            found = "nothing" if saved is None else f"shape {tuple(saved.shape)}"
            raise CleaveError(
                f"the checkpoint belongs to another model: for {parameter!r} of {name} it has "
                f"{found}, not shape {tuple(values.shape)}"
            )
        values.copy_(saved)


def open_adapters(folder: Path) -> PeftModel:
    """Load adapters from a folder, and the base model that their configuration names.

    Raises:
        UsageError: if the adapters or base model are missing or damaged, or `peft` is missing.
    """
    try:
        from peft import PeftConfig, PeftModel
    except ImportError as error:
        raise UsageError(
            f"{str(folder)!r} has adapters, which need peft ({error}); install it with: "
            f"{to_install('lora')}"
        ) from error
    if not (folder / _ADAPTER_WEIGHTS).is_file():  # `peft` would try to download the weights
        raise UsageError(
            f"{str(folder)!r} has {ADAPTER_CONFIG} but no {_ADAPTER_WEIGHTS}; copy the folder again"
        )
    try:
        base = str(PeftConfig.from_pretrained(folder).base_model_name_or_path)
        source = Path(base) if Path(base).is_dir() else hub_folder(base)
        if source is None:
            raise UsageError(
                f"the adapters in {str(folder)!r} belong to the model in {base!r}, which does not "
                f"exist; move it there, or change base_model_name_or_path in {ADAPTER_CONFIG}"
            )
        model, _ = load_folder(source)
        with quiet_transformers():
            return PeftModel.from_pretrained(model, str(folder))
    except (KeyError, OSError, RuntimeError, SafetensorError, TypeError, ValueError) as error:
        first = str(error).strip().partition("\n")[0]
        raise UsageError(
            f"the adapters in {str(folder)!r} cannot be loaded ({first}); copy the folder again"
        ) from error
