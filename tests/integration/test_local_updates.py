"""Local updates with real processes: devices and the server are killed, and training continues."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.integration.processes import (
    JOIN,
    PATIENCE_S,
    own_address,
    server,
    started,
    until,
    wait_for_event,
)

pytestmark = pytest.mark.slow

EVERY, ROUNDS = 10, 8


def joined(stack: ExitStack, place: dict[str, Any], name: str) -> Any:
    """A device process of the operator's that has joined."""
    join = ("join", own_address(place), "--name", name, *JOIN)
    process, lines = stack.enter_context(started(*join))
    wait_for_event(lines, "ready")
    return process


def submit(corpus_file: Path, place: dict[str, Any], *options: str) -> tuple[str, ...]:
    return (
        "train", "--method", "diloco", "--model", "opt-nano", "--data", str(corpus_file),
        "--steps", str(EVERY * ROUNDS), "--every", str(EVERY), "--exchange", "int8", "--batch", "2",
        "--seq", "16", "--json", "--server", place["operator_url"], *options,
    )  # fmt: skip


def steps_until_done(lines: Iterator[dict[str, Any]]) -> list[int]:
    """The steps that a training prints until its end."""
    steps = []
    for record in lines:
        if record["event"] == "step":
            steps.append(record["step"])
        if record["event"] == "done":
            return steps
    raise AssertionError(f"training ended after the steps {steps}")


def test_a_killed_device_loses_its_round_and_a_late_one_takes_part(
    corpus_file: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        place = stack.enter_context(server(tmp_path))
        first, *_ = [joined(stack, place, name) for name in ("anna", "ben", "cleo")]
        command = submit(corpus_file, place, "--checkpoint-every", "0")
        _, lines = stack.enter_context(started(*command, cwd=tmp_path))
        record = wait_for_event(lines, "step")
        assert record["step"] == EVERY
        assert record["method"] == "diloco"
        assert record["uplink_bytes"] > 0
        first.send_signal(signal.SIGKILL)
        joined(stack, place, "dora")
        steps = steps_until_done(lines)
    assert steps == [EVERY * n for n in range(2, ROUNDS + 1)]


def test_a_killed_server_loses_at_most_the_round(corpus_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "run"
    with ExitStack() as stack:
        place = stack.enter_context(server(tmp_path))
        joined(stack, place, "anna")
        command = submit(corpus_file, place, "--checkpoint-every", str(EVERY), "--name", "run")
        _, lines = stack.enter_context(started(*command, cwd=tmp_path))
        for _ in range(2):
            done = wait_for_event(lines, "step")["step"]
        checkpoint = run / "checkpoints" / f"step-{done:06}"
        until(checkpoint.exists)
        # It has the optimizer moments with which a device of this name continues.
        (kept,) = json.loads((checkpoint / "meta.json").read_text())["meta"]["inner"]
        assert (kept["name"], kept["updates"]) == ("anna", done)
    with ExitStack() as stack:  # another server, after the first was killed during a round
        place = stack.enter_context(server(tmp_path))
        joined(stack, place, "anna")
        resume = ("train", "--resume", str(run), "--json", "--server", place["operator_url"])
        process, lines = stack.enter_context(started(*resume, cwd=tmp_path))
        assert wait_for_event(lines, "start")["step"] >= done
        steps = steps_until_done(lines)
        assert steps[-1] == EVERY * ROUNDS
        assert process.wait(PATIENCE_S) == 0
