"""Measure what a GPU adds: layers by every runner of this machine, and a step that is served.

    python -m benchmarks.gpu [--models opt-125m,opt-1.3b,llama-2-7b] [--batch 8] [--seq 512]
        [--served opt-1.3b] [--dtype bf16] [--processor cuda:0] [--json]

Part 1 runs both graphs of a layer of each model, with every runner and in every dtype of its matrix
products. Arrays stay on the processor. Prints for each the norm of the difference from the CPU in
fp32, relative to the norm of the CPU's results (of output and gradients together); the TFLOP/s; and
the share of the speed of plain PyTorch, which runs the same passes on the same processor, in the
same dtype. WebGPU is compared with PyTorch's first GPU in fp32. Processors without a GPU get one
sequence instead of `--batch`.

Part 2, if PyTorch finds a GPU or `--processor` names a processor: a server, one device process with
that GPU, on loopback, by stages, against plain PyTorch on the GPU with batches of the same size.
`--served none` leaves it out.

The goals: at least 0.8 of plain PyTorch by the torch runner, and 0.3 in fp32 by WebGPU; a served
step in at most 1.3 times plain PyTorch's.
"""

from __future__ import annotations

import argparse
import copy
import json
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.common import machine
from benchmarks.layer_graphs import inputs_of
from benchmarks.side_by_side.processes import Processes
from cleave import arrays
from cleave import graph_names as names
from cleave.arrays import Array, DType
from cleave.graphs.calls import LayerCall, layer_calls
from cleave.graphs.layer_parts import LayerGraphs, LayerPart, export_layer, tensors_of
from cleave.machine.backends import torch_devices
from cleave.machine.graph_choice import Runner, open_on_cpu, runners
from cleave.machine.graph_run import on_host
from cleave.machine.graph_session import GraphError
from cleave.workload.build import build_model
from cleave.workload.registry import find_model

_CLEAVE: Final = (sys.executable, "-m", "cleave_cli")
_RUNS: Final = 3
_STEPS: Final = 4


@dataclass
class Row:
    """A layer by one runner: the error, the speed, and the share of plain PyTorch's speed."""

    model: str
    runner: str
    dtype: str
    error: float = 0.0
    tflops_per_s: float = 0.0
    share: float = 0.0
    fault: str = ""

    @property
    def text(self) -> str:
        """Return the row of a table."""
        begin = f"{self.model:12} {self.runner:12} {self.dtype:5}"
        if self.fault:
            return f"{begin} {self.fault[:50]}"
        return f"{begin} {self.error:8.0e} {self.tflops_per_s:9.3f} {self.share:6.2f}"


