"""Real `cleave join` processes that wait, and end when they are asked to."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import cleave
from tests.integration.processes import PATIENCE_S, here, started, wait_for_event

NOWHERE = "ws://127.0.0.1:9/ws#c=x"
LIGHT = ("--backend", "numpy", "--json")


def test_it_waits_for_a_server_when_it_is_to_stay() -> None:
    """On its cores, and behind other programs."""
    pins = hasattr(os, "sched_getaffinity")
    cores = ("--cores", "1") if pins else ()
    with started("join", NOWHERE, *LIGHT, "--when", "always", *cores) as (process, lines):
        waiting = wait_for_event(lines, "waiting")
        assert "no server answers" in waiting["reason"]
        assert waiting["retry_s"] > 0
        if pins:
            assert len(os.sched_getaffinity(process.pid)) == 1
        assert os.getpriority(os.PRIO_PROCESS, process.pid) >= 10
        process.send_signal(signal.SIGTERM)
        assert wait_for_event(lines, "left")
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.nightly
def test_it_joins_from_a_file_and_survives_its_server(tmp_path: Path) -> None:
    file = tmp_path / "join.url"
    command = ("join", f"@{file}", *LIGHT, "--when", "always", "--memory", "200MB")
    with ExitStack() as stack:
        with cleave.serve() as server:
            file.write_text(server.url + "\n")
            process, lines = stack.enter_context(started(*command))
            wait_for_event(lines, "ready")
        wait_for_event(lines, "left")
        assert wait_for_event(lines, "waiting")["retry_s"] > 0
        with cleave.serve() as server:  # a new one, with another credential and port
            file.write_text(server.url + "\n")
            wait_for_event(lines, "ready")
            process.send_signal(signal.SIGINT)
            wait_for_event(lines, "draining")
            wait_for_event(lines, "left")
            assert process.wait(PATIENCE_S) == 0


@pytest.mark.nightly
def test_it_leaves_when_its_data_is_used_up_and_the_next_run_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLEAVE_STATE", str(tmp_path))
    layer = torch.nn.Linear(512, 512)
    with cleave.serve() as server:
        command = ("join", server.url, *LIGHT, "--max-data", "2MB/month")
        with started(*command) as (process, lines):
            wait_for_event(lines, "ready")
            cleave.offload(layer, server.fleet, method="tiles")
            x = torch.randn(512, 512)
            with ThreadPoolExecutor(1) as trainer:
                training = trainer.submit(lambda: [layer(x) for _ in range(8)])
                left = wait_for_event(lines, "left")
                with started("join", server.url, *LIGHT, "--name", "another"):
                    training.result(PATIENCE_S)
            assert left["reason"] == "--max-data 2MB/month is used up"
            assert left["downlink_bytes"] + left["uplink_bytes"] > 2e6
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_S) == 0
        with started(*command) as (_, lines):
            assert wait_for_event(lines, "waiting")["reason"] == "--max-data 2MB/month is used up"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--hours", "7"), "22-7"),
        (("--when", "bored"), "idle"),
        (("--cores", "4000"), "this machine can lend"),
        (("--memory", "many"), "50%"),
        (("--backend", "abacus"), "unknown backend"),
        (("--max-temp", "-3"), "Celsius"),
        (("--max-data", "5GB/week"), "5GB/day"),
    ],
)
def test_wrong_options_are_said(options: tuple[str, ...], words: str) -> None:
    answer = here("join", NOWHERE, *options)
    assert answer.returncode == 2
    assert words in answer.stderr
    assert "Traceback" not in answer.stderr
