"""Stages on device processes over sockets: losses stay exact when processes are killed and come."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cleave
from cleave.arrays import DType
from cleave.fleet.own_device import OwnDevice
from cleave.graphs.graph_cache import GraphCache
from cleave.graphs.model_graphs import model_graphs
from cleave.planner import forecast
from cleave.planner.stages.model import PsCompute, StagePlanner
from cleave.protocol import messages
from cleave.protocol.messages import Message
from cleave.scheduler.fleet_events import EventKind
from cleave.scheduler.traffic import TrafficKind
from cleave.server.auth.access import Access
from cleave.server.fleet_server import Server
from cleave.server.store.store import Store
from cleave.training.loop.context import TrainContext
from cleave.training.loop.job import JobSpec
from cleave.training.loop.records import Record, StepRecord
from cleave.training.loop.run_folder import RunFolder
from cleave.training.loop.trainer import train
from cleave.training.stages.stage_work import ModelWork
from cleave.training.stages.staged import NotByStages, Rows, StagedModel
from tests.faults.plan import Fault
from tests.faults.processes import Processes
from tests.graphs.models import plain_gradients, small_model, trained
from tests.integration.processes import (
    CLEAVE,
    PATIENCE_S,
    losses,
    own_address,
    server,
    stages_job,
    started,
    training_by_stages,
    until,
    wait_for_event,
)
from tests.training.test_staged import KEPT, EvenStages, SlicedLoss

pytestmark = pytest.mark.slow

TOKENS = 12
DEVICES = 4
WAIT_S = 120.0


class Strikes:
    """Kills the process that is sent a certain message, at once; another one takes its place.

    Args:
        server: whose messages are watched.
        processes: the devices.
        when: says of a message whether it is the one.
    """

    def __init__(
        self, server: Server, processes: Processes, when: Callable[[Message], bool]
    ) -> None:
        self.struck = 0
        self._armed = False
        self._processes = processes
        self._when = when
        self._live = server.live
        self._send = server.live.send
        server.live.send = self.send  # type: ignore[method-assign]

    def arm(self) -> None:
        self._armed = True

    def send(self, session: int, message: Message, kind: TrafficKind) -> None:
        self._send(session, message, kind)
        if self._armed and self._when(message):
            self._armed = False
            name = self._live.manager.sessions[session].name
            for slot, process in self._processes.running.items():
                if name == f"process {process}":
                    self.struck += 1
                    self._processes.strike(slot, Fault.KILL)


def backward(message: Message) -> bool:
    """Say whether a device is asked for a backward pass: of many outputs."""
    return isinstance(message, messages.RunGraph) and len(message.outputs) > 3


def upload(message: Message) -> bool:
    """Say whether a device is asked for a sum of gradients: of a matrix that is no activation."""
    return isinstance(message, messages.Fetch) and message.rows > 2 * TOKENS


@pytest.mark.nightly  # a run by tiles says it in test_recovery.py
def test_a_step_whose_only_device_is_killed_says_that_it_waits(
    tmp_path: Path, corpus_file: Path
) -> None:
    join = ("--json", "--threads", "1")
    with server(tmp_path) as place:
        steps = (*training_by_stages(corpus_file, 100_000), "--server", place["operator_url"])
        with started("join", own_address(place), *join) as (device, lines):
            wait_for_event(lines, "ready")
            with started(*steps) as (_, seen):
                wait_for_event(seen, "step")
                device.kill()
                while wait_for_event(seen, "fleet")["state"] != "absent":
                    pass
                with started("join", own_address(place), *join, "--name", "another"):
                    assert wait_for_event(seen, "fleet")["state"] == "present"
                    wait_for_event(seen, "step")


@pytest.mark.nightly  # tests/training/test_quantized.py compares the losses on emulated devices
def test_a_process_trains_beside_weights_in_four_bits(tmp_path: Path, corpus_file: Path) -> None:
    lora = "r=4,bits=4"
    alone: list[float] = []

    def report(record: Record) -> None:
        if isinstance(record, StepRecord):
            alone.append(record.loss)

    job = replace(stages_job(corpus_file, 2), method="local", lora=lora)
    train(job, RunFolder.create(tmp_path / "runs", "alone"), TrainContext(None, report))
    with server(tmp_path) as place:
        command = (*training_by_stages(corpus_file, 2), "--lora", lora)
        join = ("join", own_address(place), "--threads", "1", "--json")
        with (
            started(*join, cwd=tmp_path) as (_, said),
            started(*command, "--server", place["operator_url"]) as (trainer, lines),
        ):
            wait_for_event(said, "ready")
            found = losses(lines)
            assert trainer.wait(PATIENCE_S) == 0
    assert found == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize(
    ("method", "failing"),
    [
        ("stages", 0.3),
        *(
            pytest.param(*each, marks=pytest.mark.nightly)
            for each in (("stages", 0.03), ("tiles", 0.03), ("tiles", 0.3))
        ),
    ],
)
def test_the_only_device_fails_some_of_its_runs(
    method: str,
    failing: float,
    tmp_path: Path,
    corpus_file: Path,
    plain_losses: Callable[[JobSpec], list[float]],
) -> None:
    plain = replace(stages_job(corpus_file, 2), method="local")
    found: list[Record] = []
    with (
        cleave.serve(stages_on="any") as server,
        Processes(lambda _: server.url, 1, ("--probe", "--failing", str(failing))),
    ):
        server.fleet.wait_for(1, WAIT_S)
        job = replace(plain, method=method)
        train(job, RunFolder(tmp_path / "run"), TrainContext(server.fleet, found.append))
    steps = [record for record in found if isinstance(record, StepRecord)]
    assert [record.loss for record in steps] == pytest.approx(plain_losses(plain), rel=1e-4)


@pytest.mark.parametrize(
    ("planner", "when"),
    [
        pytest.param(EvenStages(loss=True), backward, id="loss there, backward"),
        *(
            pytest.param(planner, when, marks=pytest.mark.nightly, id=f"{where}, {when.__name__}")
            for planner, when, where in (
                (EvenStages(loss=False), upload, "loss here"),
                (SlicedLoss(2, KEPT), backward, "loss in slices"),
                (SlicedLoss(2, KEPT), upload, "loss in slices"),
            )
        ),
    ],
)
def test_a_killed_process_costs_no_exactness(
    planner: StagePlanner, when: Callable[[Message], bool]
) -> None:
    model = small_model("opt")
    plain = copy.deepcopy(model)
    graphs = model_graphs(model, TOKENS, GraphCache.of_user())
    torch.manual_seed(4)
    batches = [torch.randint(3, 96, (6, TOKENS)) for _ in range(3)]
    with (
        cleave.serve(stages_on="any") as server,
        Processes(lambda slot: server.url, DEVICES) as processes,
    ):
        server.fleet.wait_for(DEVICES, WAIT_S)
        strikes = Strikes(server, processes, when)
        told: list[EventKind] = []
        server.live._tell_listener = lambda kind, *_: told.append(kind)
        work = ModelWork(model, graphs, DType.FP32)
        staged = StagedModel(work, server.fleet.runtime, planner, PsCompute(1e11, 0.0))

        def disturbed(ids: Tensor) -> Any:
            server.fleet.wait_for(DEVICES, WAIT_S)
            strikes.arm()
            targets = torch.full_like(ids, -100)
            targets[:, :-1] = ids[:, 1:]
            return staged.gradients(Rows(ids, targets))

        found = trained(model, disturbed, batches, clip=1.0)
        staged.close()
        server.fleet.wait_for(DEVICES, WAIT_S)  # none is just connecting when the server closes
    assert strikes.struck == len(batches)
    assert EventKind.REISSUE in told
    expected = trained(plain, lambda ids: plain_gradients(plain, ids), batches, clip=1.0)
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "devices"),
    [(("--threads", "1"), 2), (("--backend", "nonsense"), 1)],
    ids=["joins", "fails to start"],
)
def test_the_servers_computer_becomes_a_device(
    monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str], devices: int
) -> None:
    monkeypatch.setattr(forecast, "_OWN_DEVICE_SAVES_S", -math.inf)
    monkeypatch.setattr(forecast, "_OWN_DEVICE_SAVES", -math.inf)
    model = small_model("opt")
    plain = copy.deepcopy(model)
    graphs = model_graphs(model, TOKENS, GraphCache.of_user())
    torch.manual_seed(4)
    ids = torch.randint(3, 96, (6, TOKENS))
    targets = torch.full_like(ids, -100)
    targets[:, :-1] = ids[:, 1:]
    said: list[str] = []
    access = Access(Store(None), "operator", fleet_credential="shared", own_credential="mine")
    with (
        cleave.serve(stages_on="any", credential="shared", auth=access) as server,
        Processes(lambda slot: server.url, 1),
    ):
        server.fleet.wait_for(1, WAIT_S)
        own = OwnDevice([*CLEAVE, "join", server.join_url("mine"), "--once", *arguments])
        server.live.own_device = own
        staged = StagedModel(
            ModelWork(model, graphs, DType.FP32), server.fleet.runtime, EvenStages(loss=True),
            PsCompute(1e11, 0.0), note=said.append,
        )  # fmt: skip
        found = staged.gradients(Rows(ids, targets))
        assert staged.plan is not None
        assert len(staged.plan.devices) == devices
        plan = staged.plan
        staged.gradients(Rows(ids, targets))
        assert staged.plan is plan
        runtime = server.fleet.runtime
        assert runtime.own_devices() == ({2} if devices == 2 else set())
        with monkeypatch.context() as alone:  # as if the other device had left
            alone.setattr(runtime, "own_devices", lambda: set(runtime.stage_devices()))
            assert isinstance(staged.forecast_s(Rows(ids, targets)), NotByStages)
        staged.close()
        assert not own.runs
        until(lambda: server.fleet.device_count == 1)
        assert staged.gradients(Rows(ids, targets)) == pytest.approx(found)  # without it
        assert not own.runs
    assert found == pytest.approx(plain_gradients(plain, ids), rel=1e-5)
    assert any("this server also becomes a device" in text for text in said)
    assert any("did not join" in text for text in said) == (devices == 1)


@pytest.mark.nightly  # tests/training/test_suspicion.py names liars on emulated devices
@pytest.mark.parametrize(("spoiled", "value"), [(1, "nan"), (6, "1e30"), (9, "-inf")])
def test_a_process_with_bad_memory_is_named_and_harms_nothing(
    spoiled: int, value: str, notes: list[str]
) -> None:
    """One of three returns one wrong element: in its first array, in a gradient, in a sum."""
    model = small_model("opt")
    plain = copy.deepcopy(model)
    graphs = model_graphs(model, TOKENS, GraphCache.of_user())
    torch.manual_seed(4)
    batches = [torch.randint(3, 96, (6, TOKENS)) for _ in range(3)]
    bad = ("--spoil", str(spoiled), f"--value={value}")
    said: list[str] = []
    with (
        cleave.serve(stages_on="any") as server,
        Processes(lambda slot: server.url, 1, bad) as spoiling,
    ):
        server.fleet.wait_for(1, WAIT_S)
        liar = f"process {spoiling.running[0]}"
        with Processes(lambda slot: server.url, 2):
            server.fleet.wait_for(3, WAIT_S)
            work = ModelWork(model, graphs, DType.FP32)
            staged = StagedModel(
                work, server.fleet.runtime, EvenStages(loss=False), PsCompute(1e11, 0.0),
                note=said.append,
            )  # fmt: skip

            def gradients(ids: Tensor) -> Any:
                targets = torch.full_like(ids, -100)
                targets[:, :-1] = ids[:, 1:]
                return staged.gradients(Rows(ids, targets))

            found = trained(model, gradients, batches, clip=1.0)
            staged.close()
    assert [note.split(":")[0] for note in said if "quarantined" in note] == [
        "device 1 is quarantined"
    ]
    wrong = [note for note in notes if "sent a wrong result" in note]
    assert len(wrong) == 1
    assert f"{liar} sent a wrong result: " in wrong[0]
    expected = trained(plain, lambda ids: plain_gradients(plain, ids), batches, clip=1.0)
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("provider", [pytest.param("auto", marks=pytest.mark.nightly), "cpu"])
def test_a_device_says_what_runs_graphs_once_it_has_one(provider: str) -> None:
    model = small_model("opt")
    plain = copy.deepcopy(model)
    graphs = model_graphs(model, TOKENS, GraphCache.of_user())
    ids = torch.randint(3, 96, (6, TOKENS))
    targets = torch.full_like(ids, -100)
    targets[:, :-1] = ids[:, 1:]
    device = ("--provider", provider, "--backend", "numpy", "--threads", "1", "--json")
    with (
        cleave.serve(stages_on="any") as server,
        started("join", server.url, *device) as (_, lines),
    ):
        wait_for_event(lines, "ready")
        until(lambda: server.fleet.device_count == 1)  # the server has probed it as well
        # Parameters of more than 1000 bytes travel in parts.
        work = ModelWork(model, graphs, DType.FP32, message_bytes=1000)
        runtime = server.fleet.runtime
        staged = StagedModel(work, runtime, EvenStages(loss=True), PsCompute(1e11, 0.0))
        found = staged.gradients(Rows(ids, targets))
        staged.close()
        said = wait_for_event(lines, "note")["text"]
    assert found == pytest.approx(plain_gradients(plain, ids), rel=1e-5)
    assert "runs graphs; in its self-test it is off by" in said
    if provider == "cpu":
        assert said.startswith("cpu ")
