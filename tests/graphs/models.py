"""Small models of several families, and how plain PyTorch trains them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cleave.graphs.graph_cache import GraphCache
from cleave.graphs.loss_graph import IGNORED
from cleave.graphs.model_graphs import ModelGraphs, model_graphs

VOCABULARY: Final = 96
WIDTH: Final = 32
TOKENS: Final = 12
"""Of a sequence, where no other length is the point: a graph is made once for all tests."""

ADAPTED: Final = ("q_proj", "v_proj", "down_proj")
"""Products that have adapters, where no others are the point; of rank 4, for the same reason."""

_LLAMA: Final = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def small_model(family: str, **changed: Any) -> nn.Module:
    """A model of two layers, by the name of its family.

    Of 'qwen3_moe' every second layer has experts, which cannot become a graph.
    """
    import transformers

    torch.manual_seed(1)
    config: Any
    match family:
        case "opt":
            config = transformers.OPTConfig(
                hidden_size=WIDTH, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
                vocab_size=VOCABULARY, max_position_embeddings=64, word_embed_proj_dim=WIDTH,
                **{"dropout": 0.0, **changed},
            )  # fmt: skip
        case "gpt2":
            config = transformers.GPT2Config(
                n_embd=WIDTH, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2,
                **{
                    "vocab_size": VOCABULARY, "n_positions": 64, "attn_pdrop": 0.0,
                    "resid_pdrop": 0.0, "embd_pdrop": 0.0, **changed,
                },
            )  # fmt: skip
        case "llama":
            config = transformers.LlamaConfig(**{**_LLAMA, **changed})
        case "qwen2":
            config = transformers.Qwen2Config(**{**_LLAMA, **changed})
        case "qwen3":
            config = transformers.Qwen3Config(**{**_LLAMA, **changed})
        case "qwen3_moe":
            experts = {
                "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                "decoder_sparse_step": 2,
            }  # fmt: skip
            config = transformers.Qwen3MoeConfig(**{**_LLAMA, **experts, **changed})
        case "mistral":
            config = transformers.MistralConfig(**{**_LLAMA, "sliding_window": 8, **changed})
        case "gemma2":
            config = transformers.Gemma2Config(**{**_LLAMA, "sliding_window": 8, **changed})
        case "phi":
            dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0}
            config = transformers.PhiConfig(**{**_LLAMA, **dropouts, **changed})
        case _:
            raise ValueError(f"no family {family}")
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model.train()


def with_lora(model: Any, targets: str | Sequence[str] = ADAPTED) -> nn.Module:
    """A Llama-like model with adapters on some of its products, which alone are trained."""
    import peft

    torch.manual_seed(2)
    chosen = targets if isinstance(targets, str) else list(targets)
    adapted: Any = peft.get_peft_model(
        model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=chosen, init_lora_weights=False)
    )
    found: nn.Module = adapted.base_model.model
    return found.train()


def graphs_of(model: nn.Module, **how: Any) -> ModelGraphs:
    """Return the graphs of a model for sequences of `TOKENS`, from the cache of all tests."""
    return model_graphs(model, TOKENS, GraphCache.of_user(), **how)


def plain_gradients(model: Any, ids: Tensor, mask: Tensor | None = None) -> float:
    """Set the gradients of a batch by plain PyTorch; return its loss."""
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    expected = ids if mask is None else torch.where(mask > 0, ids, IGNORED)
    loss = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), expected[:, 1:].flatten(), ignore_index=IGNORED
    )
    torch.autograd.backward(loss)
    return float(loss.detach())


def trained(
    model: nn.Module,
    gradients: Callable[[Tensor], float],
    batches: Sequence[Tensor],
    *,
    clip: float | None,
) -> list[float]:
    """The losses of a step for each batch, with AdamW."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=5e-3)
    losses = []
    for ids in batches:
        optimizer.zero_grad()
        losses.append(gradients(ids))
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(trainable, clip)
        optimizer.step()
    return losses
