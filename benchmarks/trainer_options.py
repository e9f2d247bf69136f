"""Compare the trainer's options with transformers' `Trainer` with the same settings.

    python -m benchmarks.trainer_options [--steps 8] [--json]

Both train opt-nano from the same weights, on the same batches in the same order. `Trainer` uses its
own loop, optimizers, schedules, clipping and accumulation (or torch's optimizer if it lacks one).
Learning rates and losses are compared step by step. Cleave's warm-up reaches the peak in its last
step, `Trainer`'s one step later, because its first step has a learning rate of 0. Exit code 1 if
rates differ by more than `RATE`, or losses by more than `LOSS` (in 16 bits by more than
`LOSS_16_BITS`).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F

from cleave.training.data.batches import BatchLoader
from cleave.training.loop.context import TrainContext
from cleave.training.loop.inputs import prepare
from cleave.training.loop.job import JobSpec
from cleave.training.loop.records import Record, StepRecord
from cleave.training.loop.run_folder import RunFolder
from cleave.training.loop.start import train
from cleave.workload.build import build_model

MODEL: Final = "opt-nano"
RATE: Final = 1e-9
LOSS: Final = 1e-5
LOSS_16_BITS: Final = 2e-2
_SHAPE: Final = {"batch": 2, "seq": 32}


@dataclass(frozen=True)
class Case:
    """One set of options.

    Attributes:
        name: description of the case.
        ours: fields of `JobSpec`.
        theirs: equivalent fields of `TrainingArguments`.
        optimizer: makes torch's optimizer for a model if `Trainer` lacks that optimizer.
    """

    name: str
    ours: dict[str, Any]
    theirs: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[[Any, JobSpec], torch.optim.Optimizer] | None = None


def _as_ours(model: Any, job: JobSpec) -> torch.optim.Optimizer:
    """Return torch's optimizer of the job's kind, with `Trainer`'s parameter groups."""
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adafactor": torch.optim.Adafactor,
        "sgd": torch.optim.SGD,
    }
    more = {"momentum": job.momentum} if job.optimizer == "sgd" else {}
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": job.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return kinds[job.optimizer](groups, lr=job.learning_rate, **more)


