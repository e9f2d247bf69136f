"""A `cleave join` process that joins a temporary server, for measurements."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from profiles.measuring.tile_timer import SessionTimer

_MOST_BYTES = 4 * 10**9  # device memory, larger than any measured tile


@contextmanager
def own_device(backend: str, threads: int) -> Iterator[SessionTimer]:
    """Start a `cleave join` process, and yield a timer that measures tiles on this device.

    The process ends when the `with` block ends.

    Args:
        backend: name of the backend for matrix multiplications.
        threads: number of threads and cores to use; 0 for all cores.
    """
    import numpy as np

    from cleave.machine.sensors import total_memory_bytes
    from cleave.server.fleet_server import serve
    from cleave.transport.join_url import url_file
    from profiles.measuring.tile_timer import SessionTimer

    total_bytes = total_memory_bytes() or 2 * _MOST_BYTES
    offered = min(_MOST_BYTES, total_bytes // 2)
    # Pass the URL in a file, because other users can read command lines.
    with serve() as server, url_file(server.url) as source:
        command = [sys.executable, "-m", "cleave_cli", "join", source, "--json"]
        command += ["--backend", backend, "--memory", str(offered // 10**6)]
        command += ["--once"]  # ends when the server ends
        if threads:
            command += ["--cores", str(threads)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            yield SessionTimer(
                server, np.random.default_rng(0), ended=lambda: process.poll() is not None
            )
        finally:
            process.terminate()
            process.wait()
