"""Write a model and its tokenizer as one GGUF file, for llama.cpp, Ollama and others.

Names, shapes and metadata match what llama.cpp expects for each architecture.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cleave.errors import UsageError, not_installed
from cleave.training.data.tokenizer import folder_tokenizer

if TYPE_CHECKING:
    from gguf import GGUFWriter

GGUF_FILE: Final = "model.gguf"

# Maps a `model_type` in config.json to the name of its architecture in the package `gguf`.
_ARCHITECTURES: Final = {
    "llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3", "gpt2": "GPT2",
}  # fmt: skip
_ACTIVATIONS: Final = {"gpt2": "gelu_new"}  # the activation in llama.cpp; silu for other models
_ROPE_SCALING: Final = "llama3"
_TRANSPOSED: Final = re.compile(r".*\.(c_attn|c_proj|c_fc)\.weight")  # Conv1D of GPT-2

# Maps a regular expression that splits text before byte-level BPE to its name in llama.cpp.
_QWEN2_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: Final = {
    _QWEN2_SPLIT: "qwen2",
    _QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|"): "llama-bpe",
}


def check_gguf(config: Any) -> None:
    """Raise UsageError if `gguf` is not installed, or if GGUF cannot represent the model."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise not_installed("--gguf", "gguf", "gguf") from None
    kind = str(config.model_type)
    if kind not in _ARCHITECTURES:
        raise UsageError(
            f"--gguf supports models of the types {', '.join(_ARCHITECTURES)}, not {kind!r}; "
            f"export without --gguf"
        )
    found = getattr(config, "hidden_act", None) or getattr(config, "activation_function", "")
    rope = getattr(config, "rope_parameters", None) or {}
    scaling = str(rope.get("rope_type", "default"))
    odd = [
        f"the activation {found!r}" * (found != _ACTIVATIONS.get(kind, "silu")),
        f"the RoPE scaling {scaling!r}"
        * (scaling != "default" and (kind, scaling) != ("llama", _ROPE_SCALING)),
        "attention that is scaled by layer index"
        * bool(getattr(config, "scale_attn_by_inverse_layer_idx", False)),
    ]
    for feature in filter(None, odd):
        raise UsageError(f"llama.cpp has no {kind} with {feature}; export without --gguf")


