"""The command line of a worker, from a run."""

from __future__ import annotations

from benchmarks.side_by_side.run import Run


def options(run: Run) -> list[str]:
    """Return a worker's options; `benchmarks.side_by_side.workers.worker` reads them."""
    return [
        "--model", run.model, "--steps", str(run.steps), "--batch", str(run.setting.batch),
        "--seq", str(run.setting.seq), "--dtype", run.method.dtype,
        "--rank", str(run.setting.rank), "--variant", run.method.variant,
    ]  # fmt: skip
