"""Compare the memory of layers run as graphs with the planner's estimate.

    python -m benchmarks.layer_memory [--quick]

A separate process runs only a layer's forward and backward graphs, several times in turn, as a
device does. *Measured* is its peak resident memory above that with sessions and inputs loaded.
*Planned* is the planner's estimate: the layer's working memory and the graphs' outputs. Ends with 1
if an estimate is more than 15 % off.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from benchmarks import graph_memory
from cleave import graph_names as names
from cleave.arrays import Array, DType
from cleave.graphs.calls import layer_calls
from cleave.graphs.layer_parts import LayerPart, export_layer, tensors_of
from cleave.graphs.loss_graph import export_loss
from cleave.graphs.model_graphs import ModelGraphs
from cleave.training.stages.stage_work import ModelWork

_MB: Final = 2**20
_RIGHT: Final = 0.15


@dataclass(frozen=True)
class Shape:
    """The sizes of a layer and its input."""

    family: str
    width: int
    inner: int
    heads: int
    key_heads: int
    tokens: int
    samples: int = 1
    padded: bool = False


SHAPES: Final = (
    Shape("opt", 768, 3072, 12, 12, 4096),
    Shape("llama", 256, 1024, 4, 2, 4096, 1, padded=True),
    Shape("gemma2", 768, 3072, 12, 4, 2048),
    Shape("opt", 768, 3072, 12, 12, 1024),
    Shape("opt", 2048, 8192, 32, 32, 512),
    Shape("opt", 768, 3072, 12, 12, 512, 4),
    Shape("llama", 768, 2048, 12, 4, 2048, 2),
    Shape("llama", 768, 2048, 12, 12, 512, 2),
    Shape("llama", 768, 2048, 12, 12, 1024),
    Shape("llama", 768, 2048, 12, 12, 4096),
)


def model_of(shape: Shape) -> nn.Module:
    """Return a model with one layer of this shape."""
    import transformers

    config: Any
    if shape.family == "opt":
        config = transformers.OPTConfig(
            hidden_size=shape.width, ffn_dim=shape.inner, num_hidden_layers=1, dropout=0.0,
            num_attention_heads=shape.heads, word_embed_proj_dim=shape.width, vocab_size=512,
            max_position_embeddings=shape.tokens,
        )  # fmt: skip
    else:
        kind = {
            "llama": transformers.LlamaConfig,
            "gemma2": transformers.Gemma2Config,
        }[shape.family]
        config = kind(
            hidden_size=shape.width, intermediate_size=shape.inner, num_hidden_layers=1,
            num_attention_heads=shape.heads, num_key_value_heads=shape.key_heads, vocab_size=512,
            head_dim=shape.width // shape.heads, max_position_embeddings=shape.tokens,
        )  # fmt: skip
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def compare(shape: Shape) -> bool:
    """Measure a layer, print its memory, and return whether the planner was within 15 %."""
    torch.manual_seed(0)
    model = model_of(shape)
    ids = torch.arange(2 * shape.tokens).reshape(2, shape.tokens) % 512
    mask = torch.ones_like(ids) if shape.padded else None
    if mask is not None:
        mask[1, shape.tokens // 2 :] = 0
    call = layer_calls(model, ids, mask)[0]
    graphs = export_layer(LayerPart.whole(call, 0))
    x = torch.randn(shape.samples, *call.x.shape[1:])
    feed: dict[str, Array] = {names.X: x.numpy(), names.DY: x.flip(0).numpy()}
    held = tensors_of(call.layer)
    feed |= {names.parameter(n): t.detach().numpy() for n, t in held.items()}
    feed |= {
        names.extra(n): t[: shape.samples].numpy() if t.shape[:1] == (2,) else t.numpy()
        for n, t in call.extras.items()
    }
    feed |= {names.total(n): np.zeros(held[n].shape, np.float32) for n in graphs.trainable}
    with tempfile.TemporaryDirectory() as name:
        graph_memory.write(Path(name), graphs.forward, graphs.backward, feed)
        command = [sys.executable, "-m", "benchmarks.graph_memory", name]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = json.loads(printed)
    took = found["most"] - found["before"]
    work = ModelWork(
        model,
        ModelGraphs([call], [LayerPart.whole(call, 0)], [graphs], export_loss(model, [call])),
        DType.FP32,
    )
    tokens = shape.samples * shape.tokens
    cost = work.costs([tokens], shape.tokens, DType.FP32).layers[0]
    planned = cost.working_bytes * tokens + 2 * x.numel() * x.element_size()
    off = planned / took - 1
    where = f"{shape.family}, {shape.samples} x {shape.tokens} tokens, width {shape.width}"
    print(
        f"{where:38} {took / _MB:5.0f} MB of {found['most'] / _MB:5.0f} MB in all, "
        f"{planned / _MB:5.0f} MB planned ({off:+.0%})  "
        f"{' + '.join(f'{seconds:.2f}' for seconds in found['seconds'])} s",
        flush=True,
    )
    return bool(abs(off) <= _RIGHT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the first two layers")
    options = parser.parse_args()
    right = [compare(shape) for shape in (SHAPES[:2] if options.quick else SHAPES)]
    print(f"planned within 15 % of what was measured: {'yes' if all(right) else 'NO'}")
    sys.exit(0 if all(right) else 1)


if __name__ == "__main__":
    main()
