"""A server that is killed and a device that is lost: real processes, real signals."""

from __future__ import annotations

import os
import random
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

import cleave
from cleave.errors import CleaveError
from cleave.training.loop.job import JobSpec
from cleave.training.loop.records import NoteRecord, Record, StepRecord
from cleave.training.loop.run_folder import CHECKPOINTS, RunFolder
from cleave.training.loop.trainer import TrainContext, train
from tests.integration.processes import PATIENCE_S, here, records, run, started, wait_for_event

DEVICE = ("--backend", "numpy", "--threads", "1", "--json")
STEPS = 20


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def losses(seen: list[Record]) -> list[float]:
    return [record.loss for record in seen if isinstance(record, StepRecord)]


def test_a_killed_server_goes_on_where_it_was_and_its_device_comes_back(
    corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL of the server inside a journaled run, a new one on its port, the same losses.

    And on the way: training says that no device is there, to whoever follows it.
    """
    job = JobSpec(
        model="opt-nano",
        data=str(corpus_file),
        steps=STEPS,
        batch=2,
        seq=16,
        checkpoint_every=4,
        method="tiles",
    )
    plain: list[Record] = []
    train(job, RunFolder(tmp_path / "plain"), TrainContext(None, plain.append))
    expected = losses(plain)

    monkeypatch.setenv("CLEAVE_CREDENTIAL", "for devices")
    monkeypatch.setenv("CLEAVE_OPERATOR_CREDENTIAL", "for operators")
    serve = ("serve", "--port", free_port(), "--json")
    submit = (
        "train", "--method", "tiles",
        "--model", "opt-nano", "--data", str(corpus_file), "--steps", str(STEPS),
        "--batch", "2", "--seq", "16", "--checkpoint-every", "4", "--name", "run", "--journal",
        "--json",
    )  # fmt: skip
    with ExitStack() as stack:
        server, lines = stack.enter_context(started(*serve, cwd=tmp_path))
        listening = wait_for_event(lines, "listening")
        to_server = ("--server", listening["operator_url"])
        _, steps = stack.enter_context(started(*submit, *to_server))
        assert "training waits" in wait_for_event(steps, "fleet")["text"]  # nobody has joined yet
        device, news = stack.enter_context(started("join", listening["url"], *DEVICE))
        wait_for_event(news, "ready")
        assert wait_for_event(steps, "fleet")["state"] == "present"
        for _ in range(random.Random(0).randint(5, 11)):  # past a checkpoint, before the next
            wait_for_event(steps, "step")
        server.send_signal(signal.SIGKILL)
        server.wait(PATIENCE_S)
        assert wait_for_event(news, "waiting")["retry_s"] >= 0
        assert device.poll() is None

        server, lines = stack.enter_context(started(*serve, cwd=tmp_path))
        wait_for_event(lines, "listening")
        resume = ("train", "--resume", str(tmp_path / "runs" / "run"), "--json", *to_server)
        _, steps = stack.enter_context(started(*resume))
        wait_for_event(news, "ready")  # by itself
        done = wait_for_event(steps, "done")
        assert done["steps"] == STEPS
        server.send_signal(signal.SIGINT)
        assert server.wait(PATIENCE_S) == 0
        wait_for_event(news, "waiting")  # for a server that may be started again
        device.send_signal(signal.SIGINT)
        wait_for_event(news, "left")
        assert device.wait(PATIENCE_S) == 0
    written = [r for r in RunFolder(tmp_path / "runs" / "run").records() if r["event"] == "step"]
    assert [r["step"] for r in written] == list(range(1, STEPS + 1))
    assert [r["loss"] for r in written] == pytest.approx(expected, rel=1e-4)


def test_a_killed_run_is_resumed_to_the_same_losses(corpus_file: Path, tmp_path: Path) -> None:
    """Embedded devices; `benchmarks.crash` kills at many more moments."""
    command = (
        "train", "--method", "tiles",
        "--model", "opt-nano", "--data", str(corpus_file), "--steps", "12", "--batch",
        "2", "--seq", "16", "--checkpoint-every", "5", "--devices", "2", "--name", "run", "--json",
    )  # fmt: skip
    with started(*command, cwd=tmp_path) as (process, steps):
        before = [wait_for_event(steps, "step") for _ in range(random.Random(1).randint(7, 10))]
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE_S)
    answer = run("train", "--resume", "runs/run", "--devices", "2", "--json", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert "resuming after step" in answer.stderr
    done = next(r for r in records(answer.stdout) if r["event"] == "done")
    assert done["resumed_after"] in (5, 10)
    again = [r for r in records(answer.stdout) if r["event"] == "step"]
    found = {r["step"]: r["loss"] for r in again}
    repeated = [r for r in before if r["step"] in found]
    assert [r["loss"] for r in repeated] == [found[r["step"]] for r in repeated]
    written = [r for r in RunFolder(tmp_path / "runs" / "run").records() if r["event"] == "step"]
    assert [r["step"] for r in written] == list(range(1, 13))
    job = JobSpec(
        model="opt-nano", data=str(corpus_file), steps=12, batch=2, seq=16, method="tiles"
    )
    plain: list[Record] = []
    train(job, RunFolder(tmp_path / "plain"), TrainContext(None, plain.append))
    assert [r["loss"] for r in written] == pytest.approx(losses(plain), rel=1e-4)


def test_all_devices_gone_and_training_goes_on_without(corpus_file: Path, tmp_path: Path) -> None:
    """`--fallback local` on a served fleet whose only device is killed."""
    job = JobSpec(
        model="opt-nano", data=str(corpus_file), steps=6, batch=2, seq=16, checkpoint_every=0,
        fallback="local", fallback_after_s=0.0, method="tiles")  # fmt: skip
    plain: list[Record] = []
    train(job, RunFolder(tmp_path / "plain"), TrainContext(None, plain.append))
    ours: list[Record] = []
    with cleave.serve() as server, started("join", server.url, *DEVICE, "--once") as (device, news):
        wait_for_event(news, "ready")

        def report(record: Record) -> None:
            ours.append(record)
            if isinstance(record, StepRecord) and record.step == 3:
                device.kill()

        train(job, RunFolder(tmp_path / "ours"), TrainContext(server.fleet, report))
    assert losses(ours) == pytest.approx(losses(plain), rel=1e-4)
    last = [r for r in ours if isinstance(r, StepRecord)][-1]
    assert last.local_gemms > 0
    assert last.tiles == 0
    said = [r["state"] for r in RunFolder(tmp_path / "ours").records() if r["event"] == "fleet"]
    assert said[-2:] == ["absent", "local"]


def test_a_damaged_checkpoint_is_passed_over_and_said(corpus_file: Path, tmp_path: Path) -> None:
    job = JobSpec(
        model="opt-nano",
        data=str(corpus_file),
        steps=4,
        batch=1,
        seq=16,
        checkpoint_every=1,
        method="tiles",
    )
    seen: list[Record] = []
    train(job, RunFolder(tmp_path / "run"), TrainContext(None, seen.append))
    newest = tmp_path / "run" / CHECKPOINTS / "step-000004" / "tensors.safetensors"
    os.truncate(newest, newest.stat().st_size // 2)
    again: list[Record] = []
    train(job, RunFolder(tmp_path / "run"), TrainContext(None, again.append), resume=True)
    assert losses(again) == losses(seen)[3:]
    notes = [record.text for record in again if isinstance(record, NoteRecord)]
    assert any("passed over" in text and "step-000004" in text for text in notes)
    assert "resuming after step 3" in notes
    folder = newest.parent.parent  # kept, though its step was written again
    assert sorted(path.name for path in folder.iterdir()) == [
        "step-000003", "step-000004", "step-000004.damaged",
    ]  # fmt: skip


def test_without_a_whole_checkpoint_nothing_is_begun_again_unasked(
    corpus_file: Path, tmp_path: Path
) -> None:
    """`cleave train --resume` refuses and touches nothing; --restart keeps what it finds."""
    job = JobSpec(
        model="opt-nano",
        data=str(corpus_file),
        steps=3,
        batch=1,
        seq=16,
        checkpoint_every=1,
        method="tiles",
    )
    seen: list[Record] = []
    train(job, RunFolder(tmp_path / "run"), TrainContext(None, seen.append))
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
    assert [r["loss"] for r in records(again.stdout) if r["event"] == "step"] == losses(seen)
    kept = sorted(path.name for path in folder.iterdir())
    assert kept == [
        "step-000002", "step-000002.damaged", "step-000003", "step-000003.damaged",
    ]  # fmt: skip
    # And a whole one is gone on with, --restart or not.
    whole = here(*resume, "--restart", "--steps", "4")
    assert whole.returncode == 0, whole.stderr
    assert "resuming after step 3" in whole.stderr
    assert here("train", "--method", "tiles", "--model", "opt-nano", "--restart").returncode == 2


def test_a_run_without_a_checkpoint_is_not_begun_again_unasked(
    corpus_file: Path, tmp_path: Path
) -> None:
    job = JobSpec(
        "opt-nano", str(corpus_file), steps=1, batch=1, seq=16, checkpoint_every=0, method="tiles"
    )
    train(job, RunFolder(tmp_path), TrainContext(None, lambda record: None))
    metrics = RunFolder(tmp_path).metrics_path.read_bytes()
    with pytest.raises(CleaveError, match=r"has no checkpoint.*--restart"):
        train(job, RunFolder(tmp_path), TrainContext(None, lambda record: None), resume=True)
    assert RunFolder(tmp_path).metrics_path.read_bytes() == metrics
