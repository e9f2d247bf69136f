"""Servers and runs that are stopped, whatever they wait for: nothing that was done is lost."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from cleave.training.loop.job import JobSpec
from cleave.training.loop.run_folder import CHECKPOINTS, RunFolder
from tests.disks import small_disk
from tests.integration.processes import JOIN, PATIENCE_S, here, jobs, started, wait_for_event

STEPS = 9


@pytest.mark.nightly  # test_recovery.py ends a server while its job trains
def test_a_server_that_is_stopped_while_its_job_waits_for_devices(
    corpus_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plain_losses: Callable[[JobSpec], list[float]],
) -> None:
    """It writes the last whole step, and the job is resumed from there."""
    monkeypatch.setenv("CLEAVE_CREDENTIAL", "for devices")
    data, folder = tmp_path / "data", tmp_path / "runs" / "run"
    serve = ("serve", "--port", "0", "--data", str(data), "--json")
    submit = (
        "train", "--method", "tiles",
        "--model", "opt-nano", "--data", str(corpus_file), "--steps", str(STEPS),
        "--batch", "2", "--seq", "16", "--name", "run", "--json",
    )  # fmt: skip
    with ExitStack() as stack:
        server, lines = stack.enter_context(started(*serve, cwd=tmp_path))
        listening = wait_for_event(lines, "listening")
        operator = ("--server", listening["operator_url"])
        _, steps = stack.enter_context(started(*submit, *operator))
        device, news = stack.enter_context(started("join", listening["url"], *JOIN, "--once"))
        wait_for_event(news, "ready")
        for _ in range(4):
            wait_for_event(steps, "step")
        device.kill()
        while wait_for_event(steps, "fleet")["state"] != "absent":
            continue
        (job,) = jobs(data)
        assert (job["state"], job["run_folder"]) == ("running", str(folder))
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 0

        done = [r["step"] for r in RunFolder(folder).records() if r["event"] == "step"]
        assert done == list(range(1, len(done) + 1))
        (job,) = jobs(data)
        assert (job["state"], job["steps"]) == ("stopped", len(done))
        assert [path.name for path in (folder / CHECKPOINTS).iterdir()] == [f"step-{len(done):06d}"]

        server, lines = stack.enter_context(started(*serve, cwd=tmp_path))
        listening = wait_for_event(lines, "listening")
        operator = ("--server", listening["operator_url"])
        resume = ("train", "--resume", str(folder), "--json", *operator)
        client, steps = stack.enter_context(started(*resume))
        stack.enter_context(started("join", listening["url"], *JOIN))
        assert wait_for_event(steps, "start")["step"] == len(done)
        assert wait_for_event(steps, "done")["steps"] == STEPS
        assert client.wait(PATIENCE_S) == 0
        assert [job["state"] for job in jobs(data)] == ["stopped", "done"]
    written = [r for r in RunFolder(folder).records() if r["event"] == "step"]
    assert [r["step"] for r in written] == list(range(1, STEPS + 1))
    job_spec = JobSpec(
        "opt-nano", str(corpus_file), STEPS, batch=2, seq=16, checkpoint_every=0, method="tiles"
    )
    assert [r["loss"] for r in written] == pytest.approx(plain_losses(job_spec), rel=1e-4)


@pytest.mark.nightly  # tests/training/test_disk.py tests the waiting
def test_a_full_disk_makes_the_job_wait_and_say_so(
    corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To whoever follows it, in `cleave status` and in the server's log."""
    monkeypatch.setenv("CLEAVE_CREDENTIAL", "for devices")
    with small_disk(tmp_path) as disk, ExitStack() as stack:
        serve = ("serve", "--port", "0", "--data", str(tmp_path / "data"), "--json")
        _, lines = stack.enter_context(started(*serve, "--runs", str(disk.path)))
        listening = wait_for_event(lines, "listening")
        operator = ("--server", listening["operator_url"])
        stack.enter_context(started("join", listening["url"], *JOIN))
        disk.fill(300_000)  # for records, and for no checkpoint
        submit = (
            "train", "--method", "tiles",
            "--model", "opt-nano", "--data", str(corpus_file), "--steps", "3", "--batch",
            "1", "--seq", "16", "--checkpoint-every", "2", "--name", "run", "--json",
        )  # fmt: skip
        client, steps = stack.enter_context(started(*submit, *operator))
        full = wait_for_event(steps, "disk")
        assert (full["state"], full["step"]) == ("full", 2)
        shown = here("status", *operator)
        assert "waits  the disk is full" in shown.stdout
        disk.free()
        assert wait_for_event(steps, "disk")["state"] == "free"
        assert wait_for_event(steps, "done")["steps"] == 3
        assert client.wait(PATIENCE_S) == 0
        assert "waits  the" not in here("status", *operator).stdout
        notes: list[str] = []
        while not notes or "the disk has space again" not in notes[-1]:
            notes.append(wait_for_event(lines, "note")["text"])
        assert any("job-1: the disk is full" in note for note in notes)
        found = [path.name for path in (disk.path / "run" / CHECKPOINTS).iterdir()]
        assert sorted(found) == ["step-000002", "step-000003"]


@pytest.mark.nightly  # tests/training/test_stopping.py stops runs without a signal
def test_a_run_in_this_process_is_stopped_by_sigterm(corpus_file: Path, tmp_path: Path) -> None:
    command = (
        "train", "--method", "tiles",
        "--model", "opt-nano", "--data", str(corpus_file), "--steps", "100000", "--batch",
        "1", "--seq", "16", "--devices", "2", "--name", "run", "--json",
    )  # fmt: skip
    with started(*command, cwd=tmp_path) as (process, lines):
        wait_for_event(lines, "step")
        process.send_signal(signal.SIGTERM)
        done = wait_for_event(lines, "done")
        assert process.wait(PATIENCE_S) == 0
    assert done["stopped"]
    found = [path.name for path in (tmp_path / "runs" / "run" / CHECKPOINTS).iterdir()]
    assert found == [f"step-{done['steps']:06d}"]
