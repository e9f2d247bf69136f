"""Measure the overhead of stages: emulated devices in this process against plain PyTorch.

    python -m benchmarks.stage_overhead [--model opt-125m] [--devices 8] [--pairs 3] [--quick]
                                        [--json]

Batch 4, sequence 512, fp32 and bf16, steps of both in turn: forward, backward, clipping and AdamW.
Each has its own model and optimizer. Devices take only the time of their graphs, which this process
runs. Nothing is audited. The planner chooses the stages. Prints the median ratio of interleaved
pairs (goal: at most 1.15), and the seconds of steps by stages by part. Devices compute forward
passes twice (a backward graph recomputes them unless inputs were kept), which alone is a third more
work than PyTorch's. With several devices, the planner divides the batch into micro-batches of one
sequence, which take longer per sequence. With `--devices 1`, one device trains on whole batches.

`--quick`: opt-tiny, one pair. Ends with 1 if the goal is missed.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final
from unittest.mock import patch

import torch

import cleave
from benchmarks.common import machine, make_trainer, spread
from benchmarks.step_overhead import seconds
from cleave.device import compute_thread
from cleave.machine import graph_run
from cleave.machine.graph_session import GraphSession
from cleave.machine.torch_session import TorchSession
from cleave.training.loop.job import JobSpec
from cleave.training.stages.gradients import StepGradients
from cleave.training.stages.stage_work import ModelWork
from cleave.training.stages.staged import StagedModel

GOAL: Final = 1.15
PARTS: Final = (
    (GraphSession, "run", "graphs in ONNX Runtime"),
    (GraphSession, "run_into", "graphs in ONNX Runtime, sums in place"),
    (TorchSession, "run_into", "graphs in PyTorch"),
    (graph_run, "_value", "arrays as fp32, on devices"),
    (compute_thread, "fetch", "what devices return, rounded"),
    (StagedModel, "embed", "before the layers, on the server"),
    (StagedModel, "_loss", "loss and its gradients, on the server"),
    (ModelWork, "layers", "parameters as they travel"),
    (StepGradients, "read", "gradients that came"),
    (torch.optim.AdamW, "step", "AdamW"),
)
"""Functions that are timed separately; none of them calls another."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The results of one dtype.

    Attributes:
        ratios: seconds by stages over seconds of plain PyTorch, for each pair.
        plain_s, stages_s: median seconds of a step.
        parts: mean seconds of a step by stages, by part.
        plan: description of the stages.
    """

    dtype: str
    ratios: list[float]
    plain_s: float
    stages_s: float
    parts: dict[str, float]
    plan: str

    @property
    def met(self) -> bool:
        """Return whether the goal is met."""
        return statistics.median(self.ratios) <= GOAL


@contextmanager
def timed_parts() -> Iterator[dict[str, float]]:
    """Yield the accumulating seconds spent in each of `PARTS`."""
    spent: dict[str, float] = defaultdict(float)

    def timing(function: Callable[..., Any], what: str) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return function(*given, **named)
            finally:
                spent[what] += time.perf_counter() - began_s

        return timed

    patches = [
        patch.object(owner, name, timing(getattr(owner, name), what)) for owner, name, what in PARTS
    ]
    for one in patches:
        one.start()
    try:
        yield spent
    finally:
        for one in patches:
            one.stop()


def measure(model: str, dtype: str, pairs: int, seq: int, devices: int) -> Measured:
    """Run steps by stages and by plain PyTorch in turn."""
    job = JobSpec(model, steps=1000, batch=4, seq=seq, dtype=dtype, audit=0.0)
    by_stages = JobSpec(
        model, steps=1000, batch=4, seq=seq, dtype=dtype, audit=0.0, method="stages"
    )
    plain_s, stages_s = [], []
    spent: dict[str, float] = defaultdict(float)
    with cleave.emulated(devices) as fleet:
        plain, staged = make_trainer(job, None), make_trainer(by_stages, fleet)
        for pair in range(pairs + 1):
            alone = seconds(plain)
            with timed_parts() as of_step:
                ours = seconds(staged)
            print(f"{dtype}: plain {alone:.2f} s, by stages {ours:.2f} s", file=sys.stderr)
            if pair:  # the first pair makes sessions and warms up
                plain_s.append(alone)
                stages_s.append(ours)
                for what, took_s in of_step.items():
                    spent[what] += took_s
        assert staged.fleet is not None
        assert staged.fleet.staged is not None
        assert staged.fleet.staged.plan is not None
        stages = staged.fleet.staged.plan.stages
        plan = f"{len(stages)} stages, {'the loss on a device' if stages[-1].loss else 'loss here'}"
    parts = {what: spent[what] / pairs for _, _, what in PARTS if spent[what]}
    parts["all else"] = statistics.mean(stages_s) - sum(parts.values())
    ratios = [mine / other for mine, other in zip(stages_s, plain_s, strict=True)]
    return Measured(
        dtype, ratios, statistics.median(plain_s), statistics.median(stages_s), parts, plan
    )


def show(found: Measured) -> None:
    """Print a dtype's ratio and parts."""
    print(
        f"{found.dtype}: {spread(found.ratios)} times plain PyTorch (at most {GOAL}): "
        f"{'met' if found.met else 'NOT met'}\n"
        f"  plain {found.plain_s:.2f} s, by stages {found.stages_s:.2f} s; {found.plan}"
    )
    for what, took_s in found.parts.items():
        print(f"  {what:40} {took_s:7.2f} s  {took_s / found.plain_s:5.2f} of a plain step")
    sys.stdout.flush()


def main() -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="opt-125m")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    model, pairs, seq = options.model, options.pairs, 512
    if options.quick:
        model, pairs, seq = "opt-tiny", 1, 128
    found = []
    if not options.json:
        print(f"{machine()}; {model}, 4 x {seq} tokens, {options.devices} emulated devices")
    for dtype in options.dtypes.split(","):
        found.append(measure(model, dtype, pairs, seq, options.devices))
        if not options.json:
            show(found[-1])
    if options.json:
        print(json.dumps({"machine": machine(), "found": [asdict(one) for one in found]}, indent=2))
    sys.exit(0 if all(one.met for one in found) else 1)


if __name__ == "__main__":
    main()
