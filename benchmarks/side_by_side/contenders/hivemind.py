"""hivemind: a peer in each namespace; peers find one another by their own DHT.

Its packages live in a separate environment, made by
`python -m benchmarks.side_by_side.hivemind_environment FOLDER`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import fmean
from typing import Final

from benchmarks.links import let_reach_one_another
from benchmarks.side_by_side.contenders.options import options
from benchmarks.side_by_side.processes import AbsentError
from benchmarks.side_by_side.run import Run

ENVIRONMENT: Final = "CLEAVE_HIVEMIND"
"""The variable that names the environment's folder."""

_USUAL: Final = "build/hivemind"
_PORT: Final = 31_337
_MODULE: Final = "benchmarks.side_by_side.workers.hivemind"
_MOST_TIMES: Final = 2.0
"""Time limit of averaging as a multiple of its transfer time, as in hivemind's guide."""

_ELEMENT_BYTES: Final = 4
_LATEST_S: Final = 30.0  # after the first peer's last step
_LOOK_S: Final = 0.1


def python() -> Path:
    """Return the Python interpreter that has hivemind.

    Raises:
        AbsentError: when the environment does not exist.
    """
    folder = Path(os.environ.get(ENVIRONMENT, _USUAL)).absolute()
    found = folder / "bin" / "python"
    if not found.exists():
        raise AbsentError(
            f"hivemind is not in {str(folder)!r}; make it with `python -m "
            f"benchmarks.side_by_side.hivemind_environment {folder}`, or name another folder in "
            f"{ENVIRONMENT}"
        )
    return found


def averaging_s(parameters: int, devices: int, up: float) -> float:
    """Return the time limit of an all-reduce of all gradients in seconds, at least a minute.

    Args:
        parameters: number of trained parameters.
        devices: number of averaging devices.
        up: bytes per second of a link's slower direction.
    """
    sent = 2 * (devices - 1) / devices * parameters * _ELEMENT_BYTES
    return max(60.0, _MOST_TIMES * sent / up)


def run(run: Run) -> None:
    """Train with a peer in each namespace."""
    let_reach_one_another(run.namespaces)
    link = run.setting.link
    slower = min(link.down, link.up)
    compressed = {"": "none", "fp16": "Float16Compression", "8bit": "Uniform8BitQuantization"}
    run.row.best = (
        f"Optimizer(use_local_updates=False, average_state_every=never, reuse_grad_buffers=True, "
        f"reuse_tensors=True, offload_optimizer=False, matchmaking_time=15, groups begin when all "
        f"have come), DHT(wait_timeout=30, blacklist_time=0), its compression: "
        f"{compressed[run.method.variant]}; the averaging of a step begins when all have done "
        f"their part of the batch"
    )
    workers = [
        run.processes.start(
            f"worker-{rank}",
            namespace.inside(
                str(python()), "-m", _MODULE, *options(run), "--worker", str(rank),
                "--workers", str(len(run.namespaces)),
                "--here", f"/ip4/{namespace.guest}/tcp/{_PORT}",
                "--bytes-per-s", str(slower), "--meeting", str(run.logs),
            ),
            OMP_NUM_THREADS="1",
            PYTHONPATH=str(Path.cwd()),
        )
        for rank, namespace in enumerate(run.namespaces)
    ]  # fmt: skip
    run.follow(run.processes.records(workers[0]), workers)
    run.row.losses = mean_losses(run.logs, len(run.row.losses), len(workers))


def loss_file(step: int, worker: int) -> str:
    """Return the name of the file for a peer's loss of a step."""
    return f"loss-{step}-{worker}"


def mean_losses(folder: Path, steps: int, workers: int) -> list[float]:
    """Return the mean loss of each step over the peers that finished it.

    Peers write their losses at the end of a step, the last some seconds after the first.
    """
    last = [folder / loss_file(steps - 1, worker) for worker in range(workers)]
    until_s = time.monotonic() + _LATEST_S
    while not all(map(Path.exists, last)) and time.monotonic() < until_s:
        time.sleep(_LOOK_S)
    return [_mean_loss(folder, step, workers) for step in range(steps)]


def _mean_loss(folder: Path, step: int, workers: int) -> float:
    files = (folder / loss_file(step, worker) for worker in range(workers))
    return fmean(float(text) for file in files if file.exists() and (text := file.read_text()))
