"""Measure what local updates (`--method diloco`) cost in loss.

    python -m benchmarks.local_losses [--models opt-nano,llama-nano] [--seeds 0,1,2] [--warm 100]
                                      [--steps 400] [--every 10,50,200]
                                      [--exchanges fp32,bf16,int8,sparse] [--streaming 1:0,4:10]
                                      [--plots FOLDER] [--results FILE] [--quick]
    python -m benchmarks.local_losses --disturbed [--every 10] [...]

Eight devices and plain PyTorch train small models on equal numbers of tokens, from weights that
plain PyTorch has trained for `--warm` steps. Prints held-out losses: means and ranges over seeds.
`--streaming` has the numbers of fragments and of overlapping steps, as in Streaming DiLoCo.

The devices are replicas in this process, whose local steps run in plain PyTorch, all at once. All
else is the product: the graphs with which devices exchange weights, and the server's part.
`tests/benchmarks/test_local_losses.py` compares the losses with those of emulated devices.

`--disturbed` compares four kinds of runs with ten devices. In the first, nothing happens. In the
second, the work of one device is lost in every round, but the device stays. In the third, one
device is lost in every round, and a new one takes its place in the next. In the fourth, the server
is killed after half of the rounds and resumed, so that all devices begin with new moments, and what
they had not returned is lost.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from benchmarks.common import machine
from benchmarks.local_updates import parsed_kinds, parsed_numbers, parsed_streaming
from cleave import graph_names as names
from cleave.arrays import Array, DType
from cleave.files import save_figure
from cleave.fleet.fleet import Fleet
from cleave.machine.graph_session import GraphSession
from cleave.planner.local_updates import ExchangeKind, Rounds
from cleave.planner.plan import DeviceRates
from cleave.scheduler.rounds.work import RoundPart, RoundResult, RoundWork
from cleave.scheduler.stages.work import SumName
from cleave.training.data.batches import Batch, BatchLoader, validation_batches
from cleave.training.diloco.local_updates import LocalUpdates
from cleave.training.diloco.outer import outer_optimizer
from cleave.training.diloco.whole_model import MIXED, WholeModel
from cleave.training.loop.context import TrainContext
from cleave.training.loop.inputs import prepare
from cleave.training.loop.job import JobSpec
from cleave.training.loop.optimizer import Schedule, UpdateRule
from cleave.workload.build import build_model

_DEVICES: Final = 8
_BATCH: Final = 1  # sequences in a local step
_SEQ: Final = 64  # tokens in a sequence
_RATE: Final = 2e-3
_WARMUP: Final = 10  # steps
_HELD_OUT: Final = 64  # sequences
_RULE: Final = UpdateRule(weight_decay=0.1)


@dataclass(frozen=True, slots=True)
class Setting:
    """What a run does.

    Attributes:
        steps: local steps of each device.
        rounds: how often and in which form weights travel; None for exact training.
        devices: number of devices.
        outer: learning rate and momentum of the outer optimizer; rate 0 for the published one.
        lost: number of devices that are lost in every round.
        stays: whether only their work is lost, and the devices keep their moments.
        killed: whether the server is killed after half of the rounds, and resumed.
    """

    steps: int
    rounds: Rounds | None = None
    devices: int = _DEVICES
    outer: tuple[float, float] = (0.0, 0.9)
    lost: int = 0
    stays: bool = False
    killed: bool = False


class Replicas:
    """Copies of a model that train alone with AdamW, in plain PyTorch. Their weights are stacked.

    The gradients of all copies are computed at once.
    """

    def __init__(self, model: nn.Module, count: int) -> None:
        self._model = model
        self.count = count
        self.weights = {
            name: p.detach()[None].repeat(count, *[1] * p.ndim)
            for name, p in model.named_parameters()
            if p.requires_grad
        }
        self._own = [self._parameters(number) for number in range(count)]
        self._optimizers = [self._optimizer(number) for number in range(count)]
        self.updates = [0] * count
        self.late = [False] * count  # as `LocalWorker.late`
        self._gradients = vmap(grad_and_value(self._loss))

    def _parameters(self, number: int) -> dict[str, nn.Parameter]:
        """Return the weights of one copy, which share the memory of `weights`."""
        return {name: nn.Parameter(weight[number]) for name, weight in self.weights.items()}

    def _optimizer(self, number: int) -> torch.optim.AdamW:
        own = self._own[number].values()
        groups: list[dict[str, Any]] = [
            {"params": [p for p in own if p.ndim > 1]},
            {"params": [p for p in own if p.ndim <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            groups, betas=_RULE.betas, eps=_RULE.eps, weight_decay=_RULE.weight_decay, fused=True
        )

    def _loss(self, weights: Mapping[str, Tensor], ids: Tensor, labels: Tensor) -> Tensor:
        given = {"input_ids": ids, "use_cache": False}
        logits = functional_call(self._model, dict(weights), (), given).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def load(self, weights: Mapping[str, Tensor], kept: float = 0.0) -> None:
        """Load weights from the server, except for a part `kept` of the own weights."""
        for name, weight in weights.items():
            self.weights[name].mul_(kept).add_(weight.detach(), alpha=1 - kept)

    def forget(self, number: int) -> None:
        """Replace a replica by one that joins late."""
        self._optimizers[number] = self._optimizer(number)
        self.updates[number], self.late[number] = 0, True

    def step(self, batches: Sequence[Batch], rate: float) -> Tensor:
        """Do one local step on each replica. Return the losses before it."""
        losses: Tensor
        ids, labels = (torch.stack(part) for part in zip(*[b[:2] for b in batches], strict=True))
        gradients, losses = self._gradients(self.weights, ids, labels)
        for number, (own, optimizer) in enumerate(zip(self._own, self._optimizers, strict=True)):
            for name, parameter in own.items():
                parameter.grad = gradients[name][number].contiguous()  # as fused updates need
            nn.utils.clip_grad_norm_(own.values(), 1.0)
            if self.late[number] and not self.updates[number]:
                estimate_moments(optimizer)
            for group in optimizer.param_groups:
                group["lr"] = rate
            self.updates[number] += 1
            optimizer.step()
            optimizer.zero_grad()
        return losses

    def state(self) -> ReplicaState:
        """Return a copy of all weights and moments."""
        held = self.weights, [each.state_dict() for each in self._optimizers], self.updates
        return copy.deepcopy(held)

    def restore(self, state: ReplicaState) -> None:
        """Load a copy of all weights and moments."""
        weights, optimizers, self.updates = copy.deepcopy(state)
        for name, weight in weights.items():
            self.weights[name].copy_(weight)
        for optimizer, held in zip(self._optimizers, optimizers, strict=True):
            optimizer.load_state_dict(held)


def estimate_moments(optimizer: torch.optim.AdamW) -> None:
    """Begin with the moments of a device that joins late, given its first gradients."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer.state[p] = {
                "step": torch.tensor(1e9),  # needs no bias correction
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.full_like(p, float(p.grad.square().mean())),
            }


