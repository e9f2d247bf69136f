"""Check that transformers loads exports of every family and computes the same bits.

    python -m benchmarks.exports [--families opt,llama,...]

Trains a small model of each family, dropout 0, for two steps by stages and tiles as `cleave train`
does, on four emulated devices (layers without graphs stay on the server), and exports it.
`AutoModelForCausalLM.from_pretrained` loads the folder. Its logits must equal those of the trained
model in memory, in every bit. Parameters exported in bf16 must equal that model's, rounded.

Ends with 1 if any bit differs, or a family fails.
"""

from __future__ import annotations

import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

import cleave
from cleave.errors import CleaveError
from cleave.training.data.tokenizer import default_tokenizer
from cleave.training.loop.context import TrainContext
from cleave.training.loop.inputs import prepare
from cleave.training.loop.job import JobSpec
from cleave.training.loop.run_folder import RunFolder
from cleave.training.loop.trainer import Trainer
from cleave.training.results.export import export_run, keep_description
from cleave.workload.build import load_model
from tests.training.test_offload_report import FAMILIES

VOCABULARY: Final = 300
STEPS: Final = 2
ROWS, TOKENS = 3, 24


def save_family(family: str, folder: Path) -> None:
    """Save a new small model of a family, with a tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    config: Any = AutoConfig.for_model(family, **{**FAMILIES[family], "vocab_size": VOCABULARY})
    for key in config.to_dict():
        if "dropout" in key or key.endswith("pdrop"):
            setattr(config, key, 0.0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer = default_tokenizer(vocab_size=VOCABULARY).library_tokenizer
    tokenizer.save(str(folder / "tokenizer.json"))


def logits(model: Any) -> Tensor:
    """Return a model's logits for fixed random tokens."""
    ids = torch.randint(3, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    was = model.training
    model.eval()
    with torch.no_grad():
        found: Tensor = model(input_ids=ids, use_cache=False).logits
    model.train(was)
    return found


def differing(family: str, folder: Path) -> tuple[int, int, str]:
    """Train and export a family.

    Returns:
        The number of differing fp32 logits and bf16 parameters, and the training method.
    """
    from transformers import AutoModelForCausalLM

    save_family(family, folder / "model")
    text = folder / "text.txt"
    text.write_text("def step(a, b):\n    return a * 3 + b - 1\n" * 400)
    said: list[str] = []
    job = JobSpec(
        str(folder / "model"), str(text), steps=STEPS, batch=2, seq=16, method="stages",
        checkpoint_every=STEPS, learning_rate=1e-3,
    )  # fmt: skip
    with cleave.emulated(4, seed=1) as fleet:

        def note(record: Any) -> None:
            said.append(str(getattr(record, "text", "")))

        try:
            model, run = trained(job, TrainContext(fleet, note), folder / "run")
            by = "stages"
        except CleaveError:
            model, run = trained(
                JobSpec.from_dict({**job.to_dict(), "method": "tiles"}),
                TrainContext(fleet, note),
                folder / "by-tiles",
            )
            by = "tiles"
    if any("stay on the parameter server" in text for text in said):
        by = "stages and the server"
    wide, narrow = (
        AutoModelForCausalLM.from_pretrained(
            export_run(run, folder / name, dtype=name).folder, dtype="auto", local_files_only=True
        )
        for name in ("fp32", "bf16")
    )
    off = int((logits(model) != logits(wide)).sum())
    rounded = {name: p.bfloat16() for name, p in model.named_parameters()}
    return off, sum(int((p != rounded[n]).sum()) for n, p in narrow.named_parameters()), by


def trained(job: JobSpec, context: TrainContext, path: Path) -> tuple[nn.Module, RunFolder]:
    """Train; return the model in memory and the run."""
    dataset = prepare(job, context)
    run = RunFolder.create(path.parent, path.name)
    model, spec = load_model(dataset.source, seed=job.seed)
    run.write_config(job.to_dict())
    keep_description(run.path, model, dataset.source, dataset.tokenizer)
    trainer = Trainer(job, spec, model, dataset, run, context)
    try:
        for _ in range(STEPS):
            trainer.train_step()
        trainer.save()
    finally:
        trainer.close()
    cleave.restore(model)
    return model, run


def main() -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", default=",".join(FAMILIES))
    families = parser.parse_args().families.split(",")
    if unknown := set(families) - set(FAMILIES):
        parser.error(f"no family {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("cleave").setLevel(logging.ERROR)
    print(f"{'family':14} {'trained by':24} {'fp32':>8} {'bf16':>8}  (logits, parameters)")
    met = True
    for family in families:
        began_s = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="cleave-benchmark-") as folder:
            fp32, bf16, by = differing(family, Path(folder))
        met &= not fp32 and not bf16
        print(
            f"{family:14} {by:24} {fp32:8,} {bf16:8,}  {time.perf_counter() - began_s:.0f} s",
            flush=True,
        )
    print("every bit is the same: met" if met else "NOT met")
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
