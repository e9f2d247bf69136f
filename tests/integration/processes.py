"""Real processes for tests: a server, devices, and what they print."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from typer.main import get_command

from cleave.training.loop.job import JobSpec
from cleave_cli.main import main

CLEAVE = [sys.executable, "-m", "cleave_cli"]
JOIN = ("--backend", "numpy", "--threads", "1", "--json")
"""Options of `cleave join` with which a device starts soonest, and says what it does."""

PATIENCE_S = 120.0  # how long a process may take before the test gives up on it


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [*CLEAVE, *arguments],
        capture_output=True, text=True, timeout=PATIENCE_S, cwd=cwd, env=_environment(),
    )  # fmt: skip


_command = cache(get_command)  # making all commands takes a fifth of a second


def here(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in this process, where no other is the point: that takes a second.

    All else is as with `run`: what it prints, its exit code and the sentence of an error.
    """
    written = io.BytesIO(), io.BytesIO()
    out, err = (io.TextIOWrapper(each, "utf-8", write_through=True) for each in written)
    code = 0
    with (
        chdir(cwd or Path.cwd()),
        mock.patch.dict(os.environ, _environment()),
        mock.patch.object(sys, "argv", [CLEAVE[-1], *arguments]),
        mock.patch("typer.main.get_command", _command),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    said = [each.getvalue().decode() for each in written]
    return subprocess.CompletedProcess(arguments, code, *said)


def apart(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The same as `here` in another thread, for tests in whose own an event loop runs."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(here, *arguments).result()


def free_port() -> str:
    """A port that nobody uses now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def jobs(data: Path) -> list[dict[str, Any]]:
    """The jobs that `cleave jobs` lists for a server's folder."""
    answer = here("jobs", "--data", str(data), "--json")
    assert answer.returncode == 0, answer.stderr
    found: list[dict[str, Any]] = json.loads(answer.stdout)["jobs"]
    return found


def records(text: str) -> list[dict[str, Any]]:
    """The JSON lines in what a command printed."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


@contextmanager
def started(
    *arguments: str, cwd: Path | None = None
) -> Iterator[tuple[subprocess.Popen[str], Iterator[dict[str, Any]]]]:
    """A running command of ours and the JSON lines it prints; see `printing`."""
    with printing([*CLEAVE, *arguments], cwd=cwd) as both:
        yield both


@contextmanager
def printing(
    command: Sequence[str], cwd: Path | None = None
) -> Iterator[tuple[subprocess.Popen[str], Iterator[dict[str, Any]]]]:
    """A running process and the JSON lines it prints; killed at the end if it still runs."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=cwd, env=_environment(),
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    lines = process.stdout
    try:
        yield process, (json.loads(line) for line in lines if line.startswith("{"))
    finally:
        process.kill()
        process.wait()
        lines.close()
        with suppress(BrokenPipeError):  # what it did not read is lost
            process.stdin.close()


def wait_for_event(lines: Iterator[dict[str, Any]], event: str) -> dict[str, Any]:
    """Read on until an event comes."""
    for record in lines:
        if record["event"] == event:
            return record
    raise AssertionError(f"the process ended before it printed {event!r}")


def until(condition: Callable[[], object]) -> None:
    """Wait for what another thread or process does; gives up after a while.

    Asking leaves most of a core to those that are waited for.
    """
    began_s = asked_s = time.monotonic()
    while not condition():
        now_s = time.monotonic()
        assert now_s < began_s + PATIENCE_S, "it did not happen"
        time.sleep(min(max(0.005, 4 * (now_s - asked_s)), 0.25))
        asked_s = time.monotonic()


@contextmanager
def server(folder: Path, *options: str) -> Iterator[dict[str, Any]]:
    """A running `cleave serve` that keeps what it knows in a folder; what it said."""
    command = ("serve", "--port", "0", "--data", str(folder / "data"), "--json", *options)
    with started(*command, cwd=folder) as (_, lines):
        yield wait_for_event(lines, "listening")


def training(corpus_file: Path, steps: int, model: str = "opt-tiny") -> tuple[str, ...]:
    """The command that trains a model for some steps, small ones."""
    return (
        "train", "--method", "tiles",
        "--model", model, "--data", str(corpus_file), "--steps", str(steps),
        "--batch", "1", "--seq", "16", "--checkpoint-every", "0", "--json",
    )  # fmt: skip


def training_job(corpus_file: Path, steps: int, model: str = "opt-tiny") -> JobSpec:
    """What `training` trains."""
    return JobSpec(
        model, str(corpus_file), steps, batch=1, seq=16, checkpoint_every=0, method="tiles"
    )


def training_by_stages(corpus_file: Path, steps: int) -> tuple[str, ...]:
    """The command that trains opt-nano by stages."""
    return (
        "train", "--method", "stages", "--model", "opt-nano", "--data", str(corpus_file),
        "--steps", str(steps), "--batch", "4", "--seq", "16", "--checkpoint-every", "0", "--json",
    )  # fmt: skip


def stages_job(corpus_file: Path, steps: int) -> JobSpec:
    """What `training_by_stages` trains."""
    return JobSpec("opt-nano", str(corpus_file), steps, batch=4, seq=16, checkpoint_every=0)


def address(place: dict[str, Any], *options: str) -> str:
    """The address, with another code, at which a device joins."""
    said = apart("pair", *options, "--server", place["operator_url"], "--json")
    url: str = records(said.stdout)[-1]["url"]
    return url


def own_address(place: dict[str, Any], *options: str) -> str:
    """The same for a device that is the operator's own."""
    return address(place, "--own", *options)


def page_address(url: str) -> str:
    """The page at which a browser joins at an address."""
    return url.replace("ws", "http", 1).replace("/ws#", "/join#")


def losses(records: Iterable[dict[str, Any]]) -> list[float]:
    """Of the steps among a training's records."""
    return [record["loss"] for record in records if record["event"] == "step"]


def _environment() -> dict[str, str]:
    # Several processes share two cores: one thread each keeps them from waiting for one another.
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
