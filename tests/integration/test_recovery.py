"""A server that is killed and a device that is lost: real processes, real signals."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cleave
from cleave.training.loop.context import TrainContext
from cleave.training.loop.job import JobSpec
from cleave.training.loop.records import Record, StepRecord
from cleave.training.loop.run_folder import CHECKPOINTS, RunFolder
from cleave.training.loop.start import train
from tests.integration.emulation import DEVICE, emulation
from tests.integration.processes import (
    JOIN,
    PATIENCE_S,
    free_port,
    here,
    jobs,
    records,
    started,
    training,
    training_job,
    until,
    wait_for_event,
)
from tests.training.runs import losses_of, notes_of, steps_of, trained

STEPS = 100_000  # more than are done before the server is stopped


@pytest.mark.nightly  # the next test kills and resumes a run without a server
def test_a_server_started_again_knows_devices_and_jobs(
    corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL of a server in a journaled run, a new server on its port, then SIGTERM.

    The device comes back by itself, and all losses are those of plain PyTorch.
    """
    monkeypatch.setenv("CLEAVE_STATE", str(tmp_path / "state"))
    data, folder = tmp_path / "data", tmp_path / "runs" / "run"

    def known() -> dict[str, Any]:
        """The only device, as the server or its folder knows it."""
        shown = here("devices", "--data", str(data), "--json")
        (device,) = json.loads(shown.stdout)["devices"]
        return dict(device)

    serve = ("serve", "--port", free_port(), "--data", str(data), "--json")
    spec = replace(training_job(corpus_file, STEPS, "opt-nano"), batch=2)
    submit = (
        *training(corpus_file, STEPS, "opt-nano"), "--batch", "2", "--checkpoint-every", "4",
        "--name", "run", "--journal",
    )  # fmt: skip
    with ExitStack() as stack:
        server, lines = stack.enter_context(started(*serve, cwd=tmp_path))
        listening = wait_for_event(lines, "listening")
        to_server = ("--server", listening["operator_url"])
        _, steps = stack.enter_context(started(*submit, *to_server))
        assert "training waits" in wait_for_event(steps, "fleet")["text"]  # no device has joined
        join = ("join", listening["url"], "--name", "anna", *JOIN)
        device, news = stack.enter_context(started(*join))
        wait_for_event(news, "ready")
        assert wait_for_event(steps, "fleet")["state"] == "present"
        for _ in range(6):  # past a checkpoint
            wait_for_event(steps, "step")
        (job,) = jobs(data)
        assert (job["state"], job["run_folder"]) == ("running", str(folder))
        before = known()
        assert before["blocks"] > 0
        server.send_signal(signal.SIGKILL)
        server.wait(PATIENCE_S)
        assert wait_for_event(news, "waiting")["retry_s"] >= 0
        assert device.poll() is None
        (job,) = jobs(data)
        assert job["state"] == "interrupted"
        assert "cleave jobs resume job-1" in job["reason"]
        away = known()  # no server runs: the folder is asked
        assert away["state"] in ("away", "lost")
        assert away["blocks"] >= before["blocks"]

        server, lines = stack.enter_context(started(*serve, cwd=tmp_path))
        said = wait_for_event(lines, "note")["text"]
        assert "job-1 (opt-nano) was interrupted" in said
        assert "cleave jobs resume job-1" in said
        wait_for_event(lines, "listening")
        late = here("train", *to_server, "--attach", "job-1")
        assert late.returncode == 2
        assert "ended (interrupted) before" in late.stderr
        resume = ("train", "--resume", str(folder), "--json", *to_server)
        _, steps = stack.enter_context(started(*resume))
        wait_for_event(news, "ready")  # by itself
        start = wait_for_event(steps, "start")["step"]
        assert start >= 4
        assert start % 4 == 0
        for _ in range(3):
            wait_for_event(steps, "step")
        again = known()
        assert (again["id"], again["name"], again["sessions"]) == (before["id"], "anna", 2)
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 0
        wait_for_event(news, "waiting")  # for a server that may be started again
        device.send_signal(signal.SIGINT)
        wait_for_event(news, "left")
        assert device.wait(PATIENCE_S) == 0
    written = [r for r in RunFolder(folder).records() if r["event"] == "step"]
    done = len(written)
    assert [r["step"] for r in written] == list(range(1, done + 1))
    last = jobs(data)[-1]
    assert (last["state"], last["steps"], last["loss"]) == ("stopped", done, written[-1]["loss"])
    assert known()["blocks"] > before["blocks"]
    assert f"step-{done:06d}" in [path.name for path in (folder / CHECKPOINTS).iterdir()]
    plain: list[Record] = []
    context = TrainContext(None, plain.append, lambda: len(losses_of(plain)) >= done)
    train(spec, RunFolder(tmp_path / "plain"), context)
    assert [r["loss"] for r in written] == pytest.approx(losses_of(plain), rel=1e-4)


