"""Run layers in a browser: losses of ten steps, and seconds per layer against native devices.

    python -m benchmarks.web_graphs

Part 1 trains a small OPT of two layers for ten steps with Chromium as the only device, in
WebAssembly and by WebGPU (in software without a GPU), and with a fleet of Chromium, `cleave join`
and an emulated device. It prints the losses next to plain PyTorch's, and ends with 1 if they differ
by more than 1e-4. Part 2 runs a layer of OPT-125M's size, 4 x 128 tokens, forward and backward, on
each of the three devices, with one thread, and prints the median of the times that the devices
report for each graph. Pages must be built first (`make web`).
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

import cleave
from cleave.arrays import DType
from cleave.graphs.graph_cache import GraphCache
from cleave.graphs.model_graphs import model_graphs
from cleave.planner.stages.model import PsCompute
from cleave.protocol import messages
from cleave.server.fleet_server import Server
from cleave.server.http.pages import Pages
from cleave.training.stages.stage_work import ModelWork
from cleave.training.stages.staged import Rows, StagedModel
from tests.graphs.models import plain_gradients, small_model, trained
from tests.integration.processes import started, wait_for_event
from tests.training.test_staged import EvenStages
from tests.web.browser import chromium
from tests.web.test_join import forced

STEPS: Final = 10
APART: Final = 1e-4
WAIT_MS: Final = 60_000
_PS: Final = PsCompute(1e11, 0.0)


@contextmanager
def browser_device(server: Server, kernel: str = "wasm") -> Iterator[None]:
    """Run Chromium as a device; on a machine with two cores it gets one thread."""
    with chromium() as browser:
        page = browser.new_page()
        page.goto(forced(server.page_url, kernel))
        page.get_by_role("button", name="Start helping").click()
        page.wait_for_selector("[data-state=working]", timeout=WAIT_MS)
        yield


@contextmanager
def emulated_device(server: Server) -> Iterator[None]:
    """Run an emulated device in real time that really computes."""
    command = ("emulate", "--devices", "1", "--fleet", "home-mix", "--server", server.url)
    with started(*command, "--speed", "100", "--json"):
        yield


@contextmanager
def native_device(server: Server) -> Iterator[None]:
    """Run `cleave join` as a device with one thread."""
    command = ("join", server.url, "--provider", "cpu", "--backend", "numpy", "--json")
    with started(*command, "--threads", "1") as (_, lines):
        wait_for_event(lines, "ready")
        yield


@contextmanager
def mixed_fleet(server: Server) -> Iterator[None]:
    """Run one device of each kind."""
    with browser_device(server), native_device(server), emulated_device(server):
        yield


Devices = Callable[[Server], AbstractContextManager[None]]

DEVICES: Final[dict[str, Devices]] = {
    "Chromium, WASM": browser_device,
    "Chromium, WebGPU": partial(browser_device, kernel="webgpu"),
    "native": native_device,
}

FLEETS: Final[dict[str, tuple[Devices, int]]] = {
    "Chromium, WASM": (DEVICES["Chromium, WASM"], 1),
    "Chromium, WebGPU": (DEVICES["Chromium, WebGPU"], 1),
    "Chromium, join, emulated": (mixed_fleet, 3),
}


def rows_of(ids: Tensor) -> Rows:
    """Return a batch whose targets are the next tokens."""
    targets = torch.full_like(ids, -100)
    targets[:, :-1] = ids[:, 1:]
    return Rows(ids, targets)


def plain_losses(model: nn.Module, batches: Sequence[Tensor]) -> list[float]:
    """Return the losses of plain PyTorch."""
    return trained(model, lambda ids: plain_gradients(model, ids), batches, clip=1.0)


def fleet_losses(
    model: nn.Module, cache: GraphCache, batches: Sequence[Tensor], devices: Devices, count: int
) -> list[float]:
    """Return the losses by stages on `count` devices, once all have joined."""
    pages = Pages.of_package().answer
    graphs = model_graphs(model, batches[0].shape[1], cache)
    with cleave.serve(stages_on="any", pages=pages) as server, devices(server):
        while len(server.fleet.runtime.stage_devices()) < count:
            time.sleep(0.1)
        work = ModelWork(model, graphs, DType.FP32)
        staged = StagedModel(work, server.fleet.runtime, EvenStages(loss=True), _PS)

        def gradients(ids: Tensor) -> Any:
            return staged.gradients(rows_of(ids))

        try:
            return trained(model, gradients, batches, clip=1.0)
        finally:
            staged.close()


def losses(cache: GraphCache) -> bool:
    """Print differences of losses from plain PyTorch's; return whether they are in the limit."""
    model, tokens = small_model("opt"), 12
    torch.manual_seed(4)
    batches = [torch.randint(3, 96, (6, tokens)) for _ in range(STEPS)]
    expected = plain_losses(copy.deepcopy(model), batches)
    print(f"{'plain PyTorch':26}losses {expected[0]:.5f} ... {expected[-1]:.5f}", flush=True)
    good = True
    for name, (devices, count) in FLEETS.items():
        found = fleet_losses(copy.deepcopy(model), cache, batches, devices, count)
        worst = max(abs(f - e) / abs(e) for f, e in zip(found, expected, strict=True))
        good &= worst <= APART
        print(f"{name:26}losses {found[0]:.5f} ... {found[-1]:.5f}, {worst:.1e} apart", flush=True)
    return good


def layer_seconds(cache: GraphCache, name: str) -> None:
    """Print the seconds of a layer's graphs on a device."""
    import transformers

    config: Any = transformers.OPTConfig(num_hidden_layers=1, dropout=0.0, vocab_size=512)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).train()
    graphs = model_graphs(model, 128, cache)
    took: dict[bool, list[float]] = {False: [], True: []}
    backward: dict[int, bool] = {}
    graph_ids: list[int] = []  # the forward graph runs first
    with cleave.serve(stages_on="any", pages=Pages.of_package().answer) as server:
        send, received = server.live.send, server.live.manager.received

        def sent(session: int, message: Any, kind: Any) -> None:
            if isinstance(message, messages.RunGraph):
                graph_ids.append(message.graph)
                backward[message.id] = message.graph != graph_ids[0]
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
        f"{name:26}forward {medians[False]:.3f} s, backward {medians[True]:.3f} s a run "
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
        good = losses(cache)
        for name in DEVICES:
            layer_seconds(cache, name)
    print(f"{time.perf_counter() - began_s:.0f} s in all")
    if not good:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
