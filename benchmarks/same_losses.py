"""Compare losses with plain PyTorch's: OPT-125M, 20 steps.

    python -m benchmarks.same_losses

Runs eight emulated devices in fp32 and bf16, and three joined processes over WebSockets, one of
which gets SIGKILL after step 10. Prints the largest relative difference over all steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import cleave
from benchmarks.common import joined, make_trainer
from cleave.fleet.fleet import Fleet
from cleave.training.loop.job import JobSpec


def losses(
    job: JobSpec, fleet: Fleet | None, after: Callable[[int], None] = lambda step: None
) -> list[float]:
    """Return the loss of every step."""
    trainer = make_trainer(job, fleet)
    found = []
    while trainer.step < job.steps:
        found.append(trainer.train_step().loss)
        after(trainer.step)
    return found


def difference(ours: list[float], plain: list[float]) -> float:
    """Return the largest relative difference at any step."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, plain, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="opt-125m")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    for dtype, limit in (("fp32", 1e-4), ("bf16", 2e-2)):
        job = JobSpec(
            options.model, steps=options.steps, batch=4, seq=128, dtype=dtype, method="tiles"
        )
        plain = losses(job, None)
        print(f"{dtype}: plain PyTorch goes from {plain[0]:.4f} to {plain[-1]:.4f}", flush=True)
        with cleave.emulated(8) as fleet:
            ours = losses(job, fleet)
        print(f"  8 emulated devices: {difference(ours, plain):.2e} (below {limit:g})", flush=True)
        with cleave.serve() as served:
            flags = ("--backend", "numpy", "--threads", "1")
            with joined(served.url, 3, *flags) as processes:
                served.fleet.wait_for(3)
                victim = processes[0].process

                def kill(step: int, victim: object = victim) -> None:
                    if step == 10:
                        victim.kill()  # type: ignore[attr-defined]

                ours = losses(replace(job), served.fleet, kill)
                print(
                    f"  3 processes, one killed after step 10: {difference(ours, plain):.2e} "
                    f"(below {limit:g}); {served.fleet.device_count} devices left, "
                    f"{served.fleet.counters().reissued} units reissued",
                    flush=True,
                )


if __name__ == "__main__":
    main()
