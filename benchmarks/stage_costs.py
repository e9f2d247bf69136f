"""Compare a device's time and memory for stages with predictions; check idle devices, too.

    python -m benchmarks.stage_costs [--quick] [--parts time,memory,long,idle] [--grid-s 40]
                                     [--json]

time    A layer of OPT-125M and one of a Llama of the same width, 2 x 512 tokens, forward and
        backward graphs in this process (median of five), against the planner's prediction: FLOPs
        over the graph speed in a profile of this machine (as `cleave profile device` measures it).
        The speed in products is also shown. All times are CPU time of one thread, so other load
        matters little. Goal: within 10 %.
memory  A `cleave join` process that offers 2 GB runs OPT-125M by stages, alone, 4 x 256 tokens,
        fp32 and bf16: peak growth of its resident memory against the plan's need and the offer.
        Goal: within 10 % of the need, and never above the offer. The server's own peak is also
        shown, without a prediction.
long    The same for a Llama of four layers of that width with sequences of 4096 tokens, on a
        process that offers 1 GB.
idle    Start-up time and resident memory of a `cleave join --backend numpy` process without a
        stage, five times; ONNX Runtime must not be loaded in it. Torch is not imported either, as
        if it were not installed (see `benchmarks.light_guest`).

One thread each. Ends with 1 if a goal is missed.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

import cleave
from benchmarks.common import joined, machine, make_trainer, resident_bytes
from benchmarks.layer_graphs import inputs_of
from cleave.arrays import DType
from cleave.graphs.graph_cache import GraphCache
from cleave.graphs.model_graphs import model_graphs
from cleave.machine.backends import TorchBackend
from cleave.machine.graph_session import GraphSession
from cleave.training.data.tokenizer import default_tokenizer
from cleave.training.loop.job import JobSpec
from cleave.training.stages.stage_work import ModelWork
from profiles.measuring.device import Settings, measure_device

GOAL: Final = 0.10
OFFERED_MB: Final = 2000
LITTLE_MB: Final = 1000
ROWS, TOKENS = 2, 512
LONG: Final = 4096  # tokens of a sequence
REPEATS: Final = 5


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value with its prediction.

    Attributes:
        what: name of the figure.
        unit: unit of both values.
        measured, predicted: the two values; `predicted` is None without a prediction.
        met: whether the goal is met; None without a goal.
    """

    what: str
    unit: str
    measured: float
    predicted: float | None = None
    met: bool | None = None

    @classmethod
    def against(cls, what: str, unit: str, measured: float, predicted: float) -> Figure:
        """Return a figure whose goal is the prediction."""
        return cls(what, unit, measured, predicted, abs(measured / predicted - 1) <= GOAL)


# --- time ---


def one_layer(family: str) -> nn.Module:
    """Return a model with one layer of OPT-125M's width."""
    import transformers

    torch.manual_seed(1)
    config: Any
    if family == "opt":
        config = transformers.OPTConfig(num_hidden_layers=1, dropout=0.0, vocab_size=512)
    else:
        config = transformers.LlamaConfig(
            hidden_size=768, intermediate_size=2048, num_hidden_layers=1, vocab_size=512,
            num_attention_heads=12, num_key_value_heads=12,
        )  # fmt: skip
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model.train()


def times(grid_s: float) -> Iterator[Figure]:
    """Measure layers against a profile of this machine."""
    torch.set_num_threads(1)
    settings = Settings(
        "here", "here", "2026-01-01", quick=True, grid_s=grid_s, sustained_s=0.0,
        threads=1,
    )  # fmt: skip
    profile = measure_device(settings, TorchBackend(), clock=time.process_time)
    assert profile.graphs is not None
    speed = profile.graphs.flops_per_s
    products = profile.compute[DType.FP32.value].flops_per_s
    yield Figure("the profile's speed in products", "GFLOP/s", products / 1e9)
    yield Figure("the profile's speed in graphs", "GFLOP/s", speed / 1e9)
    for family in ("opt", "llama"):
        model = one_layer(family)
        graphs = model_graphs(model, TOKENS, GraphCache.of_user())
        work = ModelWork(model, graphs, DType.FP32)
        cost = work.costs([ROWS * TOKENS], TOKENS, DType.FP32).layers[0]
        call, layer = graphs.calls[0], graphs.layers[0]
        x = torch.randn(ROWS, *call.x.shape[1:])
        feed = inputs_of(call, layer, x, torch.randn(x.shape))
        for what, graph, flops in (
            ("forward", layer.forward, cost.forward_flops),
            ("backward", layer.backward, cost.flops - cost.forward_flops),
        ):
            session = GraphSession(graph, 1)
            took_s = median_s(partial(session.run, feed))
            predicted_s = ROWS * TOKENS * flops / speed
            yield Figure.against(f"{family} layer, {what}", "s", took_s, predicted_s)


