"""Processes of our modules, forked from one that has imported the slow libraries already.

    with forked("cleave_cli", ("--help",), cwd=None, env=os.environ) as process: ...

Importing PyTorch and transformers takes seconds of each process. A fork does the rest as
`python -m MODULE` does it. Tests of what a process imports start an interpreter instead.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

JOINING = (
    "cleave_cli.main", "cleave.coding", "cleave.device.service", "cleave.transport.connection",
    "numpy", "profiles.library", "psutil", "typer._adapters", "websockets.asyncio.client",
)  # fmt: skip
"""What devices import: not PyTorch, as a device that has it would compute with it."""
TRAINING = (
    *JOINING, "cleave.server.fleet_server", "cleave.server.jobs.jobs", "cleave.training.loop.start",
    "cleave.workload.build", "matplotlib.backends.backend_agg", "matplotlib.figure",
    "transformers.models.opt.modeling_opt",
)  # fmt: skip
"""What servers and trainers import."""

_MOST_BYTES = 200_000
_STATUS = struct.Struct("i")


class Forked(subprocess.Popen[Any]):
    """`python -m MODULE` as a fork. Used like a Popen, of which it is one.

    The fork's parent is no process of the test's, and reports its end through a socket.

    Args:
        preload: modules that the forking process has imported.
        module: the module that runs.
        arguments: its arguments.
        how: as of Popen.
    """

    def __init__(
        self, preload: Sequence[str], module: str, arguments: Sequence[str], **how: Any
    ) -> None:
        self._preload, self._module = tuple(preload), module
        super().__init__([sys.executable, *arguments], **how)

    def _execute_child(self, args: Sequence[str], *given: Any) -> None:
        cwd, env = given[4:6]
        stdin, to_stdin, from_stdout, stdout, from_stderr, stderr = given[9:15]
        ours, theirs = socket.socketpair()
        asked: dict[str, Any] = {"module": self._module, "arguments": args[1:]}
        asked |= {"cwd": str(cwd or Path.cwd()), "env": dict(os.environ if env is None else env)}
        fds = [own if fd == -1 else fd for own, fd in enumerate((stdin, stdout, stderr))]
        with theirs:
            socket.send_fds(_forker(self._preload), [json.dumps(asked).encode()],
                            [*fds, theirs.fileno()])  # fmt: skip
        self._status = ours
        (self.pid,) = _STATUS.unpack(ours.recv(_STATUS.size))
        self._child_created = True
        for mine, its in ((to_stdin, stdin), (from_stdout, stdout), (from_stderr, stderr)):
            if -1 not in (mine, its):
                os.close(its)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if not select.select([self._status], [], [], 0 if wait_flags else None)[0]:
            return 0, 0
        (status,) = _STATUS.unpack(self._status.recv(_STATUS.size))
        self._status.close()
        return self.pid, status

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        lock: Any = self._waitpid_lock  # type: ignore[attr-defined]
        if self.returncode is None and lock.acquire(blocking=False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                lock.release()
        return self.returncode


@cache
def _forker(preload: tuple[str, ...]) -> socket.socket:
    """Start the process that forks, once for all tests of this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST_BYTES)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with theirs:
        subprocess.Popen(
            [sys.executable, "-m", __name__, *preload],
            stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=environment,
            cwd=Path(__file__).parents[2],
        )  # fmt: skip
    return ours


def _forks() -> tuple[str, list[str]]:
    """Fork for each request. Return in the fork: its module and arguments."""
    requests = socket.socket(fileno=os.dup(0))
    while True:
        text, fds, _, _ = socket.recv_fds(requests, _MOST_BYTES, 4)
        if not text:
            os._exit(0)
        asked = json.loads(text)
        if os.fork():
            for fd in fds:
                os.close(fd)
            while os.waitpid(-1, os.WNOHANG)[0]:  # what has ended meanwhile
                pass
            continue
        requests.close()
        with socket.socket(fileno=fds.pop()) as status:
            if pid := os.fork():  # the parent of the process, until that ends
                os.setpgid(0, 0)
                for fd in (0, 1, 2, *fds):
                    os.close(fd)
                status.send(_STATUS.pack(pid))
                _, ended = os.waitpid(pid, 0)
                try:
                    status.send(_STATUS.pack(ended))
                finally:
                    os._exit(0)
        for own, fd in enumerate(fds):
            os.dup2(fd, own)
        for fd in fds:
            os.close(fd)
        os.chdir(asked["cwd"])
        os.environ.clear()
        os.environ.update(asked["env"])
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        return asked["module"], asked["arguments"]


def main() -> None:
    """Import what is named, and fork for whoever asks through the socket that is stdin."""
    for name in sys.argv[1:]:
        with suppress(ImportError):  # some versions of libraries have others
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    module, sys.argv[1:] = _forks()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
