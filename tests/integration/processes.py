"""Real processes for tests: a server, devices, and what they print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CLEAVE = [sys.executable, "-m", "cleave_cli"]
PATIENCE_S = 120.0  # how long a process may take before the test gives up on it


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [*CLEAVE, *arguments],
        capture_output=True, text=True, timeout=PATIENCE_S, cwd=cwd, env=_environment(),
    )  # fmt: skip


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
    assert process.stdout is not None
    lines = process.stdout
    try:
        yield process, (json.loads(line) for line in lines if line.startswith("{"))
    finally:
        process.kill()
        process.wait()
        lines.close()


def wait_for_event(lines: Iterator[dict[str, Any]], event: str) -> dict[str, Any]:
    """Read on until an event comes."""
    for record in lines:
        if record["event"] == event:
            return record
    raise AssertionError(f"the process ended before it printed {event!r}")


def _environment() -> dict[str, str]:
    # Several processes share two cores: one thread each keeps them from waiting for one another.
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
