"""Mixtures of experts: training adds the loss that spreads tokens, where the config asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import cleave
from cleave.errors import UsageError
from cleave.training.data.batches import Batch
from cleave.training.loop.job import JobSpec
from cleave.training.loop.records import EvalRecord, Record
from cleave.training.loop.run_folder import RunFolder
from cleave.training.tiles.offloaded_linear import auxiliary_weight
from tests.training.runs import losses_by_pytorch, losses_of, nightly, save_tokenizer, trained

SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5, "initializer_range": 0.2,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip


def folder_of(folder: Path, family: str, *, asked: bool = True) -> Path:
    """Save a small model of a family whose config asks for the auxiliary loss, or does not."""
    import transformers

    experts: dict[str, Any] = {
        "mixtral": {"num_local_experts": 4},
        "qwen2_moe": {
            "num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        },
        "olmoe": {"num_experts": 4},
    }[family]  # fmt: skip
    config: Any = transformers.AutoConfig.for_model(family, **experts, **SIZES)
    config.output_router_logits = asked
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def job_of(folder: Path, corpus: Path, **more: Any) -> JobSpec:
    settings: dict[str, Any] = {
        "batch": 2, "seq": 16, "method": "local", "optimizer": "sgd", "momentum": 0.0,
        "weight_decay": 0.0, "clip": 0.0, "learning_rate": 0.1, "warmup_steps": 0,
        "schedule": "constant", **more,
    }  # fmt: skip
    return JobSpec(str(folder), str(corpus), 2, **settings)


def run(job: JobSpec, folder: Path) -> list[Record]:
    """Train on an emulated device, because a plan for several takes much longer."""
    with cleave.emulated(1) as fleet:
        return trained(job, RunFolder.create(folder), None if job.method == "local" else fleet)


def labelled(model: Any, batches: Sequence[Batch]) -> torch.Tensor:
    """Return the mean of the losses that transformers returns for labels."""
    losses = [
        model(input_ids=batch.ids, labels=batch.ids, shift_labels=batch.labels).loss
        for batch in batches
    ]
    return torch.stack(losses).mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "more"),
    [
        nightly("mixtral", {"method": "tiles"}),
        nightly("mixtral", {"method": "auto", "accumulate": 2}),
        nightly("mixtral", {"memory": "lean"}),
        nightly("qwen2_moe", {"method": "tiles", "accumulate": 2}),
        ("olmoe", {"accumulate": 2}),
    ],
)
def test_the_loss_that_spreads_tokens_is_that_of_transformers(
    tmp_path: Path, corpus_file: Path, family: str, more: dict[str, Any]
) -> None:
    job = job_of(folder_of(tmp_path / "model", family), corpus_file, **more)
    losses = losses_of(run(job, tmp_path / "runs"))
    assert losses == pytest.approx(losses_by_pytorch(job, labelled), rel=1e-5)
    folder = folder_of(tmp_path / "without", family, asked=False)
    without = replace(job_of(folder, corpus_file, **more), steps=1)
    assert losses[0] > losses_by_pytorch(without, labelled)[0] + 0.2


@pytest.mark.slow
def test_held_out_losses_are_of_text_alone(tmp_path: Path, corpus_file: Path) -> None:
    """So they are those of `cleave eval`; before the first update both models are the same."""
    found = []
    for asked in (True, False):
        folder = folder_of(tmp_path / f"model-{asked}", "mixtral", asked=asked)
        job = job_of(folder, corpus_file, eval_every=1, learning_rate=1e-9)
        seen = run(job, tmp_path / f"run-{asked}")
        found.append([record.eval_loss for record in seen if isinstance(record, EvalRecord)])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_stages_without_that_loss_are_refused(tmp_path: Path, corpus_file: Path) -> None:
    folder = folder_of(tmp_path / "model", "mixtral")
    with pytest.raises(UsageError, match=r"output_router_logits.*use --method tiles or local"):
        run(job_of(folder, corpus_file, method="stages"), tmp_path / "runs")


def test_a_weight_that_is_not_known_is_one_sentence() -> None:
    class Other(torch.nn.Module):
        config = type("Config", (), {"output_router_logits": True})

    with pytest.raises(UsageError, match="Other has no coefficient for it"):
        auxiliary_weight(Other())
    assert auxiliary_weight(torch.nn.Linear(2, 2)) == 0.0
