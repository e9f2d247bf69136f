"""Commands of ours as copies of a process that has imported what training needs.

Importing torch and transformers takes a process three seconds of processor time, longer than what
most tests have it do. A fork server (Python's own) does that once; its copies begin at once. In all
else they are processes as any: with arguments, environment, folder, pipes, signals and exit code.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.context import ForkServerContext
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any
from unittest import mock

HEAVY = ("train", "serve", "generate", "eval")
"""Commands that import torch; a device must not have it before it needs it."""

_PRELOADED = ["cleave.training.trainer", "cleave.server.app", "cleave_cli.main"]


@cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


class ForkedProcess:
    """A running command, with what tests use of `subprocess.Popen`.

    Args:
        arguments: of the command, without its name.
        environment: its whole environment.
        folder: in which it runs.
    """

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path
    ) -> None:
        child_in, self._in = os.pipe()
        self._out, child_out = os.pipe()
        given = [DupFd(child_in), DupFd(child_out)]
        # The server is started with the first process, and torch counts threads when it is loaded.
        with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):
            self._process = _context().Process(
                target=_run, args=(list(arguments), dict(environment), str(folder), given),
                daemon=True,
            )  # fmt: skip
            self._process.start()
        os.close(child_in)
        os.close(child_out)
        self.stdin = open(self._in, "w")  # noqa: SIM115 - closed by who started the process
        self.stdout = open(self._out)  # noqa: SIM115
        self.stderr = None

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(
    arguments: list[str], environment: dict[str, str], folder: str, streams: list[Any]
) -> None:
    """Become the command."""
    for number, stream in enumerate(streams):
        given = stream.detach()
        os.dup2(given, number)
        os.close(given)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.argv = ["cleave", *arguments]
    from cleave_cli.main import main

    try:
        main()
    finally:
        sys.stdout.flush()
        atexit._run_exitfuncs()  # which multiprocessing's children leave out
