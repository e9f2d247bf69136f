"""Jobs of a server are stopped, paused and resumed: real processes."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cleave.training.loop.job import JobSpec
from tests.integration.processes import (
    PATIENCE_S,
    address,
    here,
    records,
    server,
    started,
    training,
    training_job,
    until,
    wait_for_event,
)

pytestmark = pytest.mark.slow

STEPS = 9
CHECKPOINTS = ("--checkpoint-every", "1000")  # besides the one at the end


class Place:
    """What one asks a server that has a folder."""

    def __init__(self, folder: Path) -> None:
        self.data = ("--data", str(folder / "data"))

    def change(self, *arguments: str) -> str:
        """What `cleave jobs` answers."""
        done = here("jobs", *arguments, *self.data)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def refused(self, *arguments: str) -> str:
        """Why it refuses."""
        done = here("jobs", *arguments, *self.data)
        assert done.returncode == 2, done.stdout
        return done.stderr

    def state(self, number: int) -> str:
        """The state of a job."""
        told: list[dict[str, Any]] = json.loads(here("jobs", *self.data, "--json").stdout)["jobs"]
        return next(str(job["state"]) for job in told if job["job"] == f"job-{number}")


def test_a_job_rests_while_others_train_and_after_its_server_was_killed(
    corpus_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plain_losses: Callable[[JobSpec], list[float]],
) -> None:
    monkeypatch.setenv("CLEAVE_CREDENTIAL", "for devices")
    place = Place(tmp_path)
    serve = ("serve", "--port", "0", *place.data, "--json")
    join = ("--backend", "numpy", "--threads", "1", "--json", "--once")
    long = (*training(corpus_file, STEPS, "opt-nano"), "--name", "long", *CHECKPOINTS)
    short = (*training(corpus_file, 2, "opt-nano"), "--name", "short")
    with started(*serve, cwd=tmp_path) as (server, lines):
        listening = wait_for_event(lines, "listening")
        to_server = ("--server", listening["operator_url"])
        with ExitStack() as stack:
            device, news = stack.enter_context(started("join", listening["url"], *join))
            wait_for_event(news, "ready")
            _, steps = stack.enter_context(started(*long, *to_server))
            for _ in range(3):
                wait_for_event(steps, "step")
            device.kill()  # in some step, in which the job waits for another
            while wait_for_event(steps, "fleet")["state"] != "absent":
                continue
            assert "pauses after its step" in place.change("pause", "job-1")
            until(lambda: place.state(1) == "paused")
            _, news = stack.enter_context(started("join", listening["url"], *join))
            wait_for_event(news, "ready")
            done = here(*short, *to_server)
            assert done.returncode == 0, done.stderr
            (step_text, *_) = [
                line for line in place.change("logs", "job-2").splitlines() if "loss" in line
            ]
            assert step_text.startswith("step 1 ")
            assert "only one that is not over" in place.refused("pause", "job-2")
            assert "job-2 is done" in place.refused("resume", "job-2")
        server.send_signal(signal.SIGKILL)
        server.wait(PATIENCE_S)
    assert place.state(1) == "paused"
    with started(*serve, cwd=tmp_path) as (server, lines):
        listening = wait_for_event(lines, "listening")
        with started("join", listening["url"], *join) as (_, news):
            wait_for_event(news, "ready")
            assert "is queued again" in place.change("resume", "job-1")
            until(lambda: place.state(1) == "done")
        found = [
            json.loads(line)
            for line in (tmp_path / "runs" / "long" / "metrics.jsonl").read_text().splitlines()
        ]
    losses = [record["loss"] for record in found if record["event"] == "step"]
    assert losses == pytest.approx(plain_losses(training_job(corpus_file, STEPS, "opt-nano")))


def test_what_waits_is_stopped_or_paused_at_once(
    corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first job has no device; the others wait for it."""
    monkeypatch.setenv("CLEAVE_CREDENTIAL", "for devices")
    place = Place(tmp_path)
    with started("serve", "--port", "0", *place.data, "--json", cwd=tmp_path) as (_, lines):
        operator = ("--server", wait_for_event(lines, "listening")["operator_url"])
        submit = (*training(corpus_file, 3, "opt-nano"), *operator)
        with ExitStack() as stack:
            _, first = stack.enter_context(started(*submit))
            while wait_for_event(first, "fleet")["state"] != "absent":
                continue
            _, second = stack.enter_context(started(*submit))
            until(lambda: len(records_of(place)) == 2)
            assert "no checkpoints" in place.refused("pause", "job-1")
            assert place.change("pause", "job-2") == "job-2 is paused\n"
            assert place.state(2) == "paused"
            place.change("resume", "job-2")
            assert place.state(2) == "queued"
            assert "is queued and not paused" in place.refused("resume", "job-2")
            place.change("pause", "job-2")
            place.change("stop", "job-2")
            assert place.state(2) == "stopped"
            assert [record["event"] for record in second] == ["stopped"]  # it began nothing
            place.change("stop", "job-1")
            until(lambda: place.state(1) == "stopped")
            assert "is queued again" in place.change("resume", "job-1")
            assert "no job 'job-9'" in place.refused("stop", "job-9")


