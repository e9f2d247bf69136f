"""Train in plain PyTorch, without Cleave, in bf16 and with little memory.

    python -m benchmarks.plain_step MODEL BATCH TOKENS CLIP

Weights and tokens are random. Uses gradient checkpointing, an AdamW step on each parameter as soon
as its gradient is complete, and bf16 autocast, as PyTorch's documentation recommends for little
memory. Clipping (CLIP above 0) needs the norm of all gradients before the first update. They do not
fit in memory together, so the norm takes a separate backward pass. Prints a line of JSON for each
of two steps, with its loss and seconds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, OPTConfig

from cleave.workload.registry import find_model

STEPS = 2


def main() -> None:
    """Train."""
    name, batch, tokens, clip = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    spec = find_model(name)  # only the sizes are used
    config = OPTConfig(
        vocab_size=spec.vocabulary, hidden_size=spec.width, num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads, ffn_dim=spec.ffn_width, word_embed_proj_dim=spec.width,
        max_position_embeddings=spec.max_positions, dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.train()
    optimizers = {
        parameter: torch.optim.AdamW([parameter], lr=1e-4, fused=True)
        for parameter in model.parameters()
    }

    norms: list[Tensor] = []
    scale = 1.0

    def note_norm(parameter: Tensor) -> None:
        assert parameter.grad is not None
        norms.append(parameter.grad.norm())
        parameter.grad = None

    def step(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if scale != 1.0:
            parameter.grad.mul_(scale)
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    def backward(ids: Tensor, hook: Callable[[Tensor], None]) -> float:
        handles = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters()]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
            loss = cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        torch.autograd.backward(loss)
        for handle in handles:
            handle.remove()
        return loss.item()

    for _ in range(STEPS):
        ids = torch.randint(spec.vocabulary, (batch, tokens + 1))
        began_s = time.perf_counter()
        if clip:
            norms.clear()
            backward(ids, note_norm)
            scale = min(1.0, clip / (torch.stack(norms).norm().item() + 1e-6))
        loss = backward(ids, step)
        seconds = time.perf_counter() - began_s
        print(json.dumps({"loss": loss, "wall_s": seconds}), flush=True)


if __name__ == "__main__":
    main()
