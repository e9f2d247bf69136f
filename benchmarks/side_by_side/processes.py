"""Processes of a run: started together, read while they run, and ended together."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

_LOOK_S: Final = 0.02
_START_S: Final = 300.0  # time limit for a server to listen and devices to join
_END_S: Final = 10.0  # time limit for a process to end on request
_TAIL: Final = 12  # number of log lines shown
_RANK: Final = re.compile(r"^\[rank\d+\]:")
_ERROR: Final = re.compile(r"^[\w.]*(Error|Exception)\b")
_PR_SET_PDEATHSIG: Final = 1


class RunError(Exception):
    """A method could not be measured; the text says why.

    Attributes:
        output: last lines of output of the run's processes.
    """

    def __init__(self, reason: str, output: str = "") -> None:
        super().__init__(reason)
        self.output = output


class LateError(RunError):
    """A run exceeded its time limit."""


class AbsentError(RunError):
    """A method is not installed here, or does not support the setting."""


@dataclass(frozen=True)
class Started:
    """A process and its output files."""

    name: str
    process: subprocess.Popen[bytes]
    out: Path
    err: Path

    def tail(self) -> str:
        """Return the last lines of the process's output."""
        shown = []
        for path in (self.out, self.err):
            lines = path.read_text(errors="replace").splitlines()[-_TAIL:]
            if lines:
                shown += [f"--- {path.name}", *lines]
        return "\n".join(shown)

    def last_words(self) -> str:
        """Return the last error on stderr, or else its last line; empty without output."""
        return last_words(self.err.read_text(errors="replace"))

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and its children."""
        os.killpg(self.process.pid, number)

    def pids(self) -> list[int]:
        """Return the ids of the process and its running children."""
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return [self.process.pid, *(child.pid for child in children)]


def last_words(text: str) -> str:
    """Return the last line that names an error, or else the last nonempty line."""
    lines = [_RANK.sub("", line).strip() for line in text.splitlines()]
    said = [line for line in lines if line]
    errors = [line for line in said if _ERROR.match(line) and not line.endswith(":")]
    return (errors or said or [""])[-1]


class Processes:
    """Context manager for processes that end with the block.

    Args:
        logs: folder for their output.
        until_s: deadline, by `time.monotonic`.
    """

    def __init__(self, logs: Path, until_s: float) -> None:
        self._logs = logs
        self.until_s = until_s
        self.started: list[Started] = []
        self.may_end: set[str] = set()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        # Devices before their server, which would otherwise report each as lost.
        reverse = [*reversed(self.started)]
        for one in reverse:
            one.process.terminate()
        until_s = time.monotonic() + _END_S
        for one in reverse:
            try:
                one.process.wait(max(0.1, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()
            try:
                one.signal(signal.SIGKILL)  # children that are still running
            except ProcessLookupError:
                continue

    def start(self, name: str, command: Sequence[str], **environment: str) -> Started:
        """Start a process that does not receive Ctrl-C from the terminal."""
        out, err = self._logs / f"{name}.out", self._logs / f"{name}.err"
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
                start_new_session=True,
                preexec_fn=_prepare,
            )
        self.started.append(Started(name, process, out, err))
        return self.started[-1]

    def records(self, of: Started, until_s: float | None = None) -> Iterator[dict[str, Any]]:
        """Yield the JSON lines that a process prints, until it ends.

        Args:
            of: the process. Only it and the processes in `may_end` may end in the meantime.
            until_s: deadline, by `time.monotonic`.

        Raises:
            RunError: when another process ends, or this one fails.
            LateError: when the time limit is exceeded.
        """
        rest = ""
        with of.out.open(errors="replace") as file:
            while True:
                ended = of.process.poll() is not None
                rest += file.read()
                *lines, rest = rest.split("\n")
                for line in lines:
                    if line.startswith("{"):
                        yield json.loads(line)
                if ended:
                    if of.process.returncode:
                        raise self._error(of)
                    return
                for one in self.started:
                    if one is of or one.name in self.may_end:
                        continue
                    if one.process.poll() is not None:
                        raise self._error(one)
                if time.monotonic() > min(until_s or self.until_s, self.until_s):
                    raise LateError(f"{of.name} took too long", self._output())
                time.sleep(_LOOK_S)

    def await_record(self, of: Started, fits: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the first JSON line of a process for which `fits` is true.

        Raises:
            RunError: when there is no such line.
        """
        for record in self.records(of, time.monotonic() + _START_S):
            if fits(record):
                return record
        raise RunError(f"{of.name} ended too soon", self._output())

    def _error(self, ended: Started) -> RunError:
        code = ended.process.returncode
        killed = code == -signal.SIGKILL
        words = "killed, as the system does where memory runs out" if killed else ended.last_words()
        return RunError(
            f"{ended.name} ended with {code}{': ' if words else ''}{words}", self._output()
        )

    def _output(self) -> str:
        return "\n".join(one.tail() for one in self.started)


def _prepare() -> None:
    """Make a new process end when its parent is killed, and first if memory runs out (Linux)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        Path("/proc/self/oom_score_adj").write_text("1000")