def median_s(work: Callable[[], object]) -> float:
    """Return the median CPU seconds of several calls after a warm-up."""
    work()
    took_s = []
    for _ in range(REPEATS):
        began_s = time.process_time()
        work()
        took_s.append(time.process_time() - began_s)
    return statistics.median(took_s)


# --- memory ---


def memory(
    model: str, steps: int, batch: int = 4, sequence: int = 256, offered_mb: int = OFFERED_MB
) -> Iterator[Figure]:
    """Measure a device process that runs a stage against its plan."""
    for dtype in (DType.FP32, DType.BF16):
        job = JobSpec(
            model, steps=1000, batch=batch, seq=sequence, dtype=dtype.value, method="stages",
            audit=0.0, checkpoint_every=0,
        )  # fmt: skip
        options = ("--memory", str(offered_mb), "--threads", "1")
        with cleave.serve(stages_on="any") as server, joined(server.url, 1, *options) as devices:
            server.fleet.wait_for(1)
            trainer = make_trainer(job, server.fleet)
            before = devices[0].resident_bytes()
            for _ in range(steps):
                trainer.train_step()
            grew = (resident_bytes(devices[0].process.pid, "VmHWM") - before) / 1e6
            assert trainer.fleet is not None
            assert trainer.fleet.staged is not None
            assert trainer.fleet.staged.plan is not None
            (planned,) = trainer.fleet.staged.plan.memory_bytes.values()
            yield Figure("device process, joined", "MB", before / 1e6)
            yield Figure.against(f"device process, {dtype.value}", "MB more", grew, planned / 1e6)
            yield Figure(
                f"  against its offer, {dtype.value}",
                "MB more",
                grew,
                offered_mb,
                grew <= offered_mb,
            )
            yield Figure(
                f"server, peak so far, {dtype.value}",
                "MB",
                resident_bytes(os.getpid(), "VmHWM") / 1e6,
            )
            trainer.close()


def long_sequences(layers: int, steps: int) -> Iterator[Figure]:
    """Measure a device process that offers 1 GB and trains on long sequences against its plan."""
    import transformers

    torch.manual_seed(1)
    transformers.utils.logging.disable_progress_bar()
    config = transformers.LlamaConfig(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=layers, vocab_size=512,
        num_attention_heads=12, num_key_value_heads=12, max_position_embeddings=LONG,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="cleave-benchmark-") as folder:
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tokenizer = default_tokenizer(vocab_size=512).library_tokenizer
        tokenizer.save(str(Path(folder) / "tokenizer.json"))
        yield from memory(folder, steps, 1, LONG, LITTLE_MB)


# --- idle ---


def idle(repeats: int) -> Iterator[Figure]:
    """Measure device processes that get no work."""
    starts, resident, loaded = [], [], []
    for _ in range(repeats):
        with cleave.serve() as server:
            began_s = time.perf_counter()
            with joined(server.url, 1, "--backend", "numpy", "--threads", "1") as devices:
                starts.append(time.perf_counter() - began_s)
                server.fleet.wait_for(1)
                pid = devices[0].process.pid
                resident.append(resident_bytes(pid) / 1e6)
                loaded.append("onnxruntime" in Path(f"/proc/{pid}/maps").read_text())
    yield Figure("idle: from the command to ready (was 0.22 s)", "s", statistics.median(starts))
    yield Figure("idle: resident (was 69 MB)", "MB", statistics.median(resident))
    wrong = float(sum(loaded))
    yield Figure("idle: processes that loaded ONNX Runtime", "", wrong, 0.0, not wrong)


# --- the command ---


def show(found: Figure) -> None:
    """Print a figure."""
    against = "" if found.predicted is None else f"{found.predicted:10.3f}"
    goal = {None: "", True: "met", False: "NOT met"}[found.met]
    print(
        f"{found.what:46} {found.measured:10.3f} {against:10} {found.unit:8}{goal}".rstrip(),
        flush=True,
    )


def main() -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="time,memory,long,idle")
    parser.add_argument("--grid-s", type=float, default=40.0, help="seconds for the profile")
    parser.add_argument("--quick", action="store_true", help="opt-tiny, and a short profile")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    model = "opt-tiny" if options.quick else "opt-125m"
    parts: dict[str, Callable[[], Iterator[Figure]]] = {
        "time": lambda: times(10.0 if options.quick else options.grid_s),
        "memory": lambda: memory(model, 2),
        "long": lambda: long_sequences(1 if options.quick else 4, 2),
        "idle": lambda: idle(2 if options.quick else REPEATS),
    }
    wanted = options.parts.split(",")
    if unknown := set(wanted) - set(parts):
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(parts)}")
    found = []
    if not options.json:
        print(f"{machine()}\n{'':46} {'measured':>10} {'predicted':>10}")
    for part in wanted:
        for figure in parts[part]():
            found.append(figure)
            if not options.json:
                show(figure)
    if options.json:
        print(json.dumps({"machine": machine(), "found": [asdict(one) for one in found]}, indent=2))
    sys.exit(1 if any(one.met is False for one in found) else 0)


if __name__ == "__main__":
    main()
