"""Temporary server and device processes that a command starts and stops."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cleave.errors import CleaveError
from cleave.fleet.own_device import end_process

if TYPE_CHECKING:
    from profiles.measuring.gemm_timer import SessionTimer


_STOP_S = 30.0
_MOST_BYTES = 4 * 10**9  # memory that the measured device offers; exceeds the largest tile


@dataclass(frozen=True, slots=True)
class OwnServer:
    """A running temporary server. Devices join at `url`; `cleave train` uses `operator_url`."""

    url: str
    operator_url: str
    dashboard_url: str
    process: subprocess.Popen[str]


@contextmanager
def own_server(*options: str) -> Iterator[OwnServer]:
    """Run `cleave serve` with `options` on a free port until the `with` block ends."""
    command = [sys.executable, "-m", "cleave_cli", "serve", "--port", "0", "--json", *options]
    command += ["--data", "none"]  # store no data, because all devices share one credential
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "CLEAVE_CREDENTIAL": secrets.token_urlsafe(24)},
    )
    assert process.stdout is not None
    # Read and discard the rest of the server's output, because a full pipe would block the server.
    reader = threading.Thread(target=process.stdout.read, daemon=True)
    try:
        line = process.stdout.readline()
        if not line:
            raise CleaveError("the server did not start; run `cleave serve` to see why")
        heard = json.loads(line)
        reader.start()
        yield OwnServer(heard["url"], heard["operator_url"], heard["dashboard_url"], process)
    finally:
        end_process(process, _STOP_S)
        if reader.is_alive():
            reader.join(_STOP_S)
        if not reader.is_alive():  # closing would wait for a running reader
            process.stdout.close()


@contextmanager
def own_devices(url: str, count: int, *options: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Run `count` processes of `cleave join` until the `with` block ends; yield the processes."""
    from cleave.transport.join_url import url_file

    with url_file(url) as source:  # a file, because other users can read command lines
        command = [sys.executable, "-m", "cleave_cli", "join", source, "--json", "--once", *options]
        started = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)
        ]
        try:
            yield started
        finally:
            for process in started:
                process.terminate()
            for process in started:
                process.wait()
                assert process.stdout is not None
                process.stdout.close()


@contextmanager
def own_device(backend: str, threads: int) -> Iterator[SessionTimer]:
    """Yield a tile timer for a new `cleave join` process with `threads` threads (0: all cores)."""
    import numpy as np

    from cleave.machine.sensors import total_memory_bytes
    from cleave.server.fleet_server import serve
    from profiles.measuring.gemm_timer import SessionTimer

    total_bytes = total_memory_bytes() or 2 * _MOST_BYTES
    offered = min(_MOST_BYTES, total_bytes // 2)
    options = ["--backend", backend, "--memory", str(offered // 10**6)]
    options += ["--cores", str(threads)] if threads else []
    with serve() as server, own_devices(server.url, 1, *options) as (process,):
        yield SessionTimer(
            server, np.random.default_rng(0), ended=lambda: process.poll() is not None
        )
