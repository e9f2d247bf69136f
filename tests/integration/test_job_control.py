"""Jobs of a server are stopped, paused and resumed: real processes."""

from __future__ import annotations

import signal
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import make_trainer
from tests.integration.processes import (
    JOIN,
    PATIENCE_S,
    here,
    jobs,
    records,
    started,
    training,
    training_job,
    until,
    wait_for_event,
)
from tests.integration.serving import served

pytestmark = pytest.mark.slow


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
        told = jobs(Path(self.data[1]))
        return next(str(job["state"]) for job in told if job["job"] == f"job-{number}")


def test_a_job_outlives_its_client_and_others_are_stopped_paused_and_resumed(
    corpus_file: Path, tmp_path: Path
) -> None:
    place = Place(tmp_path)
    short = asdict(training_job(corpus_file, 2, "opt-nano"))
    job = replace(training_job(corpus_file, 1000, "opt-nano"), checkpoint_every=1000)
    metrics = tmp_path / "runs" / "long" / "metrics.jsonl"

    def steps() -> list[dict[str, Any]]:
        found = records(metrics.read_text()) if metrics.exists() else []
        return [record for record in found if record["event"] == "step"]

    with served(tmp_path / "runs", str(tmp_path / "data")) as (server, _, jobs):

        def state(number: int) -> str:
            return jobs.find(f"job-{number}").state.value

        to_server = ("--server", server.operator_url)
        with started(*training(corpus_file, 3, "opt-nano"), *to_server) as (client, seen):
            while wait_for_event(seen, "fleet")["state"] != "absent":
                continue
            client.send_signal(signal.SIGINT)
            assert client.wait(PATIENCE_S) == 0
        assert "no checkpoints" in place.refused("pause", "job-1")  # it waits for a device
        second = jobs.submit({"job": short})
        assert place.change("pause", "job-2") == "job-2 is paused\n"
        assert place.state(2) == "paused"
        place.change("resume", "job-2")
        assert state(2) == "queued"
        assert "is queued and not paused" in place.refused("resume", "job-2")
        assert "job-2 is stopped" in place.change("stop", "job-2")
        assert second.records[-1] == {"event": "stopped", "text": "stopped before it began"}
        assert "step" not in {record["event"] for record in second.records}
        jobs.submit({"job": asdict(job), "name": "long"})
        place.change("stop", "job-1")
        until(lambda: state(1) == "stopped")
        assert "is queued again" in place.change("resume", "job-1")
        place.change("stop", "job-1")
        assert "no job 'job-9'" in place.refused("stop", "job-9")
        for wrong in (("--attach", "job-9"), ("--model", "opt-nano", "--data", "/no/such")):
            refused = here("train", *to_server, *wrong)
            assert refused.returncode == 2
            assert wrong[-1] in refused.stderr
        url = records(here("pair", *place.data, "--json").stdout)[-1]["url"]
        with started("join", url, *JOIN):
            until(lambda: len(steps()) >= 2)
            assert "pauses after the current step" in place.change("pause", "job-3")
            until(lambda: state(3) == "paused")
            before = len(steps())
            jobs.submit({"job": short})
            until(lambda: state(4) == "done")
            logged = place.change("logs", "job-4").splitlines()
            assert next(line for line in logged if "loss" in line).startswith("step 1 ")
            assert "only jobs that have not ended" in place.refused("pause", "job-4")
            assert "job-4 is done" in place.refused("resume", "job-4")
            assert "is queued again" in place.change("resume", "job-3")
            until(lambda: len(steps()) >= before + 2)
            place.change("stop", "job-3")
            until(lambda: state(3) == "stopped")
    found = steps()
    assert [step["step"] for step in found] == list(range(1, len(found) + 1))
    reference = make_trainer(job, None)
    plain = [reference.train_step().loss for _ in found[: before + 2]]
    assert [step["loss"] for step in found[: before + 2]] == pytest.approx(plain, rel=1e-4)


def test_jobs_as_rows(tmp_path: Path) -> None:
    shown = here("jobs", "--data", str(tmp_path), "--csv")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("job,state,reason,model,name,steps,")