ReplicaState: TypeAlias = tuple[dict[str, Tensor], list[dict[str, Any]], list[int]]
"""Stacked weights, and the state of each replica's optimizer with its number of updates."""

Curve: TypeAlias = list[tuple[int, float]]
"""Held-out losses by step."""

FirstRound: TypeAlias = tuple[ReplicaState, list[Tensor]]
"""The state of replicas after the first round, and the losses of its steps."""


class ReplicaFleet:
    """A fleet and its runtime, for `LocalUpdates`, whose devices are replicas in this process.

    Attributes:
        drawn: the batches of the next round, in the order in which they were drawn.
        rate: returns the learning rate of a local step of the next round.
        lost: numbers of the devices that are lost in the next round.
        stays: whether only their work is lost.
        first: what replicas are after the first round, if another run has computed that.
    """

    def __init__(self, whole: WholeModel, replicas: Replicas) -> None:
        self.runtime = self
        self._whole, self._replicas = whole, replicas
        self.drawn: list[Batch] = []
        self.rate: Callable[[int], float] = lambda step: 0.0
        self.lost: set[int] = set()
        self.stays = False
        self.first: FirstRound | None = None
        self._result: RoundResult | None = None
        self._due: Sequence[SumName] = list(whole.tensors)  # those that the server has changed
        self._errors: dict[tuple[int, SumName], Array] = {}
        graphs = {e.difference.model: e for e in whole.work.exchange.values()}
        self._graphs = {model: GraphSession(model) for model in graphs}

    def now(self) -> float:
        return 0.0

    def stage_devices(self) -> dict[int, DeviceRates]:
        rates = DeviceRates(0, 1e6, 1e6, 1e9, memory_bytes=2**40)
        return dict.fromkeys(range(self._replicas.count), rates)

    def forget(self, number: int) -> None:
        """Replace a device by a new one."""
        self._replicas.forget(number)
        self._errors = {key: e for key, e in self._errors.items() if key[0] != number}

    def begin_round(self, work: RoundWork) -> None:
        whole, replicas = self._whole, self._replicas
        count, steps = replicas.count, len(self.drawn) // replicas.count
        # As in the product, a device adds the first change at once.
        first, last = work.overlap if work.number > 1 else (0, work.overlap[1])
        given = {whole.names[key]: whole.tensors[key] for key in self._due}
        kept = MIXED if work.number > 1 and work.overlap != (0, 0) else 0.0
        returned: list[dict[SumName, dict[str, list[bytes]]]] = []
        losses: list[Tensor] = []

        def exchange() -> None:
            for device in range(count):
                returned.append({key: self._difference(device, key) for key in work.returned})

        if self.first is not None and work.number == 1 and not last:
            replicas.restore(self.first[0])
            losses = self.first[1]
        else:
            for number in range(steps):
                if number == first:
                    replicas.load(given, kept)
                if number == steps - last:
                    exchange()
                batches = self.drawn[number * count : (number + 1) * count]
                losses.append(replicas.step(batches, self.rate(number)))
            if work.number == 1:
                self.first = replicas.state(), losses
        if not last:
            exchange()
        self._due = work.returned
        self.drawn.clear()
        tokens = len(losses) * _BATCH * _SEQ
        parts = [
            RoundPart(
                device,
                f"device {device}",
                len(losses),
                tokens,
                {(n, 0): _payload(one[device], DType.FP32) for n, one in enumerate(losses)},
                returned[device],
                0.0,
                0,
                replicas.updates[device],
                replicas.late[device],
            )
            for device in range(count)
            if device not in self.lost
        ]
        self._result = RoundResult(parts, {})
        if not self.stays:
            for device in self.lost:
                self.forget(device)

    def next_outcome(self, timeout_s: float) -> RoundResult | None:
        return self._result

    def end_steps(self) -> None:
        return

    def _difference(self, device: int, key: SumName) -> dict[str, list[bytes]]:
        whole = self._whole
        work = whole.work.exchange[key]
        start = whole.tensors[key].detach().reshape(-1).numpy()
        weight = self._replicas.weights[whole.names[key]][device].reshape(-1).numpy()
        given = {names.START: start, names.WEIGHT: weight}
        if work.keeps_error:
            given[names.ERROR] = self._errors.get((device, key), np.zeros_like(start))
        made = self._graphs[work.difference.model].run(given)
        if work.keeps_error:
            self._errors[device, key] = made[names.updated(names.ERROR)]
        return {
            each.name: [_payload(torch.from_numpy(made[each.name]), DType(each.dtype))]
            for each in work.returned
        }


