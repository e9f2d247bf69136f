"""Build transformers with random weights, or load them from local folders.

Cleave never downloads models, but it finds models that `hf download` has fetched. torch and
transformers are imported only in the functions that use them, so a model's sizes can be read
without these libraries.
"""

import json
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cleave.errors import UsageError
from cleave.workload.registry import Family, ModelSpec, find_model, spec_from_config

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_WEIGHTS_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The sizes of a model, and the folder of its weights (None for new random weights)."""

    spec: ModelSpec
    folder: Path | None


def resolve_model(name_or_folder: str) -> ModelSource:
    """Return the source of the model with a given name or folder, without reading weights.

    The argument is treated as a folder if the folder exists, and either the argument contains a
    path separator or the folder contains a ``config.json``. A name such as `org/model` is first
    looked up among the downloaded models of the Hugging Face Hub, and then in the registry.

    Raises:
        UsageError: if no folder and no model in the registry has this name, or if the folder's
            ``config.json`` is unusable (see `read_spec`).
    """
    folder = Path(name_or_folder).expanduser()
    looks_like_path = "/" in name_or_folder or "\\" in name_or_folder
    if folder.is_dir() and (looks_like_path or (folder / _CONFIG).is_file()):
        return ModelSource(read_spec(folder), folder)
    if (cached := hub_folder(name_or_folder)) is not None:
        spec = spec_from_config(_read_config(cached), name_or_folder.partition("/")[2])
        return ModelSource(spec, cached)
    try:
        return ModelSource(find_model(name_or_folder), None)
    except UsageError:
        if not looks_like_path:
            raise
    raise _no_model(name_or_folder)


def _no_model(name_or_folder: str) -> UsageError:
    if _is_hub_name(name_or_folder) and not Path(name_or_folder).parent.is_dir():
        return UsageError(
            f"there is no folder {name_or_folder!r}, and Cleave does not download models; if this "
            f"is a model on the Hugging Face Hub, run `hf download {name_or_folder}` and try again"
        )
    return UsageError(f"there is no folder {name_or_folder!r} with a model; check the path")


def hub_folder(name: str) -> Path | None:
    """Return the folder in which `hf download` has stored a Hugging Face Hub model.

    Return None if `name` does not have the form `org/model`, or the model is not downloaded.
    """
    if not _is_hub_name(name):
        return None
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, local_files_only=True))
    except (ImportError, OSError, ValueError):  # the last two: not downloaded, or not a name
        return None


def _is_hub_name(name: str) -> bool:
    return name.count("/") == 1 and name[0] not in "./~"


def read_spec(folder: Path) -> ModelSpec:
    """Return the spec of the model in a local Hugging Face folder. The spec has the folder's name.

    Raises:
        UsageError: if the folder does not exist, or its ``config.json`` is missing, is unreadable
            or does not describe a causal language model with unquantized weights.
    """
    config = _read_config(folder)
    return spec_from_config(config, folder.resolve().name)


def hf_config(spec: ModelSpec) -> "PreTrainedConfig":
    """Return the OPTConfig or LlamaConfig of a model in the registry.

    All dropout probabilities are 0 instead of the published 0.1.

    Raises:
        UsageError: if the vocabulary has fewer than 3 tokens.
    """
    from transformers import LlamaConfig, OPTConfig

    if spec.vocabulary < 3:
        raise UsageError(
            f"the vocabulary of {spec.name!r} has {spec.vocabulary} tokens; "
            "it must have 3 or more, for the special tokens"
        )
    shared: dict[str, Any] = {
        "vocab_size": spec.vocabulary,
        "hidden_size": spec.width,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "max_position_embeddings": spec.max_positions,
        "tie_word_embeddings": spec.tied_head,
        "attn_implementation": "sdpa",
    }
    match spec.family:
        case Family.OPT:
            return OPTConfig(
                **shared,
                ffn_dim=spec.ffn_width,
                word_embed_proj_dim=spec.embedding_width,
                do_layer_norm_before=spec.pre_norm,
                activation_function="relu",
                dropout=0.0,
                attention_dropout=0.0,
                layerdrop=0.0,
                init_std=0.02,
                pad_token_id=1,
                bos_token_id=2,
                eos_token_id=2,
            )
        case Family.LLAMA:
            return LlamaConfig(
                **shared,
                intermediate_size=spec.ffn_width,
                num_key_value_heads=spec.kv_heads,
                head_dim=spec.head_width,
                hidden_act="silu",
                rms_norm_eps=1e-5,
                initializer_range=0.02,
                attention_dropout=0.0,
                pad_token_id=None,
                bos_token_id=1,
                eos_token_id=2,
            )


def build_model(
    spec: ModelSpec,
    *,
    seed: int,
    narrow: bool = False,
    place: "Callable[[nn.Module], None] | None" = None,
) -> "PreTrainedModel":
    """Build a model with new random weights, on the CPU, in training mode.

    The weights are initialised by transformers, without a second copy in memory. The global random
    state of torch does not change.

    Args:
        seed: seed for the random weights. Equal seeds give bit-equal weights.
        narrow: whether to use bf16 weights instead of fp32.
        place: called with the model on the meta device. It may give parameters memory elsewhere,
            for example in files.
    """
    import torch
    from transformers import LlamaForCausalLM, OPTForCausalLM

    classes = {Family.OPT: OPTForCausalLM, Family.LLAMA: LlamaForCausalLM}
    config = hf_config(spec)
    with torch.device("meta"):
        model = classes[spec.family]._from_config(
            config, dtype=torch.bfloat16 if narrow else torch.float32
        )
    if place is not None:
        place(model)
    # Like `to_empty`, but only for tensors on the meta device.
    model._apply(lambda each: torch.empty_like(each, device="cpu") if each.is_meta else each)
    # `_apply` allocated separate memory for each of two tied weights. If one of the two is marked
    # as initialised, its memory pages stay untouched until `tie_weights` frees the memory.
    for target in model.all_tied_weights_keys:
        model.get_parameter(target)._is_hf_initialized = True
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.initialize_weights()
    model.tie_weights()
    return _for_training(model)


def load_folder(
    path: str | Path, *, narrow: bool = False, place: "Callable[[nn.Module], None] | None" = None
) -> "tuple[PreTrainedModel, ModelSpec]":
    """Load the causal language model in a Hugging Face folder, on the CPU, in training mode.

    The folder needs a ``config.json`` and safetensors weights, in one file or with an index. The
    weights are copied into memory, so the files may change after loading. All dropout
    probabilities are set to 0.

    Args:
        narrow: whether to keep the dtype of the config instead of converting weights to fp32. This
            option is ignored if a buffer of the model would lose precision.
        place: called with the model while its weights are still in the files, if possible. It may
            give parameters memory elsewhere, in fp32.

    Raises:
        UsageError: if the folder is missing or incomplete, the model is not a causal language
            model, or the weights are damaged, are quantized or do not match the config.
    """
    import torch

    folder = Path(path).expanduser()
    spec = read_spec(folder)
    _check_weight_files(folder)
    dtype: torch.dtype | str = "auto" if narrow else torch.float32
    if place is not None:  # weights in the dtype of the files are not copied into memory
        dtype = _common_dtype(folder)
    model = _from_files(folder, dtype)
    if dtype is not torch.float32 and any(
        b.is_floating_point() and b.dtype is not torch.float32 for b in model.buffers()
    ):  # the model's constants were rounded
        model, narrow = _from_files(folder, torch.float32), False
    _record_ties(model)
    if place is not None:
        place(model)
    _own_memory(model, narrow=narrow)
    if not narrow:
        model.config.dtype = torch.float32
    counted = sum(parameter.numel() for parameter in model.parameters())
    if counted != spec.parameters:
        spec = replace(spec, counted_parameters=counted)
    return _for_training(model), spec


def _from_files(folder: Path, dtype: "torch.dtype | str") -> "PreTrainedModel":
    """Load a model and check its weights. Tensors that have this dtype in the files are mapped."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM

    local = {"local_files_only": True, "trust_remote_code": False}
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(folder, **local)
            _disable_dropout(config)
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # `_check_report` raises a clearer error
                output_loading_info=True,
                **local,
            )
    except SafetensorError as error:
        raise UsageError(
            f"the weights in {str(folder)!r} are damaged ({_one_line(error)}); copy the folder "
            "again"
        ) from error
    except (
        ImportError,
        KeyError,
        OSError,
        RuntimeError,
        StrictDataclassError,
        TypeError,
        ValueError,
    ) as error:
        raise UsageError(
            f"the model in {str(folder)!r} could not be loaded ({_one_line(error)}); use a folder "
            "with a causal language model, such as OPT or Llama"
        ) from error
    _check_report(report, folder)
    loaded: PreTrainedModel = model
    return loaded


