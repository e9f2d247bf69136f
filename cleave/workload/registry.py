"""The sizes of the built-in models, and of models described by a Hugging Face config."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from cleave.errors import UsageError


class Family(Enum):
    """A family of models. The family determines which Linear modules a decoder layer has.

    An OPT layer has q, k, v, out, fc1 and fc2, with biases. A LLAMA layer has q, k, v, o, gate, up
    and down, without biases. OPT uses learned position embeddings. LLAMA uses rotary position
    embeddings.
    """

    OPT = "opt"
    LLAMA = "llama"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The sizes of a decoder-only transformer. Widths count elements, not bytes."""

    name: str
    family: Family
    layers: int
    width: int  # width of the residual stream
    heads: int
    kv_heads: int  # fewer than `heads` with grouped-query attention
    head_width: int
    ffn_width: int
    vocabulary: int
    max_positions: int  # maximum number of tokens in a sequence
    embedding_width: int  # differs from `width` in OPT-350m, which has project_in and project_out
    tied_head: bool  # True if the LM head and the token embedding share one weight
    pre_norm: bool = True  # False in OPT-350m, where each layer norm follows its sub-layer
    counted_parameters: int | None = None  # set if the sizes above give a wrong parameter count

    @property
    def query_width(self) -> int:
        """Return the number of output features of q_proj."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Return the number of output features of k_proj. v_proj has the same number."""
        return self.kv_heads * self.head_width

    @property
    def parameters(self) -> int:
        """Return the exact number of trainable parameters. A tied weight is counted once."""
        if self.counted_parameters is not None:
            return self.counted_parameters
        heads = 1 if self.tied_head else 2
        total = heads * self.vocabulary * self.embedding_width
        if self.embedding_width != self.width:
            total += 2 * self.embedding_width * self.width  # project_in and project_out
        attention = 2 * self.width * (self.query_width + self.kv_width)
        if self.family is Family.LLAMA:
            norms = 2 * self.width
            layer = attention + 3 * self.width * self.ffn_width + norms
            return total + self.layers * layer + self.width
        biases = self.query_width + 2 * self.kv_width + self.ffn_width + 2 * self.width
        norms = 2 * (2 * self.width)
        layer = attention + 2 * self.width * self.ffn_width + biases + norms
        # OPT's position table has two rows that no position uses.
        total += (self.max_positions + 2) * self.width
        return total + self.layers * layer + (2 * self.width if self.pre_norm else 0)


def _opt(
    size: str,
    layers: int,
    width: int,
    heads: int,
    *,
    vocabulary: int = 50272,
    max_positions: int = 2048,
    embedding_width: int | None = None,
    pre_norm: bool = True,
) -> ModelSpec:
    kv_heads, head_width, ffn_width = heads, width // heads, 4 * width
    sizes = layers, width, heads, kv_heads, head_width, ffn_width, vocabulary, max_positions
    embedding_width = embedding_width or width
    return ModelSpec(f"opt-{size}", Family.OPT, *sizes, embedding_width, True, pre_norm)


def _llama(
    name: str,
    layers: int,
    width: int,
    heads: int,
    ffn_width: int,
    *,
    kv_heads: int | None = None,
    vocabulary: int = 32000,
    max_positions: int = 4096,
) -> ModelSpec:
    kv_heads, head_width = kv_heads or heads, width // heads
    sizes = layers, width, heads, kv_heads, head_width, ffn_width, vocabulary, max_positions
    return ModelSpec(name, Family.LLAMA, *sizes, embedding_width=width, tied_head=False)


