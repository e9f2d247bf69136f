"""Rounds of local updates are those of the published algorithm, and survive what devices do."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cleave.arrays import DType
from cleave.fleet.fleet import Fleet
from cleave.training.data.batches import Batch
from cleave.training.diloco.local_updates import LocalUpdates
from cleave.training.diloco.outer import OuterOptimizer
from cleave.training.diloco.whole_model import WholeModel
from cleave.training.loop.job import ExchangeKind, OptimizerKind
from cleave.training.loop.optimizer import UpdateRule
from emulator.virtual import emulated
from profiles.fleet_device import FleetDevice
from tests.graphs.models import TOKENS, VOCABULARY, small_model
from tests.training.runs import nightly

EVERY, BATCH, RATE = 5, 2, 5e-3
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9
RULE = UpdateRule(OptimizerKind.ADAMW, weight_decay=0.1)


def device(name: str, speed: float = 1.0) -> FleetDevice:
    return FleetDevice(name, 1e9 * speed, 1e6, 1e6, 0.01, 2**30)


class Data:
    """Batches in a fixed order, and how many were drawn."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(3)
        self.drawn: list[Batch] = []

    def step(self) -> list[Batch]:
        rows = torch.randint(VOCABULARY, (BATCH, TOKENS + 1), generator=self._generator)
        rows[:, 1::2] = rows[:, :-1:2]  # something to learn
        self.drawn.append(Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))
        return [self.drawn[-1]]


class Run:
    """A model, a fleet that trains it by rounds, and the notes about that."""

    def __init__(
        self, model: nn.Module, fleet: Fleet, exchange: ExchangeKind = ExchangeKind.FP32
    ) -> None:
        self.model, self.fleet, self.data = model, fleet, Data()
        self.notes: list[str] = []
        whole = WholeModel(
            model, batch=BATCH, seq=TOKENS, dtype=DType.FP32, rule=RULE, clip=1.0,
            exchange=exchange, progress=lambda text: None,
        )  # fmt: skip
        parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.updates = LocalUpdates(
            whole,
            fleet,
            OuterOptimizer(OUTER_RATE, OUTER_MOMENTUM, parameters),
            EVERY,
            stop=lambda: False,
            note=self.notes.append,
            presence=lambda presence: None,
        )

    def round(self) -> float:
        return self.updates.round(lambda step: RATE, self.data.step).loss

    def heldout(self) -> float:
        ids = Data().step()[0]
        with torch.no_grad():
            return float(loss_of(self.model, ids))


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(input_ids=batch.ids, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())


class Published:
    """DiLoCo as published (arXiv 2311.08105, algorithm 1), with torch alone."""

    def __init__(self, model: nn.Module, workers: int) -> None:
        self.model = model
        self.replicas = [copy.deepcopy(model) for _ in range(workers)]
        self.inner = []
        for replica in self.replicas:
            held = [p for p in replica.parameters() if p.requires_grad]
            groups = [
                {"params": [p for p in held if p.ndim > 1], "weight_decay": 0.1},
                {"params": [p for p in held if p.ndim <= 1], "weight_decay": 0.0},
            ]
            self.inner.append(torch.optim.AdamW(groups, RATE, betas=(0.9, 0.95)))
        trained = [p for p in model.parameters() if p.requires_grad]
        self.outer = torch.optim.SGD(trained, OUTER_RATE, OUTER_MOMENTUM, nesterov=True)

    def round(self, batches: Sequence[Batch]) -> float:
        losses = []
        for number, batch in enumerate(batches):
            worker = number % len(self.replicas)
            replica, inner = self.replicas[worker], self.inner[worker]
            inner.zero_grad()
            loss = loss_of(replica, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
            inner.step()
            losses.append(float(loss.detach()))
        copies = [[p for p in r.parameters() if p.requires_grad] for r in self.replicas]
        present = [p for p in self.model.parameters() if p.requires_grad]
        for parameter, *theirs in zip(present, *copies, strict=True):
            parameter.grad = torch.stack([parameter.data - one.data for one in theirs]).mean(0)
        self.outer.step()
        for replica in self.replicas:
            replica.load_state_dict(self.model.state_dict())
        return sum(losses) / len(losses)


@pytest.mark.parametrize("family", ["opt", "llama", nightly("gpt2"), nightly("gemma2")])
def test_four_workers_lose_as_the_published_algorithm_does(family: str) -> None:
    model = small_model(family)
    published = Published(copy.deepcopy(model), 4)
    with emulated([device(f"d{n}") for n in range(4)]) as fleet:
        run, seen = Run(model, fleet), 0
        for _ in range(4):
            mine = run.round()
            wanted = published.round(run.data.drawn[seen:])
            seen = len(run.data.drawn)
            assert mine == pytest.approx(wanted, rel=1e-4)
    assert seen == 4 * 4 * EVERY
    assert run.notes == []
