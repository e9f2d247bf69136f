"""Servers and runs that are stopped, whatever they wait for: nothing that was done is lost."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cleave.training.loop.job import JobSpec
from cleave.training.loop.run_folder import CHECKPOINTS, RunFolder
from tests.disks import small_disk
from tests.integration.processes import (
    JOIN,
    PATIENCE_S,
    here,
    jobs,
    started,
    training,
    training_job,
    until,
    wait_for_event,
)

STEPS = 20


@pytest.mark.nightly  # test_recovery.py ends a server while its job trains
def test_a_job_that_waits_for_devices_outlasts_its_servers(
    corpus_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plain_losses: Callable[[JobSpec], list[float]],
) -> None:
    """SIGTERM writes the last whole step; a job that was paused is so after SIGKILL, too."""
    monkeypatch.setenv("CLEAVE_CREDENTIAL", "for devices")
    data, folder = tmp_path / "data", tmp_path / "runs" / "run"
    submit = (
        *training(corpus_file, STEPS, "opt-nano"), "--checkpoint-every", "1000", "--name", "run"
    )  # fmt: skip

    with ExitStack() as stack:

        def begun() -> tuple[subprocess.Popen[str], dict[str, Any], tuple[str, str]]:
            """A server on the folder: its process, what it said, and how operators name it."""
            serve = ("serve", "--port", "0", "--data", str(data), "--json")
            server, lines = stack.enter_context(started(*serve, cwd=tmp_path))
            listening = wait_for_event(lines, "listening")
            return server, listening, ("--server", listening["operator_url"])

        def joined(listening: dict[str, Any]) -> subprocess.Popen[str]:
            join = ("join", listening["url"], *JOIN, "--once")
            device, news = stack.enter_context(started(*join))
            wait_for_event(news, "ready")
            return device

        def loses(device: subprocess.Popen[str], steps: Iterator[dict[str, Any]]) -> None:
            """Kill the only device in some step, in which the job waits for another."""
            for _ in range(4):
                wait_for_event(steps, "step")
            device.kill()
            while wait_for_event(steps, "fleet")["state"] != "absent":
                continue

        server, listening, operator = begun()
        _, steps = stack.enter_context(started(*submit, *operator))
        loses(joined(listening), steps)
        (job,) = jobs(data)
        assert (job["state"], job["run_folder"]) == ("running", str(folder))
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 0
        done = [r["step"] for r in RunFolder(folder).records() if r["event"] == "step"]
        assert done == list(range(1, len(done) + 1))
        (job,) = jobs(data)
        assert (job["state"], job["steps"]) == ("stopped", len(done))
        assert [path.name for path in (folder / CHECKPOINTS).iterdir()] == [f"step-{len(done):06d}"]

        server, listening, operator = begun()
        resume = ("train", "--resume", str(folder), "--json", *operator)
        _, steps = stack.enter_context(started(*resume))
        device = joined(listening)
        assert wait_for_event(steps, "start")["step"] == len(done)
        loses(device, steps)
        paused = here("jobs", "pause", "job-2", "--data", str(data))
        assert "pauses after its step" in paused.stdout
        until(lambda: jobs(data)[1]["state"] == "paused")
        joined(listening)
        other = here(*training(corpus_file, 2, "opt-nano"), *operator)
        assert other.returncode == 0, other.stderr
        server.send_signal(signal.SIGKILL)
        server.wait(PATIENCE_S)
        assert [job["state"] for job in jobs(data)] == ["stopped", "paused", "done"]

        server, listening, operator = begun()
        joined(listening)
        resumed = here("jobs", "resume", "job-2", "--data", str(data))
        assert "is queued again" in resumed.stdout
        until(lambda: jobs(data)[1]["state"] == "done")
    written = [r for r in RunFolder(folder).records() if r["event"] == "step"]
    assert [r["step"] for r in written] == list(range(1, STEPS + 1))
    plain = plain_losses(training_job(corpus_file, STEPS, "opt-nano"))
    assert [r["loss"] for r in written] == pytest.approx(plain, rel=1e-4)


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
            *training(corpus_file, 3, "opt-nano"), "--checkpoint-every", "2", "--name", "run"
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
        *training(corpus_file, 100_000, "opt-nano"), "--checkpoint-every", "1000",
        "--devices", "2", "--name", "run",
    )  # fmt: skip
    with started(*command, cwd=tmp_path) as (process, lines):
        wait_for_event(lines, "step")
        process.send_signal(signal.SIGTERM)
        done = wait_for_event(lines, "done")
        assert process.wait(PATIENCE_S) == 0
    assert done["stopped"]
    found = [path.name for path in (tmp_path / "runs" / "run" / CHECKPOINTS).iterdir()]
    assert found == [f"step-{done['steps']:06d}"]