def _payload(values: Tensor, dtype: DType) -> bytes:
    """Return elements in the wire format."""
    kinds = {DType.BF16: torch.bfloat16, DType.FP16: torch.float16, DType.FP32: torch.float32}
    found = values.detach().to(kinds[dtype]).contiguous().reshape(-1)
    return bytes(found.view(torch.uint8).numpy().tobytes())


class Trial:
    """Trains one model from one seed by several methods.

    Args:
        warm: steps of plain PyTorch before the methods begin.
    """

    def __init__(self, name: str, seed: int, warm: int) -> None:
        data = prepare(JobSpec(name, seq=_SEQ), TrainContext(None, lambda record: None))
        self._tokens, self._seed = data.corpus.train, seed
        self._model = build_model(data.source.spec, seed=seed).train()
        self._model.set_attn_implementation("eager")  # the only one that can be stacked
        held_out = validation_batches(data.corpus.validation, _BATCH, _SEQ, _HELD_OUT)
        self._held_out = [torch.cat(part) for part in zip(*[b[:2] for b in held_out], strict=True)]
        self._loader = BatchLoader(self._tokens, batch=_DEVICES * _BATCH, seq=_SEQ, seed=seed)
        replicas = Replicas(self._model, 1)
        for step in range(warm):
            rate = _RATE * min(1.0, (step + 1) / _WARMUP)
            replicas.step([self._loader.next_batch()], rate)
        self._save(replicas)
        self._begin = {name: p.detach().clone() for name, p in self._model.named_parameters()}
        self._warmed = replicas.state()
        self._first: dict[tuple[int, int], FirstRound] = {}
        self._wholes: dict[Rounds, WholeModel] = {}

    def _save(self, replicas: Replicas) -> None:
        with torch.no_grad():
            for name, weight in replicas.weights.items():
                self._model.get_parameter(name).data = weight[0].clone()

    def loss(self) -> float:
        """Return the held-out loss of the model."""
        ids, labels = self._held_out
        with torch.no_grad():
            logits = self._model(input_ids=ids, use_cache=False).logits
            return float(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))

    def _restart(self, devices: int) -> BatchLoader:
        """Begin again with the trained weights, and the data after them."""
        with torch.no_grad():
            for name, weight in self._begin.items():
                self._model.get_parameter(name).data = weight.clone()
        batch = _BATCH if devices else _DEVICES * _BATCH
        loader = BatchLoader(self._tokens, batch=batch, seq=_SEQ, seed=self._seed)
        loader.restore(self._loader.state())
        return loader

    def exact(self, steps: int) -> Curve:
        """Train with plain PyTorch. Return held-out losses by step."""
        loader, replicas, schedule = self._restart(0), Replicas(self._model, 1), _schedule(steps)
        replicas.restore(self._warmed)
        found = [(0, self.loss())]
        for step in range(steps):
            replicas.step([loader.next_batch()], schedule.rate(step))
            if (step + 1) % (steps // 4) == 0:
                self._save(replicas)
                found.append((step + 1, self.loss()))
        return found

    def locally(self, setting: Setting, devices: Fleet | None = None) -> Curve:
        """Train by rounds. Return held-out losses by step.

        `devices`: a fleet to use instead of replicas.
        """
        assert setting.rounds is not None
        loader, rounds = self._restart(setting.devices), setting.rounds
        whole, every = self._wholes.get(rounds), rounds.steps
        if whole is None:
            whole = WholeModel(
                self._model, batch=_BATCH, seq=_SEQ, dtype=DType.FP32, rule=_RULE, clip=1.0,
                rounds=rounds, progress=lambda what: None,
            )  # fmt: skip
            self._wholes[rounds] = whole
        fleet = ReplicaFleet(whole, Replicas(self._model, setting.devices))
        fleet.first = self._first.get((every, setting.devices))
        trained = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        updates = LocalUpdates(
            whole,
            devices or cast("Fleet", fleet),  # which has what `LocalUpdates` uses
            outer_optimizer(rounds.exchange, setting.outer[0], setting.outer[1], trained),
            rounds,
            stop=lambda: False,
            note=print,
            presence=lambda presence: None,
        )
        schedule, found = _schedule(setting.steps), [(0, self.loss())]

        def step() -> list[Batch]:
            batch = loader.next_batch()
            fleet.drawn.append(batch)
            return [batch]

        for done in range(0, setting.steps, every):
            fleet.rate = partial(_rate, schedule, done)
            number = done // every
            fleet.lost = {(number + n) % setting.devices for n in range(setting.lost)}
            fleet.stays = setting.stays
            if setting.killed and done >= setting.steps // 2 > done - every:
                for device in range(setting.devices):
                    fleet.forget(device)
            updates.round(fleet.rate, step)
            if (done + every) % (setting.steps // 4) == 0 or (done + every == setting.steps):
                found.append((done + every, self.loss()))
        updates.close()
        if fleet.first is not None:
            self._first[every, setting.devices] = fleet.first
        return found


def _rate(schedule: Schedule, done: int, number: int) -> float:
    """Return the learning rate of a local step of a round, after `done` steps."""
    return schedule.rate(done + number)


def _schedule(steps: int) -> Schedule:
    return Schedule(_RATE, _WARMUP, steps)


# Color and style of a line. Those of dense exchanges lie on each other, so the upper have gaps.
_LINES: Final = {
    "exact": ("black", "-"),
    "fp32": ("tab:blue", "-"),
    "bf16": ("tab:orange", "--"),
    "int8": ("tab:green", ":"),
    "sparse": ("tab:red", "-"),
}


def show(name: str, runs: Sequence[Curve], exact: Sequence[Curve] = ()) -> None:
    """Print the last held-out losses of several seeds."""
    last = [run[-1][1] for run in runs]
    spread = f"{min(last):.3f} to {max(last):.3f}"
    more = ""
    if exact:
        more = f"{statistics.mean(last) - statistics.mean(run[-1][1] for run in exact):+.3f}"
    print(f"{name:<34}{statistics.mean(last):>8.3f}  {spread:<16}{more:>8}", flush=True)


def settings_of(
    everies: Sequence[int], kinds: Sequence[ExchangeKind], streaming: Sequence[tuple[int, int]]
) -> list[Rounds]:
    """Return all combinations."""
    return [Rounds(e, kind, *parts) for e, kind, parts in product(everies, kinds, streaming)]


def name_of(rounds: Rounds) -> str:
    """Return the name of a run."""
    name = f"every {rounds.every}, {rounds.exchange.value}"
    streams = rounds.overlap or rounds.fragments > 1
    return f"{name}, {rounds.fragments}:{rounds.overlap}" if streams else name


class Results:
    """The curves of runs, by model, run and seed. A file keeps them, so that no run is repeated.

    Args:
        path: the file; None to keep nothing. Several processes may append to it.
        seeds: the seeds of every run.
        warm: steps of plain PyTorch before runs begin.
    """

    def __init__(self, path: Path | None, seeds: Sequence[int], warm: int) -> None:
        self._path, self._seeds, self._warm = path, seeds, warm
        self._found: dict[tuple[str, str, int], Curve] = {}
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        for line in lines:
            model, name, seed, run = json.loads(line)
            self._found[model, name, seed] = [(step, loss) for step, loss in run]

    def complete(self, model: str, runs: Mapping[str, Setting]) -> None:
        """Do those runs of a model whose curves are not known, one seed after the other."""
        for seed in self._seeds:
            missing = {n: s for n, s in runs.items() if (model, n, seed) not in self._found}
            trial = Trial(model, seed, self._warm) if missing else None
            for name, setting in missing.items():
                assert trial is not None
                run = trial.locally(setting) if setting.rounds else trial.exact(setting.steps)
                self._found[model, name, seed] = run
                if self._path is not None:
                    with self._path.open("a") as file:
                        file.write(json.dumps([model, name, seed, run]) + "\n")

    def of(self, model: str, name: str) -> list[Curve]:
        """Return the curves of a run for all seeds."""
        return [self._found[model, name, seed] for seed in self._seeds]


def losses(
    models: Sequence[str],
    results: Results,
    steps: int,
    everies: Sequence[int],
    kinds: Sequence[ExchangeKind],
    streaming: Sequence[tuple[int, int]],
    outer: tuple[float, float],
    plots: Path | None,
) -> None:
    """Print and draw held-out losses of exact training and of local updates."""
    for model in models:
        runs = {"exact": Setting(steps)} | {
            name_of(rounds): Setting(steps, rounds, outer=outer)
            for rounds in settings_of(everies, kinds, streaming)
        }
        results.complete(model, runs)
        print(f"\n{model}, {_DEVICES} devices, {steps} steps of {_BATCH} x {_SEQ} tokens each")
        print(f"{'':<34}{'loss':>8}  {'range':<16}{'exact':>8}")
        exact = results.of(model, "exact")
        show("before", [run[:1] for run in exact])
        show("exact", exact)
        figure = Figure(figsize=(3.2 * len(everies), 3.4), layout="constrained")
        panels = figure.subplots(1, len(everies), sharey=True, squeeze=False)[0]
        for every, panel in zip(everies, panels, strict=True):
            draw(panel, "exact", exact)
            for rounds in settings_of([every], kinds, streaming):
                found = results.of(model, name_of(rounds))
                show(name_of(rounds), found, exact)
                draw(panel, name_of(rounds).partition(", ")[2], found)
            panel.set(title=f"every {every} steps", xlabel="steps of each device")
        panels[0].set(ylabel=f"held-out loss of {model}")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9)
        if plots is not None:
            save_figure(figure, plots / f"local-updates-{model}.svg", 150)


def draw(panel: Any, name: str, runs: Sequence[Curve]) -> None:
    """Draw the mean and the range of held-out losses of several seeds against the step."""
    steps = [step for step, _ in runs[0]]
    at = [[run[n][1] for run in runs] for n in range(len(steps))]
    color, style = _LINES.get(name, (None, "-."))
    means = list(map(statistics.mean, at))
    panel.plot(steps, means, style, marker="o", markersize=3, label=name, color=color)
    panel.fill_between(steps, list(map(min, at)), list(map(max, at)), color=color, alpha=0.15)


def disturbed(
    models: Sequence[str],
    results: Results,
    steps: int,
    everies: Sequence[int],
    kinds: Sequence[ExchangeKind],
) -> None:
    """Print held-out losses if devices are lost, and if the server is killed."""
    for model in models:
        runs: dict[str, Setting] = {}
        for every, kind in product(everies, kinds):
            rounds = Rounds(every, kind)
            calm, name = Setting(steps, rounds, devices=10), name_of(rounds)
            runs |= {
                f"{name}, 10 devices": calm,
                f"{name}, work of one lost": replace(calm, lost=1, stays=True),
                f"{name}, one lost a round": replace(calm, lost=1),
                f"{name}, server killed": replace(calm, killed=True),
            }
        results.complete(model, runs)
        print(f"\n{model}, 10 devices, {steps} steps of {_BATCH} x {_SEQ} tokens each")
        print(f"{'':<34}{'loss':>8}  {'range':<16}{'more':>8}")
        before: list[Curve] = []
        for name, setting in runs.items():
            found = results.of(model, name)
            disturbs = setting.lost or setting.killed
            show(name, found, before if disturbs else ())
            before = before if disturbs else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="opt-nano,llama-nano")
    parser.add_argument("--warm", type=int, default=100)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=parsed_numbers, default=[0, 1, 2])
    parser.add_argument("--every", type=parsed_numbers, default=[10, 50, 200])
    parser.add_argument("--exchanges", type=parsed_kinds, default=list(ExchangeKind))
    parser.add_argument("--streaming", type=parsed_streaming, default=[(1, 0)])
    parser.add_argument("--outer-lr", type=float, default=0.0)
    parser.add_argument("--outer-momentum", type=float, default=0.9)
    parser.add_argument("--plots", type=Path, help="folder for one figure of each model")
    parser.add_argument("--results", type=Path, help="file that keeps all curves")
    parser.add_argument("--disturbed", action="store_true")
    parser.add_argument("--quick", action="store_true", help="one model and one seed")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the models are too small for more
    print(machine(), flush=True)
    models, seeds = options.models.split(","), options.seeds
    if options.quick:
        models, seeds = models[:1], seeds[:1]
    results = Results(options.results, seeds, options.warm)
    common = models, results, options.steps, options.every, options.exchanges
    if options.disturbed:
        disturbed(*common)
    else:
        losses(
            *common, options.streaming, (options.outer_lr, options.outer_momentum), options.plots
        )


if __name__ == "__main__":
    main()
