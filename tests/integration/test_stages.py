"""Stages on device processes over sockets: losses stay exact when processes are killed and come."""

from __future__ import annotations

import copy
import math
import random
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
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
from cleave.machine import webgpu_session
from cleave.planner import forecast
from cleave.planner.stages.model import PsCompute, StagePlanner
from cleave.protocol import messages
from cleave.protocol.messages import Message
from cleave.scheduler.counters import TrafficKind
from cleave.scheduler.sessions.joining import GRAPH_SHARE
from cleave.scheduler.sessions.session import EventKind
from cleave.server.access import Access
from cleave.server.fleet_server import Server
from cleave.server.store.store import Store
from cleave.training.loop.context import TrainContext
from cleave.training.loop.job import JobSpec, OptimizerKind
from cleave.training.loop.optimizer import Optimizer, UpdateRule
from cleave.training.loop.records import NoteRecord, Record, StepRecord
from cleave.training.loop.run_folder import RunFolder, held_steps
from cleave.training.loop.start import train
from cleave.training.stages.audits import Auditor
from cleave.training.stages.stage_work import ModelWork
from cleave.training.stages.staged import NotByStages, StagedModel
from tests.faults.plan import Fault
from tests.faults.processes import Processes
from tests.graphs.models import plain_gradients, small_model, trained
from tests.integration.processes import (
    CLEAVE,
    stages_job,
    started,
    until,
    wait_for_event,
)
from tests.machine import swiftshader
from tests.training import runs
from tests.training.runs import losses_of
from tests.training.test_staged import KEPT, EvenStages, SlicedLoss
from tests.training.test_staged import rows as rows  # tests/web takes it from here

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


class Prepared:
    """A small model with its graphs, a copy for plain PyTorch, and token ids to train on."""

    def __init__(self) -> None:
        self.model = small_model("opt")
        self.plain = copy.deepcopy(self.model)
        self.graphs = model_graphs(self.model, TOKENS, GraphCache.of_user())
        torch.manual_seed(4)
        self.batches = [torch.randint(3, 96, (6, TOKENS)) for _ in range(3)]

    def staged(
        self, server: Server, planner: StagePlanner, dtype: DType = DType.FP32, **options: Any
    ) -> StagedModel:
        work = ModelWork(self.model, self.graphs, dtype)
        runtime = server.fleet.runtime
        return StagedModel(work, runtime, planner, PsCompute(1e11, 0.0), **options)

    def plain_losses(self) -> list[float]:
        def gradients(ids: Tensor) -> Any:
            return plain_gradients(self.plain, ids)

        return trained(self.plain, gradients, self.batches, clip=1.0)


def backward(message: Message) -> bool:
    """Say whether a device is asked for a backward pass: of many outputs."""
    return isinstance(message, messages.RunGraph) and len(message.outputs) > 3