def test_jobs_as_rows(tmp_path: Path) -> None:
    shown = here("jobs", "--data", str(tmp_path), "--csv")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("job,state,reason,model,name,steps,")


def records_of(place: Place) -> list[dict[str, Any]]:
    """The jobs that the server knows."""
    (answer,) = records(here("jobs", *place.data, "--json").stdout)
    found: list[dict[str, Any]] = answer["jobs"]
    return found


def test_training_finds_the_server_of_this_machine(
    corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With paths from where the command is, unless devices are emulated."""
    here_folder, there = tmp_path / "here", tmp_path / "there"
    for folder in (here_folder, there):
        folder.mkdir()
    (here_folder / "text.txt").write_bytes(corpus_file.read_bytes())
    command = training(Path("text.txt"), 1, "opt-nano")
    with server(there, "--runs", "runs") as place:
        monkeypatch.setenv("CLEAVE_DATA", str(there / "data"))
        with started("join", address(place), "--json") as (_, lines):
            wait_for_event(lines, "ready")
            on_server = here(*command, "--checkpoint-every", "1", cwd=here_folder)
            emulated = here(*command, "--devices", "2", cwd=here_folder)
            (trained,) = (there / "runs").iterdir()
            again = ("train", "--resume", str(trained), "--steps", "2", "--json")
            resumed = here(*again, cwd=here_folder)
    alone = here(*command, "--attach", "job-1", cwd=here_folder)
    assert on_server.returncode == emulated.returncode == 0, on_server.stderr + emulated.stderr
    assert "training on this machine's server" in on_server.stderr
    assert resumed.returncode == 0, resumed.stderr
    assert "training on this machine's server" in resumed.stderr
    assert [r["step"] for r in records(resumed.stdout) if r["event"] == "step"] == [2]
    (run,) = (there / "runs").iterdir()
    assert {record["event"] for record in records(on_server.stdout)} >= {"step", "done"}
    assert (run / "metrics.jsonl").exists()
    assert (here_folder / "runs").is_dir()
    assert alone.returncode == 2
    assert "--attach job-1: no server runs here" in alone.stderr


def test_a_job_in_the_queue_is_stopped_at_once(corpus_file: Path, tmp_path: Path) -> None:
    place = Place(tmp_path)
    with server(tmp_path) as address_of:
        to_server = ("--server", address_of["operator_url"])
        first = (*training(corpus_file, 3, "opt-nano"), *to_server)
        with started(*first) as (_, waiting):
            wait_for_event(waiting, "fleet")  # no device is there
            with started(*first) as (_, queued):
                until(lambda: '"job-2"' in here("jobs", *place.data, "--json").stdout)
                assert "job-2 is stopped" in place.change("stop", "job-2")
                assert place.state(2) == "stopped"
                assert wait_for_event(queued, "stopped")["text"] == "stopped before it began"
