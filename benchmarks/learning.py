"""Check that a model learns: `opt-tiny` on the default corpus, five minutes on this machine.

    python -m benchmarks.learning

Runs `cleave train --model opt-tiny` with eight emulated devices for at most five minutes and prints
the first loss, and the held-out loss as a share of it.
"""

from __future__ import annotations

import argparse
import time

import cleave
from benchmarks.common import make_trainer
from cleave.training.loop.job import JobSpec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=900)
    options = parser.parse_args()
    job = JobSpec(
        "opt-tiny",
        steps=options.steps,
        batch=8,
        seq=128,
        dtype="bf16",
        checkpoint_every=0,
        method="tiles",
    )
    began_s = time.perf_counter()
    with cleave.emulated(8) as fleet:
        trainer = make_trainer(job, fleet)
        first = trainer.evaluate()
        first_train = last_train = 0.0
        while trainer.step < job.steps:
            last_train = trainer.train_step().loss
            first_train = first_train or last_train
            if time.perf_counter() - began_s > options.minutes * 60:
                break
        last = trainer.evaluate()
    print(
        f"opt-tiny, {trainer.step} steps in {time.perf_counter() - began_s:.0f} s: "
        f"training loss {first_train:.3f} to {last_train:.3f}, "
        f"held-out loss {first:.3f} to {last:.3f}: "
        f"{last / first:.0%} of the first (below 60 %)"
    )


if __name__ == "__main__":
    main()