def test_a_killed_run_is_resumed_to_the_same_losses_of(
    corpus_file: Path, tmp_path: Path, plain_losses: Callable[[JobSpec], list[float]]
) -> None:
    """Embedded devices; `benchmarks.crash` kills at many more moments."""
    command = (
        *training(corpus_file, 12, "opt-nano"), "--checkpoint-every", "2", "--devices", "1",
        "--name", "run",
    )  # fmt: skip
    with started(*command, cwd=tmp_path) as (process, steps):
        before = [wait_for_event(steps, "step") for _ in range(3)]
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE_S)
    answer = here("train", "--resume", "runs/run", "--devices", "0", "--json", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert "resuming after step" in answer.stderr
    done = next(r for r in records(answer.stdout) if r["event"] == "done")
    assert done["resumed_after"] in range(2, 13, 2)
    again = [r for r in records(answer.stdout) if r["event"] == "step"]
    found = {r["step"]: r["loss"] for r in again}
    repeated = [r for r in before if r["step"] in found]
    expected = [found[r["step"]] for r in repeated]
    assert [r["loss"] for r in repeated] == pytest.approx(expected, rel=1e-4)
    written = [r for r in RunFolder(tmp_path / "runs" / "run").records() if r["event"] == "step"]
    assert [r["step"] for r in written] == list(range(1, 13))
    plain = plain_losses(training_job(corpus_file, 12, "opt-nano"))
    assert [r["loss"] for r in written] == pytest.approx(plain, rel=1e-4)


def test_all_devices_gone_and_training_goes_on_until_one_comes(
    corpus_file: Path, tmp_path: Path, plain_losses: Callable[[JobSpec], list[float]]
) -> None:
    """`--fallback local` on a served fleet whose only device leaves."""
    job = training_job(corpus_file, 6, "opt-nano")
    ours: list[Record] = []
    with cleave.serve() as server, ExitStack() as stack:
        first = stack.enter_context(emulation(server.url, [DEVICE]))
        until(lambda: server.fleet.device_count == 1)

        def report(record: Record) -> None:
            ours.append(record)
            if isinstance(record, StepRecord) and record.step == 2:
                first.end()
            if isinstance(record, StepRecord) and record.step == 4:
                stack.enter_context(emulation(server.url, [DEVICE]))
                until(lambda: server.fleet.device_count == 1)

        served = replace(job, fallback="local", fallback_after_s=0.0)
        train(served, RunFolder(tmp_path), TrainContext(server.fleet, report))
    assert losses_of(ours) == pytest.approx(plain_losses(job), rel=1e-4)
    steps = steps_of(ours)
    assert steps[3].local_gemms > 0
    assert steps[3].tiles == 0
    assert steps[5].local_gemms == 0
    assert steps[5].tiles > 0
    said = [r["state"] for r in RunFolder(tmp_path).records() if r["event"] == "fleet"]
    assert said[-3:] == ["absent", "local", "present"]


def test_a_damaged_checkpoint_is_passed_over_and_said(corpus_file: Path, tmp_path: Path) -> None:
    job = replace(training_job(corpus_file, 4, "opt-nano"), checkpoint_every=1)
    seen = trained(job, RunFolder(tmp_path / "run"))
    newest = tmp_path / "run" / CHECKPOINTS / "step-000004" / "tensors.safetensors"
    os.truncate(newest, newest.stat().st_size // 2)
    again = trained(job, RunFolder(tmp_path / "run"), resume=True)
    assert losses_of(again) == losses_of(seen)[3:]
    notes = notes_of(again).splitlines()
    assert any("skipped a checkpoint" in text and "step-000004" in text for text in notes)
    assert "resuming after step 3" in notes
    folder = newest.parent.parent  # kept, though its step was written again
    assert sorted(path.name for path in folder.iterdir()) == [
        "step-000003", "step-000004", "step-000004.damaged",
    ]  # fmt: skip


def test_without_a_whole_checkpoint_nothing_is_begun_again_unasked(
    corpus_file: Path, tmp_path: Path
) -> None:
    """`cleave train --resume` refuses and touches nothing; --restart keeps what it finds."""
    job = replace(training_job(corpus_file, 3, "opt-nano"), checkpoint_every=1)
    seen = trained(job, RunFolder(tmp_path / "run"))
    folder = tmp_path / "run" / CHECKPOINTS
    os.truncate(folder / "step-000003" / "tensors.safetensors", 100)
    (folder / "step-000002" / "meta.json").unlink()
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    resume = ("train", "--resume", str(tmp_path / "run"), "--devices", "0", "--json")
    refused = here(*resume)
    assert refused.returncode == 1
    for words in ("step-000003: the checksum", "step-000002: it has no meta.json", "--restart"):
        assert words in refused.stderr
    assert {p: p.read_bytes() for p in before} == before
    assert len([p for p in (tmp_path / "run").rglob("*") if p.is_file()]) == len(before)

    again = here(*resume, "--restart")
    assert again.returncode == 0, again.stderr
    assert [r["loss"] for r in records(again.stdout) if r["event"] == "step"] == losses_of(seen)
    kept = sorted(path.name for path in folder.iterdir())
    assert kept == [
        "step-000002", "step-000002.damaged", "step-000003", "step-000003.damaged",
    ]  # fmt: skip
    # And a whole one is gone on with, --restart or not.
    whole = here(*resume, "--restart", "--steps", "4")
    assert whole.returncode == 0, whole.stderr
    assert "resuming after step 3" in whole.stderr
    assert here("train", "--method", "tiles", "--model", "opt-nano", "--restart").returncode == 2


@pytest.mark.nightly  # tests/scheduler/test_resident_step.py restarts at any moment
def test_devices_go_on_with_their_state_after_the_server_was_killed(
    corpus_file: Path, tmp_path: Path, plain_losses: Callable[[JobSpec], list[float]]
) -> None:
    """They do not receive weights and moments again: the step's traffic is as in other steps."""
    runs, steps = tmp_path / "runs", 40
    serve = (
        "serve", "--port", free_port(), "--data", str(tmp_path / "data"), "--json",
        "--stages-on", "any", "--compute", "off", "--runs", str(runs),
    )  # fmt: skip
    submit = (
        *training(corpus_file, steps, "opt-nano"), "--batch", "2", "--method", "stages",
        "--state", "devices", "--audit", "0", "--checkpoint-every", "1000",
    )  # fmt: skip

    def done() -> dict[int, dict[str, Any]]:
        found = [r for folder in runs.glob("*") for r in RunFolder(folder).records()]
        return {r["step"]: r for r in found if r["event"] == "step"}

    with ExitStack() as stack:
        server, lines = stack.enter_context(started(*serve, cwd=tmp_path))
        listening = wait_for_event(lines, "listening")
        for _ in range(2):
            _, news = stack.enter_context(started("join", listening["url"], *JOIN))
            wait_for_event(news, "ready")
        stack.enter_context(started(*submit, "--server", listening["operator_url"]))
        until(lambda: len(done()) >= 5)
        server.send_signal(signal.SIGKILL)
        server.wait(PATIENCE_S)
        before = len(done())
        stack.enter_context(started(*serve, "--resume-jobs", cwd=tmp_path))
        until(lambda: len(done()) == steps)
    found = done()
    state_bytes = 12 * 100_000  # weights and moments of two layers
    assert found[1]["downlink_bytes"] > state_bytes
    assert found[before + 1]["downlink_bytes"] < state_bytes / 3
    spec = replace(training_job(corpus_file, steps, "opt-nano"), batch=2)
    assert [r["loss"] for r in found.values()] == pytest.approx(plain_losses(spec), rel=1e-4)
