"""Runs in this process, small model folders, and the losses of PyTorch alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cleave.fleet.fleet import Fleet
from cleave.training.data.batches import Batch, BatchLoader
from cleave.training.data.tokenizer import default_tokenizer
from cleave.training.loop.context import TrainContext
from cleave.training.loop.inputs import prepare
from cleave.training.loop.job import JobSpec
from cleave.training.loop.records import NoteRecord, Record, StepRecord
from cleave.training.loop.run_folder import RunFolder
from cleave.training.loop.start import train
from cleave.workload.build import load_folder
from emulator.virtual import emulated
from profiles.fleet_device import FleetDevice
from tests.graphs.models import small_model


def write_chats(path: Path, count: int) -> None:
    """Write short conversations of a question and an answer as JSONL."""
    chats = [
        {"messages": [
            {"role": "user", "content": f"What is {n} + {n}?"},
            {"role": "assistant", "content": f"It is {2 * n}, é."},
        ]}
        for n in range(count)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))


def nightly(*values: object) -> Any:
    """Return a case of a parametrized test that runs nightly only."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def trained(job: JobSpec, run: RunFolder, fleet: Fleet | None = None, **how: Any) -> list[Record]:
    seen: list[Record] = []
    train(job, run, TrainContext(fleet, seen.append), **how)
    return seen


def rounds_job(corpus_file: Path, exchange: str) -> JobSpec:
    """A job that trains adapters by two rounds of local updates."""
    return JobSpec(
        "opt-nano", str(corpus_file), 4, batch=2, seq=16, checkpoint_every=0, lora="r=4",
        learning_rate=1e-2, method="diloco", every=2, exchange=exchange,
    )  # fmt: skip


def losses_on_one_device(job: JobSpec, run: RunFolder) -> list[float]:
    """Return the losses of a job on an emulated device, whose arithmetic is real."""
    with emulated([FleetDevice("alone", 1e11, 1e8, 1e8, 0.001, 2**31)]) as fleet:
        return losses_of(trained(job, run, fleet))


def steps_of(seen: Sequence[Record]) -> list[StepRecord]:
    return [record for record in seen if isinstance(record, StepRecord)]


def losses_of(seen: Sequence[Record]) -> list[float]:
    """Return the losses of all steps."""
    return [record.loss for record in steps_of(seen)]


def notes_of(seen: Sequence[Record]) -> str:
    """Return all notes, one per line."""
    return "\n".join(record.text for record in seen if isinstance(record, NoteRecord))


def losses(job: JobSpec, run: RunFolder, fleet: Fleet | None = None, **how: Any) -> list[float]:
    """Train a job and return the losses of its steps."""
    return losses_of(trained(job, run, fleet, **how))


def losses_by_pytorch(
    job: JobSpec,
    loss: Callable[[Any, Sequence[Batch]], Tensor],
    model: Any = None,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
) -> list[float]:
    """Train on the batches of a job with PyTorch alone and return the losses.

    Args:
        job: A job whose model is a folder.
        loss: Returns the loss of a step from the model and its micro-batches.
        model: The model to train; None loads the job's.
        optimizer: Makes the optimizer; None makes SGD with the job's learning rate.
    """
    data = prepare(job, TrainContext(None, lambda record: None))
    model = load_folder(job.model)[0] if model is None else model
    parameters = [p for p in model.parameters() if p.requires_grad]
    if optimizer is None:
        made: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=job.learning_rate)
    else:
        made = optimizer(parameters)
    loader = BatchLoader(data.corpus.train, batch=job.batch, seq=job.seq, seed=job.seed)
    found = []
    for _ in range(job.steps):
        made.zero_grad()
        total = loss(model, [loader.next_batch() for _ in range(job.accumulate)])
        torch.autograd.backward(total)
        if job.clip:
            nn.utils.clip_grad_norm_(parameters, job.clip)
        made.step()
        found.append(total.item())
    return found


def save_model(folder: Path, family: str = "llama", **sizes: Any) -> Path:
    """Save a small model and its tokenizer and return their folder."""
    model: Any = small_model(family, vocab_size=300, **sizes)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """Save the built-in tokenizer with a vocabulary of 300 tokens."""
    from transformers import PreTrainedTokenizerFast

    held = default_tokenizer(vocab_size=300, progress=lambda text: None).library_tokenizer
    wrapped = PreTrainedTokenizerFast(tokenizer_object=held, eos_token="<|endoftext|>")
    wrapped.save_pretrained(folder)