def write_gguf(
    path: Path,
    name: str,
    config: Any,
    description: Path,
    weights: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> None:
    """Write a GGUF file.

    Args:
        config: the model's configuration, which `check_gguf` has accepted.
        description: folder with the tokenizer and the chat template.
        weights: the weights by parameter name, without a tied LM head.
        dtype: dtype of matrices. Vectors and learned positions are always fp32.

    Raises:
        UsageError: if GGUF cannot represent the tokenizer or a weight.
    """
    import gguf

    kind = _ARCHITECTURES[config.model_type]
    arch = gguf.MODEL_ARCH[kind]
    types = {
        torch.float32: (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
        torch.bfloat16: (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
        torch.float16: (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    }
    matrices, file_type = types[dtype]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_name(name)
    writer.add_file_type(file_type)
    _add_sizes(writer, config)
    _add_tokenizer(writer, description, config.vocab_size)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for parameter, tensor in weights.items():
        target = names.get_name(parameter, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise UsageError(
                f"GGUF has no name for the weight {parameter!r}; export without --gguf"
            )
        values = _in_order(parameter, tensor.float().numpy(), config, kind)
        wide = values.ndim < 2 or target.startswith("position_embd")
        held = gguf.GGMLQuantizationType.F32 if wide else matrices
        writer.add_tensor(target, gguf.quantize(values, held), raw_dtype=held)
    if kind == "LLAMA" and (factors := _rope_factors(config)) is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: GGUFWriter, config: Any) -> None:
    width, heads = config.hidden_size, config.num_attention_heads
    ffn = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    writer.add_vocab_size(config.vocab_size)
    # llama.cpp supports no sliding window for these models, so limit the context to the window.
    window = getattr(config, "sliding_window", None) or config.max_position_embeddings
    writer.add_context_length(min(window, config.max_position_embeddings))
    writer.add_embedding_length(width)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(ffn or 4 * width)
    writer.add_head_count(heads)
    if config.model_type == "gpt2":
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    head = getattr(config, "head_dim", None) or width // heads
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _in_order(
    parameter: str, values: npt.NDArray[np.float32], config: Any, kind: str
) -> npt.NDArray[np.float32]:
    """Return a weight in llama.cpp's layout.

    GPT-2's Conv1D weights are transposed. In Llama's query and key weights, the two rows of each
    rotary pair are moved next to each other.
    """
    if kind == "GPT2":
        return np.ascontiguousarray(values.T) if _TRANSPOSED.fullmatch(parameter) else values
    if kind != "LLAMA" or not re.search(r"\.[qk]_proj\.", parameter):
        return values
    query = ".q_proj." in parameter
    heads = config.num_attention_heads if query else config.num_key_value_heads
    halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _rope_factors(config: Any) -> npt.NDArray[np.float32] | None:
    """Return the divisors of the rotary frequencies in Llama 3's scaling; None without scaling."""
    rope = config.rope_parameters
    if rope.get("rope_type") != _ROPE_SCALING:
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS[_ROPE_SCALING](config, torch.device("cpu"))
    exponents = torch.arange(len(scaled), dtype=torch.float32) / len(scaled)
    factors: npt.NDArray[np.float32] = (rope["rope_theta"] ** -exponents / scaled).numpy()
    return factors


def _add_tokenizer(writer: GGUFWriter, description: Path, size: int) -> None:
    from gguf import SpecialVocab, TokenType

    tokenizer = folder_tokenizer(description)
    held = json.loads(tokenizer.library_tokenizer.to_str())
    model = held["model"]
    if model["type"] != "BPE":
        raise UsageError(
            f"the tokenizer is of type {model['type']}, but --gguf supports only BPE; export "
            f"without --gguf"
        )
    tokens = [f"[PAD{number}]" for number in range(size)]
    types = [TokenType.UNUSED] * size
    for token, number in model["vocab"].items():
        tokens[number], types[number] = token, TokenType.NORMAL
    for added in held["added_tokens"]:
        number = added["id"]
        tokens[number] = added["content"]
        types[number] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    special = SpecialVocab(description, n_vocab=size)  # with the chat template
    ids, begin = special.special_token_ids, tokenizer.begin_ids.tolist()
    ids["eos"] = tokenizer.eos_id
    ids["bos"] = begin[0] if begin else ids.get("bos", tokenizer.eos_id)
    special.add_special_token["bos"] = bool(begin)
    if model.get("byte_fallback"):
        _add_sentencepiece(writer, held, tokens, types)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_split_of(held["pre_tokenizer"]))
        special.merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    special.add_to_gguf(writer, quiet=True)


def _add_sentencepiece(
    writer: GGUFWriter, held: Mapping[str, Any], tokens: list[str], types: list[Any]
) -> None:
    """Add the scores that llama.cpp's sentencepiece tokenizer needs instead of merges.

    The token of the earliest merge has the highest score. `types` is changed in place.
    """
    from gguf import TokenType

    merges = (m.split(" ") if isinstance(m, str) else m for m in held["model"]["merges"])
    rank: dict[str, int] = {}
    for number, pair in enumerate(merges):
        rank.setdefault("".join(pair), number)
    unknown = held["model"].get("unk_token")
    for number, token in enumerate(tokens):
        if re.fullmatch("<0x[0-9A-F]{2}>", token):
            types[number] = TokenType.BYTE
        elif token == unknown:
            types[number] = TokenType.UNKNOWN
    writer.add_tokenizer_model("llama")
    writer.add_token_scores([-float(rank.get(token, 0)) for token in tokens])
    # Llama 2's tokenizer prepends a space to each text, with a normalizer or, in newer files,
    # Metaspace.
    steps = held["normalizer"] or {}
    prepends = any(s["type"] == "Prepend" for s in steps.get("normalizers", [steps]) if s)
    scheme = (held["pre_tokenizer"] or {}).get("prepend_scheme", "never")
    writer.add_add_space_prefix(prepends or scheme != "never")


def _split_of(pre_tokenizer: Mapping[str, Any] | None) -> str:
    """Return llama.cpp's name for the way a byte-level tokenizer splits text."""
    given = pre_tokenizer or {"type": "none"}
    steps = given.get("pretokenizers", [given])
    *first, last = steps
    kinds = [step["type"] for step in steps]
    found = None
    if kinds[-1] == "ByteLevel" and not last["add_prefix_space"]:
        if kinds == ["ByteLevel"] and last["use_regex"]:
            found = "gpt-2"
        elif kinds == ["Digits", "ByteLevel"] and first[0]["individual_digits"]:
            found = "smollm"
        elif kinds == ["Split", "ByteLevel"] and not last["use_regex"]:
            found = _SPLITS.get(first[0]["pattern"].get("Regex", ""))
    if found is None:
        raise UsageError(
            f"the tokenizer splits text with {' and '.join(kinds)} in a way that --gguf does not "
            f"support; export without --gguf, and convert the folder with llama.cpp's own script"
        )
    return found
