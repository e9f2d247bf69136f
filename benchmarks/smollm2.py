"""Compare training SmolLM2 by stages and tiles with plain PyTorch: losses, seconds, bytes.

    python -m benchmarks.smollm2 FOLDER [--steps 3] [--json]

FOLDER is made by `examples/smollm2/prepare.py`: the real model, and questions whose answers are
learned. Runs full and LoRA training in fp32 and bf16, with two emulated devices in this process, so
seconds are for one machine that does all the work. Prints the largest relative difference of losses
(at most 1e-4 in fp32, 2e-2 in bf16), and perplexity on held-out questions before and after the
steps. Exit code 1 if a difference is larger.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import cleave
from cleave.training.loop.context import TrainContext
from cleave.training.loop.job import JobSpec
from cleave.training.loop.records import EvalRecord, Record, StepRecord
from cleave.training.loop.run_folder import RunFolder
from cleave.training.loop.start import train

LIMITS: Final = {"fp32": 1e-4, "bf16": 2e-2}
DEVICES: Final = 2


@dataclass
class Trained:
    """The result of a run.

    Attributes:
        losses: loss of each step.
        seconds: median seconds of a step, without the first, which makes graphs and sends frozen
            weights.
        bytes: bytes to and from devices in the last step.
        held_out: loss on held-out text after the steps.
    """

    losses: list[float]
    seconds: float
    bytes: int
    held_out: float


def trained(
    folder: Path, method: str, dtype: str, lora: str, steps: int, learning_rate: float | None = None
) -> Trained:
    """Train for `steps` steps."""
    rate = learning_rate or (5e-4 if lora else 2e-5)
    job = JobSpec(
        str(folder / "model"), str(folder / "questions.jsonl"), max(1, steps), batch=4, seq=128,
        dtype=dtype, lora=lora, method=method, learning_rate=rate,
        eval_data=str(folder / "held-out.jsonl"), eval_every=max(1, steps), checkpoint_every=0,
        audit=0.0,
    )  # fmt: skip
    records: list[Record] = []
    with tempfile.TemporaryDirectory() as runs, cleave.emulated(DEVICES) as fleet:
        context = TrainContext(None if method == "local" else fleet, records.append)
        train(job, RunFolder.create(Path(runs), "run"), context)
    found = [record for record in records if isinstance(record, StepRecord)]
    last = found[-1]
    judged = next(record for record in records if isinstance(record, EvalRecord))
    return Trained(
        [record.loss for record in found],
        statistics.median([record.wall_s for record in found[1:]] or [last.wall_s]),
        last.downlink_bytes + last.uplink_bytes,
        judged.eval_loss,
    )


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    failed = False
    # A learning rate too small to change a weight.
    before = math.exp(trained(options.folder, "local", "fp32", "", 1, 1e-30).held_out)
    if not options.json:
        print(f"held-out perplexity before training: {before:.2f}", flush=True)
    for lora in ("", "r=16,alpha=32"):
        for dtype, limit in LIMITS.items():
            runs = {
                method: trained(options.folder, method, dtype, lora, options.steps)
                for method in ("local", "stages", "tiles")
            }
            plain = runs["local"]
            for method, run in runs.items():
                off = max(abs(a - b) / b for a, b in zip(run.losses, plain.losses, strict=True))
                failed |= off > limit
                figures = {
                    "trained": "adapters" if lora else "all",
                    "dtype": dtype,
                    "method": method,
                    "off": off,
                    "seconds_over_plain": run.seconds / plain.seconds,
                    "seconds": run.seconds,
                    "bytes_a_step": run.bytes,
                    "perplexity_before": before,
                    "perplexity_after": math.exp(run.held_out),
                }
                if options.json:
                    print(json.dumps(figures), flush=True)
                    continue
                print(
                    f"{figures['trained']:8} {dtype} {method:6}: losses off by {off:.1e} (at most "
                    f"{limit:g}); {run.seconds:.2f} s a step, {run.seconds / plain.seconds:.2f} "
                    f"of plain; {run.bytes / 1e6:.0f} MB a step; held-out perplexity "
                    f"{math.exp(run.held_out):.2f}",
                    flush=True,
                )
    sys.exit(failed)


if __name__ == "__main__":
    main()
