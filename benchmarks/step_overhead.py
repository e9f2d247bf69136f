"""Measure Cleave's overhead per step: 8 emulated devices against plain PyTorch.

    python -m benchmarks.step_overhead

OPT-125M, batch 4, sequence 512, fp32 and bf16. The same model runs offloaded and plain steps in
turn; prints the median ratio of five interleaved pairs. A step is forward, backward, clipping and
AdamW. With `--coding off` payloads count as uncompressed, which gives the plans of versions without
compression.
"""

from __future__ import annotations

import argparse
import statistics
import time

import cleave
from benchmarks.common import make_trainer, spread
from cleave.training.loop.job import JobSpec
from cleave.training.loop.trainer import Trainer


def seconds(trainer: Trainer) -> float:
    """Return the seconds of one step."""
    began_s = time.perf_counter()
    trainer.train_step()
    return time.perf_counter() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="opt-125m")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--coding", default="auto", choices=("auto", "on", "off"))
    options = parser.parse_args()
    for dtype, limit in (("fp32", 1.35), ("bf16", 1.6)):
        job = JobSpec(options.model, steps=1000, batch=4, seq=512, dtype=dtype)
        trainer = make_trainer(job, None)
        ratios, plain_s, ours_s = [], [], []
        with cleave.emulated(8, coding=options.coding) as fleet:
            for pair in range(options.pairs + 1):
                plain = seconds(trainer)
                cleave.offload(trainer.model, fleet)
                ours = seconds(trainer)
                cleave.restore(trainer.model)
                if pair:  # the first pair is a warm-up
                    ratios.append(ours / plain)
                    plain_s.append(plain)
                    ours_s.append(ours)
        print(
            f"{dtype}: {spread(ratios)} times plain PyTorch (at most {limit}); plain "
            f"{statistics.median(plain_s):.2f} s, ours {statistics.median(ours_s):.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