def cases(steps: int) -> tuple[Case, ...]:
    """Return the cases to compare."""
    third = steps // 3
    plain = {"schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0, "clip": 0.0}
    constant = {"lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 0.0}

    def cosine(floor: float) -> dict[str, Any]:
        kwargs = {"lr_scheduler_kwargs": {"min_lr_rate": floor}}
        return {**constant, "lr_scheduler_type": "cosine_with_min_lr", **kwargs}

    stable = {"num_decay_steps": third, "decay_type": "linear", "min_lr_ratio": 0.1}
    return (
        Case("AdamW", plain, constant),
        Case("betas", {**plain, "beta1": 0.8, "beta2": 0.999},
             {**constant, "adam_beta1": 0.8, "adam_beta2": 0.999}),
        Case("weight decay", {**plain, "weight_decay": 0.3}, {**constant, "weight_decay": 0.3}),
        Case("clipping", {**plain, "clip": 0.1}, {**constant, "max_grad_norm": 0.1}),
        Case("accumulation", {**plain, "accumulate": 3},
             {**constant, "gradient_accumulation_steps": 3}),
        Case("linear to 0", {**plain, "schedule": "linear", "floor": 0.0},
             {**constant, "lr_scheduler_type": "linear"}),
        Case("cosine to a floor", {**plain, "schedule": "cosine", "floor": 0.2}, cosine(0.2)),
        Case("WSD", {**plain, "schedule": "wsd", "decay_steps": third, "floor": 0.1},
             {**constant, "lr_scheduler_type": "warmup_stable_decay",
              "lr_scheduler_kwargs": stable}),
        Case("warm-up", {**plain, "schedule": "cosine", "floor": 0.1, "warmup_steps": third},
             {**cosine(0.1), "warmup_steps": third}),
        Case("SGD with momentum", {**plain, "optimizer": "sgd", "weight_decay": 0.1},
             constant, _as_ours),
        Case("Adafactor", {**plain, "optimizer": "adafactor"}, constant, _as_ours),
        Case("bf16", {**plain, "dtype": "bf16"}, {**constant, "bf16": True}),
        Case("fp16", {**plain, "dtype": "fp16"}, {**constant, "fp16": True}),
        Case("by stages", {**plain, "method": "stages"}, constant),
    )  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """The learning rate and the loss of every step."""

    rates: list[float]
    losses: list[float]


def ours(job: JobSpec, folder: Path) -> Curve:
    """Train with Cleave."""
    import cleave

    found = Curve([], [])

    def report(record: Record) -> None:
        if isinstance(record, StepRecord):
            found.rates.append(record.learning_rate)
            found.losses.append(record.loss)

    run = RunFolder.create(folder, "ours")
    if job.method == "local":
        train(job, run, TrainContext(None, report))
    else:
        with cleave.emulated(3) as fleet:
            train(job, run, TrainContext(fleet, report))
    return found


def theirs(case: Case, job: JobSpec, rates: list[float], folder: Path) -> Curve:
    """Train with transformers' `Trainer`.

    Args:
        case: the options.
        job: Cleave's job.
        rates: Cleave's learning rates, used for the losses of cases with a warm-up.
        folder: output folder of `Trainer`.
    """
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    data = prepare(job, TrainContext(None, lambda record: None))
    loader = BatchLoader(data.corpus.train, batch=job.batch, seq=job.seq, seed=job.seed)
    rows = []
    for _ in range(job.steps * job.accumulate):
        ids, labels, _ = loader.next_batch()
        rows += [{"input_ids": i, "targets": t} for i, t in zip(ids, labels, strict=True)]
    found = Curve([], [])
    parts: list[float] = []

    class Compared(Trainer):  # type: ignore[misc]
        """`Trainer` with labels that are already shifted, and batches in the given order."""

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            logits = model(input_ids=inputs["input_ids"], use_cache=False).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), inputs["targets"].flatten())
            parts.append(loss.item())
            return loss

        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(rows)

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
            rate = optimizer.param_groups[0]["lr"]
            found.rates.append(float(rate))
            if case.ours.get("warmup_steps"):  # compare losses at the same rates
                for group in optimizer.param_groups:
                    group["lr"] = rates[len(found.rates) - 1]

    model = build_model(data.source.spec, seed=job.seed)
    optimizer = case.optimizer(model, job) if case.optimizer else None
    settings: dict[str, Any] = {"adam_beta1": job.beta1, "adam_beta2": job.beta2, **case.theirs}
    trainer = Compared(
        model,
        TrainingArguments(
            str(folder), per_device_train_batch_size=job.batch, max_steps=job.steps, use_cpu=True,
            learning_rate=job.learning_rate, report_to=[], save_strategy="no", disable_tqdm=True,
            log_level="error",
            logging_strategy="no", remove_unused_columns=False, **settings,
        ),
        train_dataset=rows,
        callbacks=[Watch()],
        optimizers=(optimizer, None),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.model_accepts_loss_kwargs = False  # its loss is a mean, to be divided by accumulation
    trainer.train()
    each = job.accumulate
    found.losses.extend(sum(parts[n : n + each]) / each for n in range(0, len(parts), each))
    return found


def off(found: list[float], expected: list[float]) -> float:
    """Return the largest relative difference."""
    pairs = zip(found, expected, strict=True)
    return max((abs(a - b) / max(abs(b), 1e-30) for a, b in pairs), default=float("inf"))


def compared(case: Case, steps: int, text: Path) -> dict[str, Any]:
    """Train both ways; return their differences."""
    settings = {"method": "local", "dtype": "fp32", "learning_rate": 1e-3, **_SHAPE, **case.ours}
    job = JobSpec(MODEL, str(text), steps=steps, checkpoint_every=steps, **settings)
    with tempfile.TemporaryDirectory(prefix="cleave-benchmark-") as folder:
        mine = ours(job, Path(folder) / "runs")
        other = theirs(case, job, mine.rates, Path(folder) / "trainer")
    warm = job.warmup_steps
    rates = off(mine.rates[warm:], other.rates[warm:])
    if warm:  # Cleave's warm-up is one step ahead
        rates = max(rates, off(mine.rates[:warm], other.rates[1 : warm + 1]))
    losses = off(mine.losses, other.losses)
    most = LOSS if job.dtype == "fp32" else LOSS_16_BITS
    fallen = mine.losses[-1] < mine.losses[0]
    good = rates <= RATE and losses <= most
    return {
        "case": case.name, "rates_off": rates, "losses_off": losses, "learns": fallen, "good": good
    }  # fmt: skip


def main() -> None:
    """Compare all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    good = True
    with tempfile.TemporaryDirectory(prefix="cleave-benchmark-") as folder:
        text = Path(folder) / "text.txt"
        lines = (f"def step_{n}(a, b):\n    return a * {n} + b\n" for n in range(2000))
        text.write_text("".join(lines))
        for case in cases(options.steps):
            row = compared(case, options.steps, text)
            good &= row["good"]
            if options.json:
                print(json.dumps(row), flush=True)
            else:
                print(
                    f"{row['case']:<18} learning rates {row['rates_off']:.1e} off, losses "
                    f"{row['losses_off']:.1e}{'' if row['good'] else '  NOT THE SAME'}",
                    flush=True,
                )
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
