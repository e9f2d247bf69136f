"""Small models of several families, and the stages of a model in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cleave.arrays import Array, Buffer, from_torch
from cleave.graphs.loss_graph import IGNORED
from cleave.graphs.model_graphs import ModelGraphs
from cleave.graphs.outside import OutsideLayers
from cleave.machine import graph_names as names
from cleave.machine.graph_session import GraphSession
from cleave.machine.stage import Stage, StageLayer

VOCABULARY: Final = 96
WIDTH: Final = 32
_LLAMA: Final = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def small_model(family: str, **changed: Any) -> nn.Module:
    """A model of two layers; 'opt', 'gpt2', 'llama', 'qwen3', 'gemma2', 'phi' or 'mistral'."""
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
                n_embd=WIDTH, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=64,
                bos_token_id=1, eos_token_id=2,
                **{"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, **changed},
            )  # fmt: skip
        case "llama":
            config = transformers.LlamaConfig(**{**_LLAMA, **changed})
        case "qwen2":
            config = transformers.Qwen2Config(**{**_LLAMA, **changed})
        case "qwen3":
            config = transformers.Qwen3Config(**{**_LLAMA, **changed})
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


def with_lora(model: Any) -> nn.Module:
    """A Llama-like model with adapters on three of its products, which alone are trained."""
    import peft

    torch.manual_seed(2)
    targets = ["q_proj", "v_proj", "down_proj"]
    adapted: Any = peft.get_peft_model(
        model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    )
    found: nn.Module = adapted.base_model.model
    return found.train()


def buffer_of(tensor: Tensor) -> Buffer:
    """A parameter as it travels: a matrix."""
    flat = tensor.detach()
    return from_torch(flat[None] if flat.dim() < 2 else flat.reshape(-1, flat.shape[-1]))


class StagesInProcess:
    """A model whose layers are stages of one layer each, trained without any network.

    Args:
        model: the model; its parameters get the gradients.
        graphs: its graphs.
        twice: whether every backward is sent again, which must change nothing.
    """

    def __init__(self, model: nn.Module, graphs: ModelGraphs, *, twice: bool = False) -> None:
        self.model = model
        self._graphs = graphs
        self._twice = twice
        sessions = {
            id(g): (GraphSession(g.forward), GraphSession(g.backward)) for g in graphs.layers
        }
        self._sessions = [sessions[id(g)] for g in graphs.layers]
        self._loss = GraphSession(graphs.loss.graph)
        self._outside = OutsideLayers(model, graphs.calls)

    def gradients(self, ids: Tensor, mask: Tensor | None = None) -> float:
        """Set the gradients of a batch; return its loss."""
        targets = torch.full_like(ids, IGNORED)
        targets[:, :-1] = ids[:, 1:] if mask is None else torch.where(mask > 0, ids, IGNORED)[:, 1:]
        scale = np.float32(1 / int((targets != IGNORED).sum()))
        stages = self._stages()
        held = dict(self.model.named_parameters())
        trainable = self._graphs.loss.trainable
        totals = {n: np.zeros(held[n].shape, np.float32) for n in trainable}
        loss = 0.0
        for sample in range(len(ids)):
            row = slice(sample, sample + 1)
            embedded = self._outside.embed(ids[row], None if mask is None else mask[row])
            beside = [
                {n: t.detach().numpy() for n, t in found.items()} for found in embedded.beside
            ]
            given: list[Array] = [embedded.x.detach().numpy()]
            for number, stage in enumerate(stages):
                keep = bool(sample % 2)
                given.append(stage.forward(sample, given[-1], [beside[number]], keep=keep))
            found = self._run_loss(given.pop(), targets[sample], scale, totals)
            loss += float(found[names.LOSS][0])
            totals = {n: found[names.new_total(n)] for n in trainable}
            dy = found[names.DX].reshape(given[0].shape)
            for number in reversed(range(len(stages))):
                send = (0, sample, given[number], dy, [beside[number]])
                dy = stages[number].backward(*send)
                if self._twice:
                    np.testing.assert_array_equal(stages[number].backward(*send), dy)
            if embedded.x.requires_grad:
                torch.autograd.backward(embedded.x, torch.from_numpy(dy))
        for name, total in totals.items():
            before = held[name].grad  # of a tied embedding
            mine = torch.from_numpy(total)
            held[name].grad = mine if before is None else before + mine
        for stage, call in zip(stages, self._graphs.calls, strict=True):
            (found_here,) = stage.gradients(0)
            for name, parameter in call.layer.named_parameters():
                if name in found_here:
                    parameter.grad = torch.from_numpy(found_here[name])
        return loss

    def _stages(self) -> list[Stage]:
        layers = zip(self._sessions, self._graphs.layers, self._graphs.calls, strict=True)
        return [
            Stage(
                [
                    StageLayer(
                        *sessions,
                        {n: buffer_of(p) for n, p in call.layer.named_parameters()},
                        graphs.trainable,
                    )
                ]
            )
            for sessions, graphs, call in layers
        ]

    def _run_loss(
        self, x: Array, targets: Tensor, scale: np.float32, totals: dict[str, Array]
    ) -> dict[str, Array]:
        held = dict(self.model.named_parameters())
        feed: dict[str, Any] = {
            names.X: x.reshape(-1, 1, x.shape[-1]), names.TARGETS: targets.numpy(),
            names.SCALE: np.asarray(scale),
        }  # fmt: skip
        feed |= {names.parameter(n): held[n].detach().numpy() for n in self._graphs.loss.parameters}
        feed |= {names.total(n): total for n, total in totals.items()}
        return self._loss.run(feed)


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
