"""Layers in a browser: losses of ten steps, and seconds a layer beside ONNX Runtime on one core.

    python -m benchmarks.web_graphs

Part 1 trains a small OPT of two layers for ten steps with Chromium as the only device, and prints
its losses and those of plain PyTorch. Part 2 runs a layer of OPT-125M's size, 4 x 128 tokens,
forward and backward, on Chromium in WebAssembly and on `cleave join`, each with one thread, and
prints the median of what the devices say that each graph took. Pages have to be built (`make web`).
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

import cleave
from cleave.arrays import DType
from cleave.graphs.graph_cache import GraphCache
from cleave.graphs.model_graphs import model_graphs
from cleave.planner.stages import PsCompute
from cleave.protocol import messages
from cleave.server.fleet_server import Server
from cleave.server.http.pages import Pages
from cleave.training.stage_work import ModelWork
from cleave.training.staged import Rows, StagedModel
from tests.graphs.models import plain_gradients, small_model, trained
from tests.integration.processes import started, wait_for_event
from tests.training.test_staged import EvenStages
from tests.web.browser import chromium

STEPS: Final = 10
WAIT_MS: Final = 60_000
_PS: Final = PsCompute(1e11, 0.0)


@contextmanager
def browser_device(server: Server) -> Iterator[None]:
    """Have Chromium as a device; a machine of two cores gives it one thread."""
    with chromium() as browser:
        page = browser.new_page()
        page.goto(server.page_url)
        page.get_by_role("button", name="Start helping").click()
        page.wait_for_selector("[data-state=working]", timeout=WAIT_MS)
        yield


@contextmanager
def native_device(server: Server) -> Iterator[None]:
    """Have `cleave join` as a device, with one thread."""
    command = ("join", server.url, "--provider", "cpu", "--executor", "numpy", "--json")
    with started(*command, "--threads", "1") as (_, lines):
        wait_for_event(lines, "ready")
        yield


DEVICES: Final = {"Chromium, WASM": browser_device, "native": native_device}


def rows_of(ids: Tensor) -> Rows:
    """Return a batch whose targets are the next tokens."""
    targets = torch.full_like(ids, -100)
    targets[:, :-1] = ids[:, 1:]
    return Rows(ids, targets)


def losses(cache: GraphCache) -> None:
    """Print the losses of a browser alone and of plain PyTorch."""
    model, tokens = small_model("opt"), 12
    plain = copy.deepcopy(model)
    graphs = model_graphs(model, tokens, cache)
    torch.manual_seed(4)
    batches = [torch.randint(3, 96, (6, tokens)) for _ in range(STEPS)]
    pages = Pages.of_package().answer
    with cleave.serve(stages_on="any", pages=pages) as server, browser_device(server):
        work = ModelWork(model, graphs, DType.FP32)
        staged = StagedModel(work, server.fleet.runtime, EvenStages(loss=True), _PS)

        def gradients(ids: Tensor) -> Any:
            return staged.gradients(rows_of(ids))

        found = trained(model, gradients, batches, clip=1.0)
        staged.close()
    expected = trained(plain, lambda ids: plain_gradients(plain, ids), batches, clip=1.0)
    worst = max(abs(f - e) / abs(e) for f, e in zip(found, expected, strict=True))
    print(f"losses in Chromium    {found[0]:.5f} ... {found[-1]:.5f}")
    print(f"in plain PyTorch      {expected[0]:.5f} ... {expected[-1]:.5f}")
    print(f"largest difference of {STEPS} steps: {worst:.1e} of the loss", flush=True)


def layer_seconds(cache: GraphCache, name: str) -> None:
    """Print what a layer's graphs take on a device."""
    import transformers

    config: Any = transformers.OPTConfig(num_hidden_layers=1, dropout=0.0, vocab_size=512)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).train()
    graphs = model_graphs(model, 128, cache)
    took: dict[bool, list[float]] = {False: [], True: []}
    backward: dict[int, bool] = {}
    with cleave.serve(stages_on="any", pages=Pages.of_package().answer) as server:
        send, received = server.live.send, server.live.manager.received

        def sent(session: int, message: Any, kind: Any) -> None:
            if isinstance(message, messages.RunGraph):
                backward[message.id] = len(message.outputs) > 1
            send(session, message, kind)

        def heard(session: int, message: Any, *rest: Any) -> Any:
            if isinstance(message, messages.Computed):
                took[backward[message.id]].append(message.compute_s)
            return received(session, message, *rest)

        server.live.send = sent  # type: ignore[method-assign]
        server.live.manager.received = heard  # type: ignore[method-assign, assignment]
        with DEVICES[name](server):
            work = ModelWork(model, graphs, DType.FP32)
            staged = StagedModel(work, server.fleet.runtime, EvenStages(loss=False), _PS)
            for _ in range(4):
                staged.gradients(rows_of(torch.randint(3, 500, (4, 128))))
            staged.close()
    medians = {of: statistics.median(seconds) for of, seconds in took.items()}
    print(
        f"{name:16} forward {medians[False]:.3f} s, backward {medians[True]:.3f} s a run "
        f"({len(took[False])} and {len(took[True])} runs)",
        flush=True,
    )


def main() -> None:
    """Run both parts."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        cache = GraphCache(Path(folder))
        losses(cache)
        for name in DEVICES:
            layer_seconds(cache, name)
    print(f"{time.perf_counter() - began_s:.0f} s in all")


if __name__ == "__main__":
    main()
