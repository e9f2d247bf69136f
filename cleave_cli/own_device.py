"""A device process of its own, joined to a server of its own, to be measured."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cleave.transport.tile_timer import SessionTimer


@contextmanager
def own_device(executor: str, threads: int) -> Iterator[SessionTimer]:
    """Times tiles on a `cleave join` process, ended when the block is left.

    Args:
        executor: what it multiplies with.
        threads: how many, on as many cores; 0 for all.
    """
    import numpy as np

    from cleave.transport.guest import url_file
    from cleave.transport.serve import serve
    from cleave.transport.tile_timer import SessionTimer

    with serve() as fleet, url_file(fleet.url) as source:  # command lines are no secrets
        command = [sys.executable, "-m", "cleave_cli", "join", source, "--json"]
        command += ["--executor", executor, "--memory", "4GB"]
        if threads:
            command += ["--cores", str(threads)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            yield SessionTimer(fleet, np.random.default_rng(0))
        finally:
            process.terminate()
            process.wait()