def load_model(
    source: ModelSource,
    *,
    seed: int,
    narrow: bool = False,
    place: "Callable[[nn.Module], None] | None" = None,
) -> "tuple[PreTrainedModel, ModelSpec]":
    """Load a model from its folder, or build it with random weights if it has no folder.

    `load_folder` and `build_model` describe the arguments. The seed only affects random weights.
    """
    if source.folder is not None:
        return load_folder(source.folder, narrow=narrow, place=place)
    return build_model(source.spec, seed=seed, narrow=narrow, place=place), source.spec


def enable_checkpointing(model: "PreTrainedModel") -> None:
    """Enable activation checkpointing, which does not change outputs or gradients.

    Raises:
        UsageError: if the model does not support activation checkpointing.
    """
    # transformers 5 has `activation_checkpointing_enable`. Earlier releases only have
    # `gradient_checkpointing_enable`.
    enable = getattr(model, "activation_checkpointing_enable", None)
    try:
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    except ValueError as error:
        raise UsageError(
            f"{type(model).__name__} does not support activation checkpointing; train without it"
        ) from error


def disable_checkpointing(model: "PreTrainedModel") -> None:
    """Disable the activation checkpointing that `enable_checkpointing` has enabled."""
    disable = getattr(model, "activation_checkpointing_disable", None)
    (disable or model.gradient_checkpointing_disable)()
    model.disable_input_require_grads()  # removes the hook on the input embeddings


