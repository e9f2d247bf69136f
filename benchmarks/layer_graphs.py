"""Check layers as graphs: supported models, accuracy and speed.

    python -m benchmarks.layer_graphs [--quick]

Part 1 exports small models of several families, with and without a padding mask, and with `peft`
adapters. It compares a layer's output, input gradient and parameter gradients with plain PyTorch,
relative to the largest element, and runs with one and two threads.

Part 2 times a layer of OPT-125M with 4 x 512 tokens, forward and backward (with recomputation), by
graph and by PyTorch in turn. It prints the median ratio of the pairs.

Part 3 measures the cost of importing ONNX Runtime in a device's process.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from cleave import graph_names as names
from cleave.arrays import Array
from cleave.graphs.calls import LayerCall, layer_calls
from cleave.graphs.layer_parts import LayerGraphs, LayerPart, export_layer, tensors_of
from cleave.machine.graph_session import GraphSession
from tests.graphs.models import small_model, with_lora

FAMILIES: Final = ("opt", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt2", "phi")
LIMIT: Final = 1e-5
"""Limit of differences, relative to the largest element of the compared array."""

_TOKENS: Final = 24


def masked(tokens: int) -> Tensor:
    """Return the mask of a batch of two sequences, the second of which is padded."""
    mask = torch.ones(2, tokens, dtype=torch.long)
    mask[1, tokens // 2 :] = 0
    return mask


def inputs_of(call: LayerCall, graphs: LayerGraphs, x: Tensor, dy: Tensor) -> dict[str, Array]:
    """Return all inputs of a layer's graphs."""
    held = tensors_of(call.layer)
    feed: dict[str, Array] = {names.X: x.detach().numpy(), names.DY: dy.numpy()}
    feed |= {names.parameter(n): t.detach().numpy() for n, t in held.items()}
    feed |= {names.extra(n): t.numpy() for n, t in call.extras.items()}
    zeros = {names.total(n): np.zeros(held[n].shape, np.float32) for n in graphs.trainable}
    return feed | zeros


def by_torch(call: LayerCall, x: Tensor, dy: Tensor) -> dict[str, Array]:
    """Return the graphs' outputs as computed by PyTorch."""
    held = dict(call.layer.named_parameters())
    trained = {n: p for n, p in held.items() if p.requires_grad}
    y = call.run(tensors_of(call.layer), x, call.extras)
    dx, *gradients = torch.autograd.grad(y, [x, *trained.values()], dy)
    found = {names.Y: y.detach().numpy(), names.DX: dx.numpy()}
    return found | {names.new_total(n): g.numpy() for n, g in zip(trained, gradients, strict=True)}


def errors(found: dict[str, Array], wanted: dict[str, Array]) -> tuple[float, float, float]:
    """Return the largest errors of y, dx and the gradients, relative to the largest element.

    Gradients are relative to the layer's largest element, because some gradients are only noise.
    """

    def relative(name: str) -> float:
        return float(np.abs(found[name] - wanted[name]).max() / np.abs(wanted[name]).max())

    sums = [name for name in wanted if name not in (names.Y, names.DX)]
    largest = max(float(np.abs(wanted[name]).max()) for name in sums)
    off = max(float(np.abs(found[name] - wanted[name]).max()) for name in sums)
    return relative(names.Y), relative(names.DX), off / largest


def compare(title: str, model: nn.Module, mask: Tensor | None) -> bool:
    """Make a layer's graphs and print their errors; return whether they are within the limit."""
    ids = torch.arange(2 * _TOKENS).reshape(2, _TOKENS)
    began_s = time.perf_counter()
    call = layer_calls(model, ids, mask)[0]
    graphs = export_layer(LayerPart.whole(call, 0))
    took_s = time.perf_counter() - began_s
    x = torch.randn(call.x.shape, requires_grad=True)
    dy = torch.randn(call.x.shape)
    feed = inputs_of(call, graphs, x, dy)
    by_threads = []
    for threads in (1, 2):
        forward, backward = (GraphSession(g, threads) for g in (graphs.forward, graphs.backward))
        by_threads.append({**forward.run(feed), **backward.run(feed)})
    same = all(np.array_equal(by_threads[0][n], by_threads[1][n]) for n in by_threads[0])
    worst = errors(by_threads[0], by_torch(call, x, dy))
    print(
        f"{title:16} {took_s:5.1f} s  {len(graphs.forward):6} + {len(graphs.backward):6} bytes  "
        f"y {worst[0]:.0e}  dx {worst[1]:.0e}  sums {worst[2]:.0e}  "
        f"{'bit-equal' if same else 'not bit-equal'} for 1 and 2 threads",
        flush=True,
    )
    return max(worst) <= LIMIT


def timed(work: Callable[[], object]) -> float:
    """Return the duration of a call in seconds."""
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def speed(pairs: int) -> None:
    """Print a layer's time by graph relative to PyTorch's."""
    import transformers

    config: Any = transformers.OPTConfig(num_hidden_layers=1, dropout=0.0, vocab_size=512)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    call = layer_calls(model, torch.zeros(4, 512, dtype=torch.long))[0]
    graphs = export_layer(LayerPart.whole(call, 0))
    x, dy = torch.randn(call.x.shape, requires_grad=True), torch.randn(call.x.shape)
    feed = inputs_of(call, graphs, x, dy)
    forward, backward = (GraphSession(g) for g in (graphs.forward, graphs.backward))

    def plain() -> None:
        with torch.no_grad():
            call.run(tensors_of(call.layer), x, call.extras)
        by_torch(call, x, dy)

    ratios = []
    for pair in range(pairs + 1):
        torch_s = timed(plain)
        graph_s = timed(lambda: (forward.run(feed), backward.run(feed)))
        if pair:  # the first pair is a warm-up
            ratios.append(graph_s / torch_s)
    print(
        f"a layer of OPT-125M, 4 x 512 tokens, forward and backward: {graph_s:.3f} s by graph, "
        f"{statistics.median(ratios):.2f} times PyTorch's ({min(ratios):.2f} to {max(ratios):.2f})"
    )


def importing() -> None:
    """Print the cost of importing ONNX Runtime in a process that has loaded numpy."""
    code = (
        "import time, numpy, psutil\n"
        "def here(): return psutil.Process().memory_info().rss / 2**20\n"
        "before, began = here(), time.perf_counter()\n"
        "import onnxruntime\n"
        "print(f'importing ONNX Runtime: {time.perf_counter() - began:.2f} s and '\n"
        "      f'{here() - before:.0f} MB more')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two families and few pairs")
    options = parser.parse_args()
    torch.manual_seed(0)
    exact = []
    for family in FAMILIES[:2] if options.quick else FAMILIES:
        exact.append(compare(family, small_model(family), None))
        exact.append(compare(f"{family}, padded", small_model(family), masked(_TOKENS)))
    exact.append(compare("llama with LoRA", with_lora(small_model("llama")), None))
    print(f"all within {LIMIT:.0e}: {'yes' if all(exact) else 'NO'}")
    speed(3 if options.quick else 9)
    importing()


if __name__ == "__main__":
    main()