def upload(message: Message) -> bool:
    """Say whether a device is asked for a sum of gradients: of a matrix that is no activation."""
    return isinstance(message, messages.Fetch) and message.rows > 2 * TOKENS


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
    with (
        cleave.serve(stages_on="any") as server,
        Processes(lambda _: server.url, 1, ("--probe", "--failing", str(failing))),
    ):
        server.fleet.wait_for(1, WAIT_S)
        found = runs.trained(replace(plain, method=method), RunFolder(tmp_path), server.fleet)
    assert losses_of(found) == pytest.approx(plain_losses(plain), rel=1e-4)


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
    prepared = Prepared()
    with (
        cleave.serve(stages_on="any") as server,
        Processes(lambda slot: server.url, DEVICES) as processes,
    ):
        server.fleet.wait_for(DEVICES, WAIT_S)
        strikes = Strikes(server, processes, when)
        told: list[EventKind] = []
        server.live._tell_listener = lambda kind, *_: told.append(kind)
        staged = prepared.staged(server, planner)

        def disturbed(ids: Tensor) -> Any:
            server.fleet.wait_for(DEVICES, WAIT_S)
            strikes.arm()
            return staged.gradients(rows(ids))

        found = trained(prepared.model, disturbed, prepared.batches, clip=1.0)
        staged.close()
        server.fleet.wait_for(DEVICES, WAIT_S)  # none is just connecting when the server closes
    assert strikes.struck == len(prepared.batches)
    assert EventKind.REISSUE in told
    assert found == pytest.approx(prepared.plain_losses(), rel=1e-4)


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
    prepared = Prepared()
    ids = prepared.batches[0]
    said: list[str] = []
    access = Access(Store(None), "operator", fleet_credential="shared", own_credential="mine")
    with (
        cleave.serve(stages_on="any", credential="shared", auth=access) as server,
        Processes(lambda slot: server.url, 1),
    ):
        server.fleet.wait_for(1, WAIT_S)
        own = OwnDevice([*CLEAVE, "join", server.join_url("mine"), "--once", *arguments])
        server.live.own_device = own
        staged = prepared.staged(server, EvenStages(loss=True), note=said.append)
        found = staged.gradients(rows(ids))
        assert staged.plan is not None
        assert len(staged.plan.devices) == devices
        plan = staged.plan
        staged.gradients(rows(ids))
        assert staged.plan is plan
        runtime = server.fleet.runtime
        assert len(runtime.own_devices()) == devices - 1
        for number in runtime.own_devices():  # it has measured a layer by ONNX Runtime
            own_one = server.live.manager.sessions[number]
            assumed = GRAPH_SHARE * own_one.claimed_flops_per_s
            assert own_one.claimed_graph_flops_per_s not in (0.0, assumed)
        with monkeypatch.context() as alone:  # as if the other device had left
            alone.setattr(runtime, "own_devices", lambda: set(runtime.stage_devices()))
            assert isinstance(staged.forecast_s(rows(ids)), NotByStages)
        staged.close()
        assert not own.runs
        until(lambda: server.fleet.device_count == 1)
        assert staged.gradients(rows(ids)) == pytest.approx(found)  # without it
        assert not own.runs
    assert found == pytest.approx(plain_gradients(prepared.plain, ids), rel=1e-5)
    assert any("this server also joins as a device" in text for text in said)
    assert any("did not join" in text for text in said) == (devices == 1)


@pytest.mark.nightly  # tests/training/test_suspicion.py names liars on emulated devices
@pytest.mark.parametrize(("spoiled", "value"), [(1, "nan"), (6, "1e30"), (9, "-inf")])
def test_a_process_with_bad_memory_is_named_and_harms_nothing(
    spoiled: int, value: str, notes: list[str]
) -> None:
    """One of three returns one wrong element: in its first array, in a gradient, in a sum."""
    prepared = Prepared()
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
            staged = prepared.staged(server, EvenStages(loss=False), note=said.append)

            def gradients(ids: Tensor) -> Any:
                return staged.gradients(rows(ids))

            found = trained(prepared.model, gradients, prepared.batches, clip=1.0)
            staged.close()
    assert [note.split(":")[0] for note in said if "quarantined" in note] == [
        "device 1 is quarantined"
    ]
    wrong = [note for note in notes if "sent a wrong result" in note]
    assert len(wrong) == 1
    assert f"{liar} sent a wrong result: " in wrong[0]
    assert found == pytest.approx(prepared.plain_losses(), rel=1e-4)