def _for_training(model: "PreTrainedModel") -> "PreTrainedModel":
    # Only text generation needs the key-value cache.
    model.config.use_cache = False
    return model.train()


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise _no_model(str(folder))
    path = folder / _CONFIG
    if not path.is_file():
        raise UsageError(
            f"the folder {str(folder)!r} has no {_CONFIG}; use the folder of a saved Hugging Face "
            "model"
        )
    config = _read_json(path)
    architectures = config.get("architectures") or []
    if architectures and not any("CausalLM" in a or "LMHead" in a for a in architectures):
        raise UsageError(
            f"the model in {str(folder)!r} is {architectures[0]}, not a causal language model; "
            "use a causal language model, such as OPT or Llama"
        )
    if config.get("quantization_config"):
        raise UsageError(
            f"the weights in {str(folder)!r} are quantized and cannot be trained exactly; use the "
            "folder of the original model"
        )
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{str(path)!r} cannot be read ({_one_line(error)}); copy the folder again"
        ) from error
    if not isinstance(value, dict):
        raise UsageError(f"{str(path)!r} is not a JSON object; copy the folder again")
    return value


def _check_weight_files(folder: Path) -> None:
    if (folder / _WEIGHTS).is_file():
        return
    if not (folder / _WEIGHTS_INDEX).is_file():
        raise UsageError(
            f"the folder {str(folder)!r} has no {_WEIGHTS} and no {_WEIGHTS_INDEX}; save the model "
            "with safe_serialization=True"
        )
    shards = _read_json(folder / _WEIGHTS_INDEX).get("weight_map")
    if not isinstance(shards, dict):
        raise UsageError(
            f"{str(folder / _WEIGHTS_INDEX)!r} has no weight_map; copy the folder again"
        )
    names = sorted({str(shard) for shard in shards.values()})
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UsageError(
            f"the folder {str(folder)!r} lacks {len(missing)} of its weight files, such as "
            f"{missing[0]}; copy the folder again"
        )


