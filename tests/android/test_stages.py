"""Stages on the Android client against a real server: layers run by the app's own class, on a JVM.

It takes ONNX Runtime's library from the Python package, in the place of the one for phones.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import cleave
from cleave.arrays import DType
from cleave.graphs.graph_cache import GraphCache
from cleave.graphs.model_graphs import model_graphs
from cleave.planner.stages.model import PsCompute
from cleave.scheduler.counters import Traffic
from cleave.server.fleet_server import Server
from cleave.training.loop.job import JobSpec
from cleave.training.loop.run_folder import RunFolder
from cleave.training.stages.stage_work import ModelWork
from cleave.training.stages.staged import StagedModel
from cleave.workload.build import build_model
from cleave.workload.registry import find_model
from tests.android.jvm import GraphClasses
from tests.graphs.models import plain_gradients, trained
from tests.integration import cuts
from tests.integration.processes import (
    PATIENCE_S,
    losses,
    own_address,
    printing,
    server,
    stages_job,
    started,
    training,
    training_job,
    until,
    wait_for_event,
)
from tests.training.runs import losses_of, losses_on_one_device, rounds_job
from tests.training.runs import trained as trained_by
from tests.training.test_staged import EvenStages, rows

STEPS = 3
SEQ = 16
Plain = Callable[[JobSpec], list[float]]


def device(
    classes: GraphClasses, link: str, state: Path
) -> AbstractContextManager[tuple[subprocess.Popen[str], Iterator[dict[str, Any]]]]:
    """A device that runs graphs, with a folder for its credential; see `printing`."""
    return printing(classes.device("--threads", "1", "--state", str(state), link))


@pytest.mark.nightly
def test_the_unit_tests_pass(graph_classes: GraphClasses) -> None:
    for command in (graph_classes.unit_tests(), graph_classes.unit_tests_without()):
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stdout + done.stderr


def opt_nano() -> Any:
    """The same at every call."""
    return build_model(find_model("opt-nano"), seed=0).train()


def batches() -> list[torch.Tensor]:
    """Of four sequences each."""
    torch.manual_seed(3)
    vocabulary = find_model("opt-nano").vocabulary
    return [torch.randint(3, vocabulary, (4, SEQ)) for _ in range(STEPS)]


def by_even_stages(listening: Server, count: int) -> tuple[list[float], Traffic]:
    """The losses of opt-nano on so many devices, and the bytes that coding saved."""
    until(lambda: listening.fleet.device_count == count)
    model = opt_nano()
    work = ModelWork(model, model_graphs(model, SEQ, GraphCache.of_user()), DType.FP32)
    runtime = listening.fleet.runtime
    staged = StagedModel(work, runtime, EvenStages(loss=True), PsCompute(1e11, 0.0))

    def gradients(ids: torch.Tensor) -> Any:
        return staged.gradients(rows(ids))

    found = trained(model, gradients, batches(), clip=1.0)
    staged.close()
    return found, runtime.counters().saved


@pytest.mark.nightly
def test_in_a_mixed_fleet_it_trains_to_the_losses_of_plain_pytorch(
    graph_classes: GraphClasses, tmp_path: Path
) -> None:
    """It shares a layer with a process; another process has the layer after."""
    plain = opt_nano()
    expected = trained(plain, lambda ids: plain_gradients(plain, ids), batches(), clip=1.0)
    python = ("--backend", "numpy", "--threads", "1", "--json")
    with (
        cleave.serve(stages_on="any") as listening,
        device(graph_classes, listening.url, tmp_path) as (process, said),
    ):
        until(lambda: listening.fleet.device_count == 1)  # so that it is the first
        with (
            started("join", listening.url, *python) as (first, told_first),
            started("join", listening.url, *python) as (second, told_second),
        ):
            found, _ = by_even_stages(listening, 3)
            for helper, lines in (
                (process, said), (first, told_first), (second, told_second),
            ):  # fmt: skip
                helper.terminate()
                assert wait_for_event(lines, "left")["blocks"] >= 10 * STEPS
    assert found == pytest.approx(expected, rel=1e-4)


def test_its_losses_are_those_of_plain_pytorch_with_coded_arrays_to_the_bit(
    graph_classes: GraphClasses, tmp_path: Path
) -> None:
    whole = opt_nano()
    expected = trained(whole, lambda ids: plain_gradients(whole, ids), batches(), clip=1.0)

    def found(coding: str) -> tuple[list[float], Traffic]:
        with (
            cleave.serve(stages_on="any", coding=coding) as listening,
            device(graph_classes, listening.url, tmp_path / coding),
        ):
            return by_even_stages(listening, 1)

    (plain, nothing), (coded, saved) = found("off"), found("on")
    assert plain == pytest.approx(expected, rel=1e-4)
    assert coded == plain
    assert (nothing.down.total, nothing.up.total) == (0, 0)
    assert saved.down.weights > 0
    assert saved.up.gradients > 0


@pytest.mark.nightly
def test_it_keeps_weights_and_optimizer_state(
    graph_classes: GraphClasses, corpus_file: Path, tmp_path: Path, plain_losses: Plain
) -> None:
    job = stages_job(corpus_file, STEPS)
    with (
        cleave.serve(stages_on="any") as listening,
        device(graph_classes, listening.url, tmp_path / "jvm"),
    ):
        listening.fleet.wait_for(1, PATIENCE_S)
        kept = replace(job, method="stages", state="devices")
        found = losses_of(trained_by(kept, RunFolder(tmp_path / "run"), listening.fleet))
    assert found == pytest.approx(plain_losses(job), rel=1e-4)


@pytest.mark.nightly
def test_it_keeps_them_though_its_connection_is_cut(
    graph_classes: GraphClasses, corpus_file: Path, tmp_path: Path, plain_losses: Plain
) -> None:
    job = stages_job(corpus_file, cuts.STEPS)
    with (
        cleave.serve(stages_on="any") as served,
        cuts.cutting(served.live.manager) as cut,
        device(graph_classes, served.url, tmp_path / "jvm"),
    ):
        seen = cuts.losses_with_cuts(served, cut, job, tmp_path / "run")
    assert seen == pytest.approx(plain_losses(job), rel=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("exchange", ["int8", "sparse"])
def test_it_trains_an_adapter_by_local_updates(
    graph_classes: GraphClasses, corpus_file: Path, tmp_path: Path, exchange: str
) -> None:
    job = rounds_job(corpus_file, exchange)
    with (
        cleave.serve(stages_on="any") as listening,
        device(graph_classes, listening.url, tmp_path / "jvm"),
    ):
        listening.fleet.wait_for(1, PATIENCE_S)
        seen = losses_of(trained_by(job, RunFolder(tmp_path / "run"), listening.fleet))
    expected = losses_on_one_device(job, RunFolder(tmp_path / "alone"))
    assert seen == pytest.approx(expected, rel=1e-4)
    assert len(set(seen)) == 2


@pytest.mark.nightly
def test_where_onnx_runtime_cannot_be_loaded_it_multiplies(
    graph_classes: GraphClasses, corpus_file: Path, tmp_path: Path, plain_losses: Plain
) -> None:
    broken = (f"-Donnxruntime={tmp_path / 'missing.so'}",)
    expected = plain_losses(training_job(corpus_file, 1))
    with server(tmp_path) as place:
        arguments = ("--threads", "1", "--state", str(tmp_path / "jvm"), own_address(place))
        with printing(graph_classes.device(*arguments, options=broken)) as (_, said):
            assert "only multiplies" in wait_for_event(said, "warning")["text"]
            wait_for_event(said, "working")
            command = (*training(corpus_file, 1), "--server", place["operator_url"])
            with started(*command) as (trainer, lines):
                seen = losses(lines)
                assert trainer.wait(PATIENCE_S) == 0
    assert seen == pytest.approx(expected, rel=1e-4)