class Layer:
    """A layer of a model with random weights, as graphs and in PyTorch.

    Args:
        name: the model in the registry.
        sequence: tokens per sequence.
    """

    def __init__(self, name: str, sequence: int) -> None:
        self.name = name
        self._sequence = sequence
        spec = find_model(name)
        sizes = replace(spec, layers=1, vocabulary=512, max_positions=max(sequence, 64))
        self._model: nn.Module = build_model(sizes, seed=0)
        self.graphs: LayerGraphs = export_layer(LayerPart.whole(self._call(2), 0))
        matrices = [p.numel() for p in self._call(1).layer.parameters() if p.dim() == 2]
        # As `cleave train` counts them: both graphs together run the forward pass twice.
        self.flops_per_token = 8 * sum(matrices) + 16 * sequence * spec.width

    def _call(self, batch: int) -> LayerCall:
        return layer_calls(self._model, torch.zeros(batch, self._sequence, dtype=torch.long))[0]

    def feed(self, batch: int) -> dict[str, Array]:
        """Return the inputs of both graphs. Parameters are exact in bf16."""
        call, random = self._call(batch), torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in call.layer.parameters():
                parameter.copy_(parameter.bfloat16())
        shape = call.x.shape
        x, dy = (torch.randn(shape, generator=random).bfloat16().float() for _ in range(2))
        return inputs_of(call, self.graphs, x, dy)

    def by(
        self, runner: Runner, products: DType | None, batch: int
    ) -> tuple[dict[str, Array], float]:
        """Run both graphs; return their results and the seconds of both runs together."""
        found: dict[str, Array] = {}
        feed, took_s = self.feed(batch), 0.0
        for model in (self.graphs.forward, self.graphs.backward):
            order = list(open_on_cpu(model).inputs)
            given = [
                products if name.startswith(names.parameter("")) and feed[name].ndim == 2 else None
                for name in order
            ]
            session = runner.open(model, given, products)
            uploaded = {
                name: session.upload(
                    arrays.narrow(feed[name], DType.BF16) if name in session.narrow else feed[name]
                )
                for name in session.inputs
            }
            took_s += timed(lambda: session.run_into(uploaded, {}))  # noqa: B023 - called at once
            made = session.run_into(uploaded, {})
            found |= {name: on_host(value) for name, value in made.items()}
        return found, took_s

    def plain_s(self, processor: str, products: DType | None, batch: int) -> float:
        """Return the seconds of the same passes in plain PyTorch."""
        call = self._call(batch)
        layer = copy.deepcopy(call.layer).to(processor)
        extras = {name: tensor.to(processor) for name, tensor in call.extras.items()}
        x = torch.randn(call.x.shape, device=processor, requires_grad=True)
        kind = torch.device(processor).type

        def forward() -> Tensor:
            with torch.autocast(kind, torch.bfloat16, enabled=products is not None):
                y: Tensor = call.run(tensors_of(layer), x, extras)
            return y

        def run() -> None:
            with torch.no_grad():
                forward()
            y = forward()
            torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))
            wait(processor)

        return timed(run)


def timed(run: Callable[[], object]) -> float:
    """Return the median seconds of a call, after one to warm up."""
    run()
    seconds = []
    for _ in range(_RUNS):
        began_s = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds)


def difference(found: Mapping[str, Array], wanted: Mapping[str, Array]) -> float:
    """Return the largest error of an output or gradient, by norm.

    Gradients are relative to the largest norm of a gradient, because some are only rounding.
    """
    sums = [name for name in wanted if name not in (names.Y, names.DX)]
    largest = max(float(np.linalg.norm(wanted[name])) for name in sums)
    size = {name: float(np.linalg.norm(wanted[name])) for name in (names.Y, names.DX)}
    return max(
        float(np.linalg.norm(found[name] - wanted[name])) / size.get(name, largest)
        for name in wanted
    )


def layers(options: argparse.Namespace) -> list[Row]:
    """Measure part 1."""
    rows = []
    gpus = [each for each in torch_devices() if each != "cpu"]
    for name in options.models.split(","):
        wanted: dict[str, Array] = {}
        layer = Layer(name, options.seq)
        for runner in runners():
            where = runner.name.partition(":")[2]
            is_gpu = where not in ("", "cpu") or (runner.name == "webgpu" and bool(gpus))
            batch = options.batch if is_gpu else 1
            for products in (None, *runner.multiplies_in):
                row = Row(name, runner.name, products.value if products else "fp32")
                rows.append(row)
                try:
                    found, _ = layer.by(runner, products, 1)
                    wanted = wanted or found
                    row.error = difference(found, wanted)
                    _, took_s = layer.by(runner, products, batch)
                except GraphError as error:
                    row.fault = str(error)
                else:
                    plain = where or (gpus[0] if is_gpu else "cpu")
                    flops = layer.flops_per_token * batch * options.seq
                    row.tflops_per_s = flops / took_s / 1e12
                    row.share = layer.plain_s(plain, products, batch) / took_s
                if not options.json:
                    print(row.text, flush=True)
    return rows


