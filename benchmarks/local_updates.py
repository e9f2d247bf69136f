"""Measure what local updates (`--method diloco`) cost in loss, and what they gain in throughput.

    python -m benchmarks.local_updates [--models opt-nano,llama-nano] [--steps 200] [--seeds 3]
                                       [--every 10,50,200] [--exchanges fp32,bf16,int8]
                                       [--outer 0.7,0.9] [--plot FILE] [--quick]
    python -m benchmarks.local_updates --throughput [--model opt-125m] [--every 50,200]

The first form trains with eight emulated devices, whose arithmetic is real, and with plain PyTorch
on as many tokens, for which a step has the sequences of all eight. It prints held-out losses: means
and ranges over seeds.

`--throughput` does rounds in virtual time, with eight laptops behind 20/5 Mbit/s and results of
which only the sizes are computed. It compares tokens per second with the planner's predictions for
the server alone and for exact stages. Bytes are not counted as compressed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from matplotlib.figure import Figure

from benchmarks.common import machine
from cleave.arrays import DType
from cleave.files import save_figure
from cleave.fleet.fleet import Fleet
from cleave.planner.coding import CodingPolicy
from cleave.planner.local_updates import ExchangeKind, Rounds
from cleave.planner.plan import PsRates
from cleave.planner.stages.model import PsCompute
from cleave.scheduler.rounds.work import RoundPart
from cleave.training.data.batches import Batch
from cleave.training.diloco.local_updates import LocalUpdates, Round
from cleave.training.diloco.outer import OuterOptimizer
from cleave.training.diloco.whole_model import WholeModel
from cleave.training.loop.context import TrainContext
from cleave.training.loop.job import JobSpec
from cleave.training.loop.optimizer import UpdateRule
from cleave.training.loop.records import EvalRecord, Record
from cleave.training.loop.run_folder import RunFolder
from cleave.training.loop.start import train
from cleave.workload.models.build import load_model, resolve_model
from cleave.workload.registry import find_model
from cleave.workload.stages import StageSizes
from cleave_cli.plan_question import rates_of
from emulator.virtual import emulated
from profiles.fleet_device import FleetDevice
from profiles.fleets import of_profile
from profiles.library import load_profile

_DEVICES: Final = 8
_BATCH: Final = 2  # sequences in a local step
_SEQ: Final = 64  # tokens in a sequence
_MBIT: Final = 1e6 / 8
_PS_FLOPS_PER_S: Final = 500e9
_ROWS: Final = 64  # sequences in a step of the exact methods
_TOKENS: Final = 512  # tokens in such a sequence


def heldout(job: JobSpec, fleet: Fleet | None) -> list[tuple[int, float]]:
    """Train a job and return its held-out losses, by step."""
    found: list[tuple[int, float]] = []

    def report(record: Record) -> None:
        if isinstance(record, EvalRecord):
            found.append((record.step, record.eval_loss))

    with tempfile.TemporaryDirectory() as folder:
        train(job, RunFolder.create(Path(folder)), TrainContext(fleet, report))
    return found


def job_of(model: str, steps: int, seed: int, eval_every: int, **settings: object) -> JobSpec:
    """Return a job with the same schedule for every method."""
    values = {
        "model": model, "steps": steps, "seed": seed, "seq": _SEQ, "eval_every": eval_every,
        "eval_batches": 32, "learning_rate": 2e-3, "checkpoint_every": 0, **settings,
    }  # fmt: skip
    return JobSpec.from_dict(values)


def exactly(model: str, steps: int, seed: int) -> list[tuple[int, float]]:
    """Train with plain PyTorch on the tokens that eight devices would have."""
    batch = _DEVICES * _BATCH
    return heldout(job_of(model, steps, seed, steps // 4, batch=batch, method="local"), None)


def locally(
    model: str, steps: int, seed: int, every: int, exchange: str, outer: Sequence[float]
) -> list[tuple[int, float]]:
    """Train by rounds on eight equal emulated devices."""
    job = job_of(
        model, steps, seed, max(every, steps // 4), batch=_BATCH, method="diloco", every=every,
        exchange=exchange, outer_lr=outer[0], outer_momentum=outer[1],
    )  # fmt: skip
    devices = [FleetDevice(f"d{n}", 1e11, 1e8, 1e8, 0.001, 2**31) for n in range(_DEVICES)]
    with emulated(devices) as fleet:
        return heldout(job, fleet)


def show(name: str, runs: Sequence[Sequence[tuple[int, float]]], exact: float) -> float:
    """Print the last held-out losses of several seeds. Return their mean."""
    last = [run[-1][1] for run in runs]
    mean = statistics.mean(last)
    spread = f"{min(last):.3f} to {max(last):.3f}"
    more = f"{mean - exact:+.3f}" if exact else ""
    print(f"{name:<34}{mean:>8.3f}  {spread:<16}{more:>8}", flush=True)
    return mean


def losses(
    models: Sequence[str], steps: int, seeds: int, everies: Sequence[int], kinds: Sequence[str],
    outer: Sequence[float], plot: Path | None,
) -> None:  # fmt: skip
    """Print and draw held-out losses of exact training and of local updates."""
    figure = Figure(figsize=(4.2 * len(models), 3.2), layout="constrained")
    axes = figure.subplots(1, len(models), squeeze=False)[0]
    for model, panel in zip(models, axes, strict=True):
        print(f"\n{model}, {_DEVICES} devices, {steps} steps of {_BATCH} x {_SEQ} tokens each")
        print(f"{'':<34}{'loss':>8}  {'range':<16}{'exact':>8}")
        runs = [exactly(model, steps, seed) for seed in range(seeds)]
        exact = show("exact", runs, 0.0)
        draw(panel, "exact", runs)
        for every in everies:
            for kind in kinds:
                runs = [locally(model, steps, seed, every, kind, outer) for seed in range(seeds)]
                name = f"every {every}, {kind}"
                show(name, runs, exact)
                if kind == kinds[0]:
                    draw(panel, name, runs)
        panel.set(title=model, xlabel="steps of each device", ylabel="held-out loss")
        panel.legend(fontsize=8)
    if plot is not None:
        save_figure(figure, plot, 150)


def draw(panel: object, name: str, runs: Sequence[Sequence[tuple[int, float]]]) -> None:
    """Draw the mean held-out loss of several seeds against the step."""
    steps = [step for step, _ in runs[0]]
    means = [statistics.mean(run[n][1] for run in runs) for n in range(len(steps))]
    panel.plot(steps, means, marker="o", markersize=3, label=name)  # type: ignore[attr-defined]


class SizedUpdates(LocalUpdates):
    """Rounds whose results have sizes but no values, so the weights do not change."""

    def _apply(self, parts: Sequence[RoundPart]) -> Round:
        model = self._model
        self._updates = {
            key: model.exchange.update(torch.zeros_like(tensor, requires_grad=False))[1]
            for key, tensor in model.tensors.items()
        }
        return Round(0.0, sum(part.tokens for part in parts))


def throughput(model_name: str, everies: Sequence[int], kinds: Sequence[str]) -> None:
    """Print tokens per second in virtual time and as predicted."""
    profile = of_profile(load_profile("macbook-air-m1"), "fp32")
    home = {"downlink_bytes_per_s": 20 * _MBIT, "uplink_bytes_per_s": 5 * _MBIT, "latency_s": 0.01}
    devices = [FleetDevice(**{**profile, **home, "name": f"home-{n}"}) for n in range(_DEVICES)]
    spec = find_model(model_name)
    sizes = StageSizes(spec, _TOKENS, 4, 4)
    ps = PsCompute(_PS_FLOPS_PER_S, 0.0, PsRates())
    rates = rates_of(devices, CodingPolicy.OFF, PsRates())
    forecaster = sizes.forecaster(_ROWS, ps)
    tokens = _ROWS * _TOKENS
    exact = {
        "the server alone, 500 GFLOP/s": forecaster.alone().step_s,
        "exact stages": forecaster.by_stages(rates).step_s,
        "exact stages, state on devices": forecaster.with_state_on_devices(rates).step_s,
    }
    best = max(tokens / step_s for step_s in exact.values())
    print(f"\n{model_name}, {_DEVICES} laptops, 20/5 Mbit/s, {_ROWS} x {_TOKENS} tokens a step")
    print(f"{'':<34}{'tokens/s':>10}{'predicted':>11}{'to the best exact':>20}")
    for name, step_s in exact.items():
        print(f"{name:<34}{'':>10}{tokens / step_s:>11,.0f}")
    model, _ = load_model(resolve_model(model_name), seed=0)
    ids = torch.zeros(1, _TOKENS, dtype=torch.long)
    batch = Batch(ids, ids)
    for every in everies:
        for kind in kinds:
            with emulated(devices, compute=False, coding="off") as fleet:
                updates = SizedUpdates(
                    whole(model, kind),
                    fleet,
                    OuterOptimizer(0.7, 0.9, {}),
                    every,
                    stop=lambda: False,
                    note=print,
                    presence=lambda presence: None,
                )
                for _ in range(2):  # the first sends all weights
                    began_s = fleet.runtime.now()
                    done = updates.round(lambda step: 1e-3, lambda: [batch] * (_ROWS // _DEVICES))
                    per_s = done.tokens / (fleet.runtime.now() - began_s)
            rounds = Rounds(every, ExchangeKind(kind))
            predicted = (
                tokens / forecaster.by_local_updates(rates, sizes.trained_parameters, rounds).step_s
            )
            name = f"diloco, every {every}, {kind}"
            print(f"{name:<34}{per_s:>10,.0f}{predicted:>11,.0f}{per_s / best:>20.1f}", flush=True)


def whole(model: torch.nn.Module, kind: str) -> WholeModel:
    """Return a model in the form in which devices train it, one sequence per micro-batch."""
    return WholeModel(
        model, batch=1, seq=_TOKENS, dtype=DType.FP32, rule=UpdateRule(weight_decay=0.1), clip=1.0,
        exchange=ExchangeKind(kind), progress=lambda what: None,
    )  # fmt: skip


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _rates(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="opt-nano,llama-nano")
    parser.add_argument("--model", default="opt-125m", help="with --throughput")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--every", type=_numbers)
    parser.add_argument("--exchanges", default="bf16,fp32,int8")
    parser.add_argument("--outer", type=_rates, default=[0.7, 0.9], help="learning rate, momentum")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--throughput", action="store_true")
    parser.add_argument("--quick", action="store_true", help="one model and one seed")
    options = parser.parse_args()
    print(machine())
    kinds = options.exchanges.split(",")
    if options.throughput:
        throughput(options.model, options.every or [50, 200], kinds)
        return
    models, seeds = options.models.split(","), options.seeds
    if options.quick:
        models, seeds, kinds = models[:1], 1, kinds[:1]
    losses(
        models,
        options.steps,
        seeds,
        options.every or [10, 50, 200],
        kinds,
        options.outer,
        options.plot,
    )


if __name__ == "__main__":
    main()
