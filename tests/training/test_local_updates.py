"""Rounds of local updates are those of the published algorithm, and survive what devices do."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.local_losses import estimate_moments
from cleave.arrays import DType, unpack
from cleave.errors import FleetError
from cleave.fleet.fleet import Fleet
from cleave.fleet.local_fallback import AbandonedError
from cleave.planner.local_updates import ExchangeKind, Rounds
from cleave.scheduler.rounds.work import RoundPart
from cleave.training.data.batches import Batch
from cleave.training.diloco.exchange import returned
from cleave.training.diloco.local_updates import LocalUpdates
from cleave.training.diloco.outer import outer_optimizer
from cleave.training.diloco.whole_model import WholeModel
from cleave.training.loop.job import JobSpec, OptimizerKind
from cleave.training.loop.optimizer import UpdateRule
from cleave.training.loop.run_folder import RunFolder
from emulator.virtual import emulated
from profiles.fleet_device import FleetDevice
from tests.graphs.models import TOKENS, VOCABULARY, small_model, with_lora
from tests.graphs.test_sparse_graphs import published as sparse_loco
from tests.training.runs import losses_of, nightly, rounds_job, trained

EVERY, BATCH, RATE = 5, 2, 5e-3
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9
STREAMING = Rounds(8, ExchangeKind.FP32, fragments=2, overlap=3)
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
    """A model that a fleet trains by rounds, and the notes for the user."""

    def __init__(
        self,
        model: nn.Module,
        fleet: Fleet,
        exchange: ExchangeKind = ExchangeKind.FP32,
        streaming: Rounds | None = None,
    ) -> None:
        self.model, self.fleet, self.data = model, fleet, Data()
        self.notes: list[str] = []
        self.stops = False
        rounds = streaming or Rounds(EVERY, exchange)
        whole = WholeModel(
            model, batch=BATCH, seq=TOKENS, dtype=DType.FP32, rule=RULE, clip=1.0,
            rounds=rounds, progress=lambda text: None,
        )  # fmt: skip
        parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.updates = LocalUpdates(
            whole,
            fleet,
            outer_optimizer(exchange, 0.0, OUTER_MOMENTUM, parameters),
            rounds,
            stop=lambda: self.stops,
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
    """DiLoCo as published (arXiv 2311.08105, algorithm 1), with torch alone.

    `sparse`: SparseLoCo instead (arXiv 2508.15706, algorithm 1).
    """

    def __init__(self, model: nn.Module, workers: int, *, sparse: bool = False) -> None:
        self.model, self.sparse = model, sparse
        self.replicas: list[nn.Module] = []
        self.inner: list[torch.optim.AdamW] = []
        self.late: set[torch.optim.AdamW] = set()  # those without a first gradient
        for _ in range(workers):
            self._join()
        trained = [p for p in model.parameters() if p.requires_grad]
        self.errors = [[torch.zeros_like(p.data) for p in trained] for _ in range(workers)]
        self.outer = torch.optim.SGD(trained, OUTER_RATE, OUTER_MOMENTUM, nesterov=True)
        if sparse:
            self.outer = torch.optim.SGD(trained, 1.0)

    def _join(self) -> None:
        replica = copy.deepcopy(self.model)
        held = [p for p in replica.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in held if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in held if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.replicas.append(replica)
        self.inner.append(torch.optim.AdamW(groups, RATE, betas=(0.9, 0.95)))

    def join_late(self) -> None:
        """Add a worker whose moments begin with its first gradients. This is not published."""
        self._join()
        self.late.add(self.inner[-1])

    def local_step(self, batches: Sequence[Batch]) -> list[float]:
        """Do the local steps of all replicas in turns. Return the losses before them."""
        losses = []
        for number, batch in enumerate(batches):
            worker = number % len(self.replicas)
            replica, inner = self.replicas[worker], self.inner[worker]
            inner.zero_grad()
            loss = loss_of(replica, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
            if inner in self.late:
                self.late.remove(inner)
                estimate_moments(inner)
            inner.step()
            losses.append(float(loss.detach()))
        return losses

    def round(self, batches: Sequence[Batch]) -> float:
        losses = self.local_step(batches)
        copies = [[p for p in r.parameters() if p.requires_grad] for r in self.replicas]
        present = [p for p in self.model.parameters() if p.requires_grad]
        for number, (parameter, *theirs) in enumerate(zip(present, *copies, strict=True)):
            differences = [parameter.data - one.data for one in theirs]
            if self.sparse:
                differences = [
                    self._returned(errors, number, difference)
                    for errors, difference in zip(self.errors, differences, strict=True)
                ]
            parameter.grad = torch.stack(differences).mean(0)
        self.outer.step()
        for replica in self.replicas:
            replica.load_state_dict(self.model.state_dict())
        return sum(losses) / len(losses)

    @staticmethod
    def _returned(errors: list[Tensor], number: int, difference: Tensor) -> Tensor:
        returned, error = sparse_loco(errors[number].flatten(), difference.flatten())
        errors[number] = error.reshape(difference.shape)
        return returned.reshape(difference.shape)


@pytest.mark.parametrize("family", ["opt", "llama", nightly("gpt2"), nightly("gemma2")])
def test_four_workers_lose_as_the_published_algorithm_does(family: str) -> None:
    model = small_model(family)
    published = Published(copy.deepcopy(model), 4)
    with emulated([device(f"d{n}") for n in range(4)]) as fleet:
        run, seen = Run(model, fleet), 0
        for _ in range(3):
            mine = run.round()
            wanted = published.round(run.data.drawn[seen:])
            seen = len(run.data.drawn)
            assert mine == pytest.approx(wanted, rel=1e-4)
    assert seen == 3 * 4 * EVERY
    assert run.notes == []


def test_four_workers_lose_as_with_the_published_sparse_exchange() -> None:
    """The server rounds what it sends to 8 bits and adds the error to what it sends next."""
    model = small_model("llama")
    published = Published(copy.deepcopy(model), 4, sparse=True)
    with emulated([device(f"d{n}") for n in range(4)]) as fleet:
        run, seen = Run(model, fleet, ExchangeKind.SPARSE), 0
        for _ in range(4):
            mine = run.round()
            wanted = published.round(run.data.drawn[seen:])
            seen = len(run.data.drawn)
            assert mine == pytest.approx(wanted, rel=1e-4)
    assert run.notes == []


class Streaming:
    """Streaming DiLoCo as published (arXiv 2501.18512, algorithm 2), with torch alone.

    Each of two fragments is exchanged every 8 steps, in turns. A change is merged 3 steps after
    the difference was taken, with alpha 0.5. This class was written from memory, without the paper.
    """

    def __init__(self, run: Run, workers: int) -> None:
        self.alone = Published(copy.deepcopy(run.model), workers)
        whole = run.updates._model
        self.fragments = [[whole.names[key] for key in keys] for keys in whole.fragments]
        self.steps = 0
        self.merged: dict[int, list[str]] = {}  # names of parameters by the step of their merge

    def step(self, batches: Sequence[Batch]) -> float:
        alone = self.alone
        losses = alone.local_step(batches)
        self.steps += 1
        if self.steps % 4 == 2:
            names = self.fragments[self.steps // 4 % 2]
            alone.outer.zero_grad()
            for name in names:
                present = alone.model.get_parameter(name)
                theirs = [present.data - r.get_parameter(name).data for r in alone.replicas]
                present.grad = torch.stack(theirs).mean(0)
            alone.outer.step()  # skips parameters without a gradient
            self.merged[self.steps + 3] = names
        for name in self.merged.get(self.steps, ()):
            for replica in alone.replicas:
                held = replica.get_parameter(name)
                held.data = 0.5 * held.data + 0.5 * alone.model.get_parameter(name).data
        return sum(losses) / len(losses)


@pytest.mark.parametrize("family", ["llama", nightly("opt")])
def test_four_workers_lose_as_with_published_fragments_and_overlap(family: str) -> None:
    with emulated([device(f"d{n}") for n in range(4)]) as fleet:
        run, seen = Run(small_model(family), fleet, streaming=STREAMING), 0
        published = Streaming(run, 4)
        for _ in range(6):
            mine = run.round()
            drawn, seen = run.data.drawn[seen:], len(run.data.drawn)
            wanted = [published.step(drawn[n : n + 4]) for n in range(0, 16, 4)]
            assert mine == pytest.approx(sum(wanted) / 4, rel=1e-4)
    assert run.notes == []
    for name, parameter in run.model.named_parameters():
        expected = published.alone.model.get_parameter(name).detach()
        assert float((parameter.detach() - expected).norm()) < 1e-3 * float(expected.norm()) + 1e-4


def fast_link(name: str) -> FleetDevice:
    """A device that can return its moments in a small part of the time."""
    return FleetDevice(name, 1e8, 1e7, 1e7, 0.01, 2**30)


@pytest.mark.parametrize(
    ("sparse", "in_round"),
    [nightly(False, False), (False, True), nightly(True, False), (True, True)],
)
def test_a_stopped_and_resumed_run_loses_as_the_published_algorithm_does(
    sparse: bool, in_round: bool
) -> None:
    """Training stops after two rounds, or in the third, and goes on with other sessions."""
    model, kind = small_model("llama"), ExchangeKind.SPARSE if sparse else ExchangeKind.FP32
    published = Published(copy.deepcopy(model), 4, sparse=sparse)
    found, wanted = [], []
    with emulated([fast_link(f"d{n}") for n in range(4)]) as fleet:
        run = Run(model, fleet, kind)
        for _ in range(2):
            found.append(run.round())
        drawn = list(run.data.drawn)
        if in_round:
            run.stops = True
            with pytest.raises(AbandonedError):
                run.round()
        run.updates.collect()
        tensors, meta = copy.deepcopy(run.updates.tensors()), run.updates.meta()
        assert [each["name"] for each in meta] == [f"d{n}" for n in range(4)]
        assert run.notes == []
    # The weights and errors travel in bf16 if the exchange is sparse.
    tolerance = 1e-3 if sparse else 1e-4
    with emulated([fast_link(f"d{n}") for n in range(4)]) as fleet:
        again = Run(model, fleet, kind)
        again.updates.load(tensors, meta, 2 * EVERY)
        for _ in drawn:
            again.data.step()
        for _ in range(2):
            found.append(again.round())
        drawn = again.data.drawn
    for number in range(4):
        wanted.append(published.round(drawn[number * 4 * EVERY : (number + 1) * 4 * EVERY]))
    assert found == pytest.approx(wanted, rel=tolerance)


def test_moments_are_those_before_an_incomplete_round_though_a_device_has_finished_it() -> None:
    found = []
    for stops in (False, True):
        devices = [
            replace(fast_link("a"), flops_per_s=4e8),
            replace(fast_link("b"), flops_per_s=2.5e7),
        ]
        with emulated(devices) as fleet:
            run = Run(small_model("llama"), fleet)
            for _ in range(2):
                run.round()
            if stops:
                run.stops = True
                with pytest.raises(AbandonedError):
                    run.round()
            run.updates.collect()
            found.append((run.updates.meta(), run.updates.tensors()))
    assert [each["updates"] for each in found[0][0]] == [2 * EVERY, 2]
    assert found[0][0] == found[1][0]
    for name, tensor in found[0][1].items():
        assert torch.equal(tensor, found[1][1][name])


@pytest.mark.parametrize(
    ("exchange", "changes", "kept"),
    [
        ("fp32", {}, ["a", "b"]),
        nightly("int8", {}, ["a", "b"]),
        ("fp32", {"optimizer": "sgd", "momentum": 0.0}, []),  # no moments exist
    ],
)
def test_a_run_goes_on_with_the_moments_of_its_checkpoint(
    corpus_file: Path, tmp_path: Path, exchange: str, changes: dict[str, Any], kept: list[str]
) -> None:
    """The second process trains with other sessions of devices with the same names."""
    job = replace(rounds_job(corpus_file, exchange), checkpoint_every=2, **changes)

    def losses(run: RunFolder, job: JobSpec, *, resume: bool = False) -> list[float]:
        with emulated([fast_link("a"), fast_link("b")]) as fleet:
            return losses_of(trained(job, run, fleet, resume=resume))

    whole = losses(RunFolder.create(tmp_path), job)
    run = RunFolder.create(tmp_path)
    halves = losses(run, replace(job, steps=2)) + losses(run, job, resume=True)
    assert halves == pytest.approx(whole, rel=1e-4)
    meta = json.loads((run.path / "checkpoints" / "step-000002" / "meta.json").read_text())
    assert [each["name"] for each in meta["meta"]["inner"]] == kept


@pytest.mark.parametrize("resumed", [False, True])
def test_a_late_device_begins_with_moments_of_its_first_gradient(resumed: bool) -> None:
    """A device joins in the second round. Or the run is resumed, so that all devices are late."""
    model = small_model("llama")
    published = Published(copy.deepcopy(model), 2)
    devices = [replace(fast_link(name), downlink_bytes_per_s=1e9) for name in ("a", "b", "c")]
    with emulated(devices[:2]) as fleet:
        run = Run(model, fleet)
        run.round()
        published.round(run.data.drawn)
        if not resumed:
            fleet.runtime.join(devices[2])  # type: ignore[attr-defined]
            fleet.runtime.wait_until(lambda: fleet.device_count == 3, 10.0)
            found = [run.round(), run.round()]
    if resumed:
        published.replicas, published.inner = [], []
        with emulated(devices) as fleet:
            data, tensors = run.data, run.updates.tensors()
            run = Run(model, fleet)
            run.data = data
            run.updates.load(tensors, [], EVERY)
            found = [run.round(), run.round()]
    while len(published.replicas) < 3:
        published.join_late()
    drawn, each = run.data.drawn[2 * EVERY :], 3 * EVERY
    assert run.notes == []
    wanted = [published.round(drawn[:each]), published.round(drawn[each:])]
    assert found == pytest.approx(wanted, rel=1e-4)
    for name, parameter in model.named_parameters():
        expected = published.model.get_parameter(name).detach()
        assert float((parameter.detach() - expected).norm()) < 1e-3 * float(expected.norm()) + 1e-4


def test_moments_continue_only_on_the_device_that_returned_them() -> None:
    """Another device can take the name, but not the identity that its credential proves."""
    model = small_model("llama")
    with emulated([fast_link("a"), fast_link("b")]) as fleet:
        run = Run(model, fleet)
        run.round()
        run.updates.collect()
        tensors, meta = copy.deepcopy(run.updates.tensors()), run.updates.meta()
    strangers = [{**one, "identity": 7} for one in meta]
    for saved, expected in ((meta, [2 * EVERY] * 2), (strangers, [EVERY] * 2)):
        with emulated([fast_link("a"), fast_link("b")]) as fleet:
            again = Run(copy.deepcopy(model), fleet)
            again.updates.load(tensors, saved, EVERY)
            found: list[RoundPart] = []
            again.updates._apply = lambda parts, found=found: found.extend(parts)  # type: ignore
            again.updates.round(lambda step: RATE, again.data.step)
            assert [part.updates for part in found] == expected


def test_a_slow_uplink_returns_its_moments_too() -> None:
    slow = FleetDevice("slow", 1e6, 1e7, 2e5, 0.01, 2**30)
    with emulated([replace(slow, name="fast", uplink_bytes_per_s=1e8), slow]) as fleet:
        run = Run(small_model("llama"), fleet)
        run.round()
        run.updates.collect()
        assert [each["name"] for each in run.updates.meta()] == ["fast", "slow"]
    assert run.notes == []


def test_moments_are_returned_only_if_that_takes_a_small_part_of_the_time() -> None:
    with emulated([device("a"), device("b")]) as fleet:
        run = Run(small_model("llama"), fleet)
        run.round()
        before = fleet.counters().traffic.up.total
        run.updates.collect()
        assert run.updates.meta() == []
        assert fleet.counters().traffic.up.total == before


def in_payloads(run: Run, exchange: ExchangeKind) -> int:
    """What one device returns in a round, without headers, in bytes."""
    weights = run.model.parameters()
    shapes = [(p.numel() // p.shape[-1], p.shape[-1]) for p in weights if p.requires_grad]
    arrays = [array for shape in shapes for array in returned(exchange, *shape)]
    return sum(each.rows * each.columns * DType(each.dtype).itemsize for each in arrays)


@pytest.mark.parametrize(
    ("exchange", "most_bits"),
    [
        (ExchangeKind.FP32, 32),
        (ExchangeKind.BF16, 16),
        (ExchangeKind.INT8, 9),
        (ExchangeKind.SPARSE, 0.6),  # in small parameters, the magnitudes are a larger part
    ],
)
def test_a_round_sends_what_the_formula_says(exchange: ExchangeKind, most_bits: float) -> None:
    model = small_model("llama")
    with emulated([device("a"), device("b")], coding="off") as fleet:
        run = Run(model, fleet, exchange)
        run.round()
        before = fleet.counters().traffic
        run.round()
        after = fleet.counters().traffic
    payload_bytes = in_payloads(run, exchange)
    elements = sum(p.numel() for p in model.parameters())
    assert payload_bytes * 8 <= most_bits * elements
    messages = 2 * 3 * len(list(model.parameters()))  # of each device, and up to three each
    up = after.up.gradients - before.up.gradients
    assert 0 < up - 2 * payload_bytes < 128 * messages
    down = after.down.weights - before.down.weights
    if exchange is ExchangeKind.SPARSE:
        most = 2 * exchange.down_bytes(2) * elements + 16 * len(list(model.parameters()))
        assert 2 / 8 * elements < down < most + 128 * messages
    else:
        assert 0 < down - 2 * payload_bytes < 128 * messages


@pytest.mark.parametrize("exchange", [nightly(ExchangeKind.BF16), ExchangeKind.INT8])
def test_rounded_exchanges_learn_as_much(exchange: ExchangeKind) -> None:
    heldout = {}
    for kind in (ExchangeKind.FP32, exchange):
        with emulated([device("a"), device("b")]) as fleet:
            run = Run(small_model("llama"), fleet, kind)
            before = run.heldout()
            for _ in range(4):
                run.round()
            heldout[kind] = run.heldout()
    assert heldout[exchange] == pytest.approx(heldout[ExchangeKind.FP32], rel=0.01)
    assert heldout[exchange] < 0.99 * before


@pytest.mark.parametrize("exchange", [ExchangeKind.FP32, ExchangeKind.INT8, ExchangeKind.SPARSE])
def test_devices_begin_a_round_with_the_servers_weights(exchange: ExchangeKind) -> None:
    """A device that was there and one that has just joined lose the same in the first step."""
    model = small_model("llama")
    with emulated([device("a")]) as fleet:
        run = Run(model, fleet, exchange)
        run.round()
        fleet.runtime.join(device("b"))  # type: ignore[attr-defined]
        fleet.runtime.wait_until(lambda: fleet.device_count == 2, 10.0)
        same = run.data.step()
        found: list[RoundPart] = []
        run.updates._apply = lambda parts: found.extend(parts)  # type: ignore
        run.updates.round(lambda step: RATE, lambda: same)
    first = [unpack(part.losses[0, 0], 1, 1, DType.FP32).float32()[0, 0] for part in found]
    with torch.no_grad():
        wanted = float(loss_of(model, same[0]))
    assert first == pytest.approx([wanted, wanted], rel=1e-5)


def test_faster_devices_do_more_steps_and_a_lost_one_costs_only_its_own() -> None:
    with emulated([device("fast"), device("slow", 0.2), device("lost")]) as fleet:
        run = Run(small_model("llama"), fleet)
        tokens = run.updates.round(lambda step: RATE, run.data.step).tokens
        assert tokens == BATCH * TOKENS * (EVERY + 1 + EVERY)
        fleet.runtime.lose(3, in_s=0.01)  # type: ignore[attr-defined]
        tokens = run.updates.round(lambda step: RATE, run.data.step).tokens
        assert tokens == BATCH * TOKENS * (EVERY + 1)
        assert "the work of lost in this round is lost: it left" in run.notes
        assert run.round() > 0


@pytest.mark.parametrize("exchange", [nightly(ExchangeKind.INT8), ExchangeKind.SPARSE])
def test_a_run_goes_on_though_every_round_loses_a_device(exchange: ExchangeKind) -> None:
    """Another device takes the place of the lost one in the next round."""
    with emulated([device(f"d{n}") for n in range(5)], coding="off") as fleet:
        run = Run(small_model("llama"), fleet, exchange)
        before = run.heldout()
        for number in range(1, 5):
            fleet.runtime.lose(number, in_s=0.05)  # type: ignore[attr-defined]
            tokens = run.updates.round(lambda step: RATE, run.data.step).tokens
            # The new device first needs the weights, so it does fewer steps.
            assert 3 * EVERY * BATCH * TOKENS < tokens <= 4 * EVERY * BATCH * TOKENS
            fleet.runtime.join(device(f"new{number}"))  # type: ignore[attr-defined]
            fleet.runtime.wait_until(lambda: fleet.device_count == 5, 10.0)
        lost = [f"the work of d{n} in this round is lost: it left" for n in range(4)]
        assert run.notes == lost
        assert run.heldout() < before


def test_a_device_that_returns_nonsense_is_named_and_moves_little() -> None:
    model = small_model("llama")
    with emulated([device(name) for name in ("a", "b", "c")]) as fleet:
        run = Run(model, fleet)
        run.round()
        before = [p.detach().clone() for p in model.parameters()]
        honest = run.updates._difference

        def difference(key: Any, part: RoundPart) -> Any:
            return honest(key, part) * (1e6 if part.name == "c" else 1.0)

        run.updates._difference = difference  # type: ignore[method-assign]
        run.round()
    moved = sum(
        float((p - b).square().sum()) for p, b in zip(model.parameters(), before, strict=True)
    )
    assert moved**0.5 < 10  # without a bound, 1e6 times as much
    assert "c returned an unusual difference, which is scaled down" in "".join(run.notes)


def test_adapters_alone_are_exchanged() -> None:
    model = with_lora(small_model("llama"))
    with emulated([device("a"), device("b")], coding="off") as fleet:
        run = Run(model, fleet)
        published = Published(copy.deepcopy(model), 2)
        assert run.round() == pytest.approx(published.round(run.data.drawn), rel=1e-4)
        seen, before = len(run.data.drawn), fleet.counters().traffic
        assert run.round() == pytest.approx(published.round(run.data.drawn[seen:]), rel=1e-4)
        sent = fleet.counters().traffic.down.weights - before.down.weights
    elements = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert 4 * 2 * elements <= sent < 1.5 * 4 * 2 * elements


@pytest.mark.parametrize("exchange", [nightly(ExchangeKind.INT8), ExchangeKind.SPARSE])
def test_a_device_with_the_stated_memory_is_enough(exchange: ExchangeKind) -> None:
    """The vocabulary is so large that a device needs most memory for the exchange."""
    model = small_model("llama", vocab_size=40_000)
    with emulated([device("large")]) as fleet:
        needed = Run(model, fleet, exchange).updates._model.work
    memory_bytes = needed.held_bytes + needed.working_bytes
    with emulated([FleetDevice("small", 1e9, 1e6, 1e6, 0.01, memory_bytes)]) as fleet:
        run = Run(model, fleet, exchange)
        run.updates._number = 1  # a device that joins late also estimates moments
        for _ in range(2):
            run.round()
    assert run.notes == []


def test_a_model_that_no_device_can_hold_is_refused_with_the_size() -> None:
    with emulated([FleetDevice("small", 1e9, 1e6, 1e6, 0.01, 17 * 2**20)]) as fleet:
        run = Run(small_model("llama", vocab_size=40_000), fleet)
        with pytest.raises(FleetError):  # in virtual time, no other device can come
            run.round()
    assert "holds the whole model" in run.notes[0]