def served(options: argparse.Namespace, processor: str, folder: Path) -> dict[str, float]:
    """Measure part 2: return the seconds of a step by stages on a GPU, and of plain PyTorch."""
    training = [
        "--json", "--model", options.served, "--dtype", options.dtype, "--method", "stages",
        "--batch", str(options.batch), "--seq", str(options.seq), "--steps", str(_STEPS),
        "--checkpoint-every", "0",
    ]  # fmt: skip
    seconds: list[float] = []
    with Processes(folder, time.monotonic() + options.limit_s) as processes:
        keys = {"CLEAVE_CREDENTIAL": secrets.token_urlsafe(16)}
        keys["CLEAVE_OPERATOR_CREDENTIAL"] = secrets.token_urlsafe(16)
        serving = [
            *_CLEAVE, "serve", "--json", "--port", "0", "--data", "none", "--stages-on", "any",
            "--coding", "off", "--compute", "off", "--runs", str(folder / "runs"),
        ]  # fmt: skip
        server = processes.start("serve", serving, **keys)
        at = processes.await_record(server, lambda each: each["event"] == "listening")
        joining = [
            *_CLEAVE, "join", at["url"], "--json",
            "--runner", f"torch:{processor.partition(':')[0]}", "--memory", "75%",
        ]  # fmt: skip
        processes.start("device", joining)
        processes.await_record(server, lambda each: " joined" in str(each.get("text")))
        job = processes.start(
            "train", [*_CLEAVE, "train", *training, "--server", at["operator_url"]]
        )
        for record in processes.records(job):
            if record.get("event") == "step":
                seconds.append(float(record["wall_s"]))
    plain = plain_step_s(options, processor)
    step_s = statistics.median(seconds[1:])
    return {"served_s": step_s, "plain_s": plain, "ratio": step_s / plain}


def plain_step_s(options: argparse.Namespace, processor: str) -> float:
    """Return the median seconds of a training step in plain PyTorch on a GPU."""
    spec = find_model(options.served)
    model: Any = build_model(spec, seed=0).to(processor)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(spec.vocabulary, (options.batch, options.seq + 1), device=processor)
    narrow = options.dtype == "bf16"

    def step() -> None:
        with torch.autocast(processor.partition(":")[0], torch.bfloat16, enabled=narrow):
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        wait(processor)

    return timed(step)


def wait(processor: str) -> None:
    """Wait until a processor has finished."""
    if not processor.startswith("cpu"):
        torch.accelerator.synchronize()


def main() -> None:
    """Measure and print both parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="opt-125m,opt-1.3b,llama-2-7b")
    parser.add_argument("--batch", type=int, default=8, help="sequences on a GPU")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--served", default="opt-1.3b", help="model of part 2, or none")
    parser.add_argument("--dtype", default="bf16", help="of part 2")
    parser.add_argument("--processor", default="", help="of part 2: a device of PyTorch")
    parser.add_argument("--limit-s", type=float, default=240.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    gpus = [each for each in torch_devices() if each != "cpu"]
    if not options.json:
        named = torch.cuda.get_device_name() if torch.cuda.is_available() else ", ".join(gpus)
        print(f"{machine()}; GPU of PyTorch: {named or 'none'}; torch {torch.__version__}")
        print(f"{'model':12} {'runner':12} {'dtype':5} {'error':>8} {'TFLOP/s':>9} {'share':>6}")
    rows, step = layers(options), None
    processor = options.processor or next(iter(gpus), "")
    if processor and options.served != "none":
        with tempfile.TemporaryDirectory(prefix="cleave-benchmark-") as folder:
            step = served(options, processor, Path(folder))
    if options.json:
        print(json.dumps({"layers": [asdict(row) for row in rows], "served": step}))
    elif step is not None:
        print(
            f"a step of {options.served} in {options.dtype}: {step['served_s']:.2f} s served, "
            f"{step['plain_s']:.2f} s in plain PyTorch, {step['ratio']:.2f} times as long"
        )
    elif options.served != "none":
        print("no GPU for PyTorch here, so no step is served")


if __name__ == "__main__":
    main()