@pytest.mark.parametrize("dtype", [pytest.param(DType.FP32, marks=pytest.mark.nightly), DType.BF16])
def test_devices_with_other_runners_train_alike_and_none_is_accused(
    dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All results are audited, by ONNX Runtime. Others run graphs in PyTorch and by WebGPU."""
    prepared = Prepared()
    in_software = swiftshader.environment() if webgpu_session.installed() else None
    for name, value in (in_software or {}).items():
        monkeypatch.setenv(name, value)
    runners = ("cpu", "torch:cpu", "torch:cpu", "webgpu" if in_software else "cpu")
    auditor = Auditor(1.0, random.Random(1))
    options = ("--backend", "numpy", "--threads", "1", "--json")
    with cleave.serve(stages_on="any") as server, ExitStack() as devices:
        for runner in runners:
            joining = started("join", server.url, "--runner", runner, *options)
            _, lines = devices.enter_context(joining)
            said = wait_for_event(lines, "note")["text"]
            assert said.startswith(f"{runner} runs layers at ")
        server.fleet.wait_for(4, WAIT_S)
        staged = prepared.staged(server, EvenStages(loss=True), dtype, auditor=auditor)

        def gradients(ids: Tensor) -> float:
            loss = staged.gradients(rows(ids))
            assert not isinstance(loss, NotByStages)
            return loss

        found = trained(prepared.model, gradients, prepared.batches, clip=1.0)
        staged.close()
    within = 1e-5 if dtype is DType.FP32 else 2e-2
    assert found == pytest.approx(prepared.plain_losses(), rel=within)
    assert auditor.counters.outputs > 0
    assert auditor.counters.sums > 0
    assert auditor.counters.faults == 0


@pytest.mark.parametrize("dtype", [DType.FP32, pytest.param(DType.BF16, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "runners", [("torch:cpu", "cpu"), pytest.param(("webgpu", "cpu"), marks=pytest.mark.nightly)]
)
def test_devices_with_other_runners_keep_state_and_none_is_accused(
    dtype: DType, runners: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server repeats all their steps, and AdamW amplifies the rounding errors."""
    prepared = Prepared()
    in_software = swiftshader.environment() if webgpu_session.installed() else None
    if "webgpu" in runners and not in_software:
        pytest.skip("needs the runner webgpu")
    for name, value in (in_software or {}).items():
        monkeypatch.setenv(name, value)
    auditor = Auditor(1.0, random.Random(1))
    options = ("--backend", "numpy", "--threads", "2", "--json")
    with cleave.serve(stages_on="any") as server, ExitStack() as devices:
        for runner in runners:
            _, lines = devices.enter_context(
                started("join", server.url, "--runner", runner, *options)
            )
            wait_for_event(lines, "note")
        server.fleet.wait_for(2, WAIT_S)
        planner = EvenStages(loss=False)
        staged = prepared.staged(server, planner, dtype, auditor=auditor)
        rule = UpdateRule(OptimizerKind.ADAMW, weight_decay=0.1)
        optimizer = Optimizer(prepared.model, rule, clip=1.0, in_backward=False)
        staged.keep_on_devices(optimizer, planner=planner)
        for ids in prepared.batches * 4:
            loss = optimizer.step_whole(5e-3, partial(staged.gradients, rows(ids)))
            assert isinstance(loss, float)
        staged.settle()
        assert staged.replays is not None
        repeated = staged.replays.counters.steps
        staged.close()
    assert repeated == 2 * len(prepared.batches) * 4
    assert auditor.counters.faults == 0


def test_a_device_without_the_gpu_that_was_asked_for_joins_with_its_cpu() -> None:
    """Its driver may be down, and a service would otherwise try for ever."""
    with (
        cleave.serve(stages_on="any") as server,
        started("join", server.url, "--runner", "mps", "--threads", "1", "--json") as (_, lines),
    ):
        said = [wait_for_event(lines, "note")["text"] for _ in range(2)]
        wait_for_event(lines, "ready")
    assert said[0].endswith("; tiles are multiplied on the CPU")
    assert said[1].startswith("there is no torch:mps here, so the CPU runs layers")


@pytest.mark.parametrize(
    ("runner", "named"),
    [
        pytest.param("auto", "cpu", marks=pytest.mark.nightly),
        ("cpu", "cpu"),
        ("torch", "torch:cpu"),
    ],
)
def test_a_device_says_what_runs_its_graphs(runner: str, named: str) -> None:
    prepared = Prepared()
    ids = prepared.batches[0]
    device = ("--runner", runner, "--backend", "numpy", "--threads", "1", "--json")
    with (
        cleave.serve(stages_on="any") as server,
        started("join", server.url, *device) as (_, lines),
    ):
        said = wait_for_event(lines, "note")["text"]
        wait_for_event(lines, "ready")
        until(lambda: server.fleet.device_count == 1)  # the server has probed it as well
        # Parameters of more than 1000 bytes travel in parts.
        work = ModelWork(prepared.model, prepared.graphs, DType.FP32, message_bytes=1000)
        runtime = server.fleet.runtime
        staged = StagedModel(work, runtime, EvenStages(loss=True), PsCompute(1e11, 0.0))
        found = staged.gradients(rows(ids))
        staged.close()
    assert found == pytest.approx(plain_gradients(prepared.plain, ids), rel=1e-5)
    assert said.startswith(f"{named} runs layers at ")
    assert "GFLOP/s; largest error in its self-test:" in said


def update(message: Message) -> bool:
    """Say whether a device is asked to update a weight: with two moments, to three new arrays."""
    return isinstance(message, messages.RunGraph) and (
        len(message.inputs) == 5 and len(message.outputs) == 3
    )


@pytest.mark.parametrize(
    "when",
    [
        pytest.param(update, id="update"),
        pytest.param(backward, id="backward", marks=pytest.mark.nightly),
        pytest.param(upload, id="snapshot", marks=pytest.mark.nightly),
    ],
)
def test_killed_devices_with_the_weights_cost_no_exactness(
    when: Callable[[Message], bool],
    tmp_path: Path,
    corpus_file: Path,
    plain_losses: Callable[[JobSpec], list[float]],
) -> None:
    """They are killed in the middle; later, the run resumes with its state on the server."""
    job = replace(stages_job(corpus_file, 6), schedule="constant", warmup_steps=1)
    plain = replace(job, method="local", checkpoint_every=2)
    ours = replace(plain, method="stages", state="devices", steps=4, eval_every=2)
    found: list[Record] = []
    run = RunFolder(tmp_path / "run")
    with (
        cleave.serve(stages_on="any") as server,
        Processes(lambda _: server.url, 2) as processes,
    ):
        strikes = Strikes(server, processes, when)

        def report(record: Record) -> None:
            found.append(record)
            if isinstance(record, StepRecord) and record.step in (1, 3):
                strikes.arm()

        server.fleet.wait_for(2, WAIT_S)
        train(ours, run, TrainContext(server.fleet, report))
        resumed = replace(ours, state="server", steps=6)
        train(resumed, run, TrainContext(server.fleet, found.append), resume=True)
    assert strikes.struck == 2
    assert losses_of(found) == pytest.approx(plain_losses(plain), rel=1e-4)


@pytest.mark.parametrize("options", [("--scale", "1.5"), ("--spoil", "60", "--value", "0.5")])
def test_what_a_process_with_the_weights_falsified_is_undone(
    options: tuple[str, ...],
    tmp_path: Path,
    corpus_file: Path,
    plain_losses: Callable[[JobSpec], list[float]],
) -> None:
    """It falsifies all updates or one element. The losses in the end are those of plain PyTorch.

    It joins again whenever it is quarantined. With the credential of all, nobody can know it.
    """
    job = replace(stages_job(corpus_file, 8), schedule="constant", warmup_steps=1)
    plain = replace(job, method="local", checkpoint_every=4)
    ours = replace(plain, method="stages", state="devices", audit=1.0)
    said: list[str] = []
    blamed: list[str] = []

    def heard(record: Record) -> None:
        if isinstance(record, NoteRecord):
            said.append(record.text)
            if found := re.match(r"device (\d+) is quarantined: ", record.text):
                blamed.append(server.live.manager.sessions[int(found[1])].name)

    run = RunFolder(tmp_path / "run")
    with (
        cleave.serve(stages_on="any") as server,
        Processes(lambda _: server.url, 1, options),
    ):
        server.fleet.wait_for(1, WAIT_S)
        (liar,) = server.live.manager.sessions.values()
        with Processes(lambda _: server.url, 2):
            server.fleet.wait_for(3, WAIT_S)
            train(ours, run, TrainContext(server.fleet, heard))
    assert set(blamed) == {liar.name}
    assert any(note.startswith("going back to step ") for note in said)
    losses = [record["loss"] for record in run.records() if record["event"] == "step"]
    assert losses == pytest.approx(plain_losses(plain), rel=1e-4)
    assert held_steps(run.path / "checkpoints") == [8, 4]