# The published OPT and Llama 2 models, and four small models. The tiny models train in minutes on a
# laptop. The nano models are for tests. The small Llama models use grouped-query attention, like
# llama2-70b.
MODELS: Mapping[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        _opt("nano", 2, 64, 4, vocabulary=512, max_positions=256),
        _opt("tiny", 4, 384, 6, vocabulary=1024, max_positions=512),
        _opt("125m", 12, 768, 12),
        _opt("350m", 24, 1024, 16, embedding_width=512, pre_norm=False),
        _opt("1.3b", 24, 2048, 32),
        _opt("2.7b", 32, 2560, 32),
        _opt("6.7b", 32, 4096, 32),
        _opt("13b", 40, 5120, 40),
        _opt("30b", 48, 7168, 56),
        _opt("66b", 64, 9216, 72),
        _opt("175b", 96, 12288, 96),
        _llama("llama-nano", 2, 64, 4, 176, kv_heads=2, vocabulary=512, max_positions=256),
        _llama("llama-tiny", 4, 384, 6, 1024, kv_heads=3, vocabulary=1024, max_positions=512),
        _llama("llama2-7b", 32, 4096, 32, 11008),
        _llama("llama2-13b", 40, 5120, 40, 13824),
        _llama("llama2-70b", 80, 8192, 64, 28672, kv_heads=8),
    )
}


def find_model(name: str) -> ModelSpec:
    """Return the spec of a model in the registry.

    Args:
        name: name of the model, in upper or lower case. The usual spellings are accepted, such as
            ``opt-125m`` and ``facebook/opt-125m``, or ``llama2-7b``, ``llama-2-7b`` and
            ``meta-llama/Llama-2-7b-hf``.

    Raises:
        UsageError: if no model has this name. The message lists the closest names.
    """
    key = name.strip().lower()
    for organisation in ("facebook/", "meta-llama/"):
        key = key.removeprefix(organisation)
    key = key.removesuffix("-hf").replace("llama-2-", "llama2-")
    if key in MODELS:
        return MODELS[key]
    close = difflib.get_close_matches(key, MODELS, n=3, cutoff=0.6) or list(MODELS)
    raise UsageError(
        f"there is no model named {name!r}; use {', '.join(close)}, or the path of a local Hugging "
        "Face folder"
    )


def spec_from_config(config: Mapping[str, Any], name: str) -> ModelSpec:
    """Return the spec of a model from the contents of its Hugging Face ``config.json``.

    The spec is exact for OPT and Llama models. Other decoder-only models are treated as Llama
    models if the MLP is gated, and as OPT models otherwise. Their configs must use common field
    names.

    Args:
        config: the parsed ``config.json``.
        name: name for the spec, also used in error messages.

    Raises:
        UsageError: if a field is missing or invalid. The message names the field.
    """

    def number(field: str, *keys: str, default: int | None = None) -> int:
        for key in keys:
            value = config.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(
                    f"the config of {name!r} has {key} = {value!r}; it must be a positive integer"
                )
            return value
        if default is not None:
            return default
        raise UsageError(
            f"the config of {name!r} has no {field} ({' or '.join(keys)}), so this model cannot be "
            "trained here; use an OPT or Llama folder"
        )

    def flag(key: str, default: bool) -> bool:
        value = config.get(key)
        return default if value is None else bool(value)

    activation = str(config.get("hidden_act") or config.get("hidden_activation") or "")
    gated = config.get("model_type") == "llama" or (
        "intermediate_size" in config and activation in ("silu", "swish", "gelu_pytorch_tanh")
    )
    width = number("width", "hidden_size", "n_embd", "d_model")
    heads = number("number of heads", "num_attention_heads", "n_head", "num_heads")
    if config.get("head_dim") is None and width % heads:
        raise UsageError(
            f"the config of {name!r} has {heads} heads for a width of {width}; the width must be a "
            "multiple of the number of heads"
        )
    return ModelSpec(
        name=name,
        family=Family.LLAMA if gated else Family.OPT,
        layers=number("number of layers", "num_hidden_layers", "n_layer", "num_layers"),
        width=width,
        heads=heads,
        kv_heads=number("number of key-value heads", "num_key_value_heads", default=heads),
        head_width=number("head width", "head_dim", default=width // heads),
        ffn_width=number(
            "FFN width",
            "ffn_dim",
            "intermediate_size",
            "n_inner",
            "ffn_hidden_size",
            default=None if gated else 4 * width,
        ),
        vocabulary=number("vocabulary", "vocab_size"),
        max_positions=number(
            "longest sequence", "max_position_embeddings", "n_positions", default=2048
        ),
        embedding_width=number("embedding width", "word_embed_proj_dim", default=width),
        tied_head=flag("tie_word_embeddings", default=not gated),
        pre_norm=flag("do_layer_norm_before", default=True),
    )
