"""A trained model is used on the devices of a server: on a device process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cleave.training.loop.run_folder import RunFolder
from tests.integration.processes import address, here, records, started, wait_for_event
from tests.integration.serving import served
from tests.training.test_export import trained

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus_file: Path) -> RunFolder:
    return trained(tmp_path_factory.mktemp("used"), corpus_file, "opt-nano", steps=2)


@pytest.mark.nightly
def test_it_is_used_there_as_here(run: RunFolder, tmp_path: Path) -> None:
    model, text = str(run.path), tmp_path / "text.txt"
    text.write_text("def step(a, b):\n    return a * 3 + b - 1\n" * 5)
    commands = (
        ("generate", model, "--prompt", "def step(", "--tokens", "4"),
        ("eval", model, "--data", str(text), "--seq", "16", "--json"),
    )
    with (
        served(tmp_path) as (server, _, _),
        started(
            "join", address({"operator_url": server.operator_url}), "--json", "--name", "anna"
        ) as (_, lines),
    ):
        wait_for_event(lines, "ready")
        said, loss = (here(*command, "--server", server.operator_url) for command in commands)
        missing = here(
            "eval", model, "--data", str(tmp_path / "no.txt"), "--server", server.operator_url
        )
        (device,) = json.loads(here("devices", "--server", server.operator_url, "--json").stdout)[
            "devices"
        ]
        told = here("jobs", "--server", server.operator_url, "--json")
        status = here("status", "--server", server.operator_url)
    assert device["blocks"] > 0
    alone = [here(*command) for command in commands]
    assert said.stdout == alone[0].stdout
    there = json.loads(loss.stdout)["loss"]
    assert there == pytest.approx(json.loads(alone[1].stdout)["loss"], rel=1e-5)
    assert missing.returncode == 2
    assert "no file or folder" in missing.stderr
    states = [(job["model"], job["state"]) for job in json.loads(told.stdout)["jobs"]]
    assert states == [(model, "done")] * 2
    assert status.returncode == 0


def test_what_makes_no_sense_is_refused(run: RunFolder) -> None:
    found = here("generate", str(run.path), "--prompt", "x", "--devices", "2", "--server", "ws://x")
    assert found.returncode == 2
    assert "cannot be combined with --server" in found.stderr
    assert records(found.stdout) == []