def _check_report(report: dict[str, Any], folder: Path) -> None:
    # transformers would initialise mismatched and missing weights randomly, and would ignore
    # unexpected weights.
    if mismatched := sorted(report["mismatched_keys"]):
        key, stored, expected = mismatched[0]
        raise UsageError(
            f"the weight {key} in {str(folder)!r} has the shape {list(stored)}, but {_CONFIG} "
            f"requires {list(expected)}; use the {_CONFIG} that belongs to these weights"
        )
    if missing := sorted(report["missing_keys"]):
        raise UsageError(
            f"the folder {str(folder)!r} lacks {len(missing)} of the weights that {_CONFIG} "
            f"requires, such as {missing[0]}; copy the folder again"
        )
    if unexpected := sorted(report["unexpected_keys"]):
        raise UsageError(
            f"the folder {str(folder)!r} has {len(unexpected)} weights that {_CONFIG} does not "
            f"define, such as {unexpected[0]}; use the {_CONFIG} that belongs to these weights"
        )


def _record_ties(model: "PreTrainedModel") -> None:
    """Set `tie_word_embeddings` to False if the LM head and the token embedding are not tied.

    If the config ties the two weights but the files contain different values, transformers loads
    both. If a checkpoint kept the setting, loading the checkpoint would tie the weights.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and head.weight is not embedding.weight:
        model.config.tie_word_embeddings = False
        model.config.get_text_config().tie_word_embeddings = False


def _common_dtype(folder: Path) -> "torch.dtype":
    """Return the dtype of all weights in a folder; fp32 if they have several or are damaged."""
    import torch
    from safetensors import SafetensorError, safe_open

    narrow = {"F16": torch.float16, "BF16": torch.bfloat16}
    found = set()
    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(path, "pt") as file:
                found |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError):
            return torch.float32  # loading raises a clear error if the file is needed
    return narrow.get(found.pop(), torch.float32) if len(found) == 1 else torch.float32


def _own_memory(model: "PreTrainedModel", *, narrow: bool) -> None:
    import torch
    from torch import nn

    # Loaded tensors are views of the memory-mapped file. Overwriting this file with a checkpoint
    # would change the weights in use or kill the process. Tensors are copied one at a time to save
    # memory.
    for tensor in chain(model.parameters(), model.buffers()):
        if tensor.untyped_storage().filename is None:  # otherwise, `place` has moved it
            wide = isinstance(tensor, nn.Parameter) and not narrow
            tensor.data = tensor.data.to(torch.float32 if wide else tensor.dtype, copy=True)


def _disable_dropout(config: "PreTrainedConfig") -> None:
    for key, value in config.to_dict().items():
        rate = key == "layerdrop" or "dropout" in key or key.endswith("pdrop")
        if rate and isinstance(value, int | float) and not isinstance(value, bool):
            setattr(config, key, 0.0)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    # Progress bars and load reports of transformers would clutter Cleave's own output.
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():  # peft calls functions that transformers has deprecated
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)
            # peft's warnings about tied weights and Conv1D do not apply to Cleave.
            warnings.filterwarnings("ignore", category=UserWarning, module="peft")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _one_line(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{error} is unknown"
    text = str(error).strip() or type(error).__name__
    return textwrap.shorten(text, 200, placeholder=" ...").rstrip(".")
