"""Several documents in a sequence that do not attend to one another."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import cleave
from cleave.arrays import DType
from cleave.errors import UsageError
from cleave.graphs.calls import Embedded, layer_calls
from cleave.graphs.packed import PackedBy, mask_for, packed_by
from cleave.planner.stages.model import PsCompute
from cleave.scheduler.stages.arrays import StageArray
from cleave.training.data.batches import (
    IGNORED,
    START,
    Batch,
    BatchLoader,
    Tokens,
    positions_of,
    validation_batches,
)
from cleave.training.loop.job import JobSpec, OptimizerKind
from cleave.training.loop.optimizer import Optimizer, UpdateRule
from cleave.training.loop.records import EvalRecord
from cleave.training.loop.run_folder import RunFolder
from cleave.training.stages.stage_work import ModelWork
from cleave.training.stages.staged import Rows
from emulator.virtual import emulated
from tests.graphs.models import TOKENS, graphs_of, small_model
from tests.training import test_staged
from tests.training.runs import losses_of, nightly, trained
from tests.training.test_offload_report import FAMILIES, model_of
from tests.training.test_staged import assert_close, staged

TOGETHER = {"bloom"}  # ALiBi counts the tokens before
BY_MASK = {"opt", "falcon"}


def tokens_of(lengths: list[int]) -> Tokens:
    """Documents of these lengths, with tokens that count on."""
    tokens = np.arange(sum(lengths), dtype=np.int32)
    tokens[np.cumsum([0, *lengths])[:-1]] |= START
    return tokens


@given(
    lengths=st.lists(st.integers(1, 12), min_size=4, max_size=30), seq=st.integers(1, 9),
    batch=st.integers(1, 4), unlearned=st.randoms(use_true_random=False),
)  # fmt: skip
def test_positions_begin_anew_and_first_tokens_are_not_learned(
    lengths: list[int], seq: int, batch: int, unlearned: Any
) -> None:
    marked = tokens_of([*lengths, 2 * seq + 2])
    question = np.array([unlearned.random() < 0.3 for _ in marked])
    question[-2 * seq - 2 :] = False
    tokens = np.where(question, ~marked, marked).astype(np.int32)
    begins = marked >= START
    joined = list(validation_batches(tokens, batch, seq))
    loader = BatchLoader(tokens, batch=batch, seq=seq, seed=0, separate=True)
    for each in (*(loader.next_batch() for _ in range(6)), *separate_batches(tokens, batch, seq)):
        assert each.positions is not None
        for ids, labels, positions in zip(each.ids, each.labels, each.positions, strict=True):
            assert positions[0] == 0
            for place, (one, label, position) in enumerate(
                zip(ids.tolist(), labels.tolist(), positions.tolist(), strict=True)
            ):
                following = one + 1  # tokens count on
                hidden = question[following] or begins[following]
                assert label == (IGNORED if hidden else following)
                assert position == (0 if begins[one] or not place else positions[place - 1] + 1)
            assert (labels != IGNORED).any()
    assert all(each.positions is None for each in joined)
    assert all(((each.ids >= 0) & (each.ids < len(tokens))).all() for each in joined)


def separate_batches(tokens: Tokens, batch: int, seq: int) -> list[Batch]:
    return list(validation_batches(tokens, batch, seq, separate=True))


def documents(cut: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two sequences, the first of one document and the second of two, and their positions."""
    torch.manual_seed(3)
    begins = torch.zeros(2, TOKENS, dtype=torch.bool)
    begins[:, 0] = begins[1, cut] = True
    return torch.randint(3, 96, (2, TOKENS)), positions_of(begins)


def loss_of(model: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_does_not_keep_documents_apart_is_refused(family: str) -> None:
    model = model_of(family)
    if family in TOGETHER:
        with pytest.raises(UsageError, match=f"'separate', but {type(model).__name__} cannot"):
            packed_by(model)
    else:
        assert packed_by(model) is (PackedBy.MASK if family in BY_MASK else PackedBy.POSITIONS)
    assert model.training


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "opt",  # the test of a run has a model with masks
        "mistral",
        "gpt2",
    ],
)
def test_gradients_by_stages_are_those_of_documents_alone(family: str) -> None:
    """Also where a layer sees a window only, and in a step in which no sequence has two."""
    model = small_model(family)
    packed = packed_by(model)
    graphs = graphs_of(model, packed=packed)
    for cut in (5, 0):
        model.zero_grad()
        plain = copy.deepcopy(model)
        ids, positions = documents(cut)
        targets = torch.full_like(ids, IGNORED)
        targets[:, :-1] = ids[:, 1:]
        if cut:
            targets[1, cut - 1] = IGNORED
        pieces = [(0, 0, TOKENS), (1, 0, cut), (1, cut, TOKENS)]
        counted = int((targets >= 0).sum())
        expected = 0.0
        for row, first, stop in pieces:
            if stop > first:
                part = loss_of(plain, ids[row : row + 1, first:stop], targets[row, first:stop])
                torch.autograd.backward(part / counted)
                expected += float(part.detach()) / counted
        with emulated(4, seed=1) as fleet:
            found = staged(model, fleet, graphs=graphs).gradients(
                Rows(ids, targets, mask_for(packed, positions), positions)
            )
        assert found == pytest.approx(expected, rel=1e-5)
        assert_close(model, plain, 1e-5)


@pytest.fixture
def short_documents(tmp_path: Path) -> Path:
    path = tmp_path / "short.jsonl"
    path.write_text("".join(f'{{"text": "{"of many " * (i % 5 + 1)} {i}"}}\n' for i in range(400)))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("method", [nightly("stages"), "tiles"])
def test_a_run_has_the_losses_of_one_machine(
    tmp_path: Path,
    short_documents: Path,
    plain_losses: Callable[[JobSpec], list[float]],
    method: str,
) -> None:
    job = JobSpec(
        "opt-nano", str(short_documents), steps=3, batch=2, seq=32, method=method,
        packing="separate", eval_every=3, checkpoint_every=2,
    )  # fmt: skip
    plain = plain_losses(replace(job, method="local"))
    with cleave.emulated(1) as fleet:
        seen = trained(job, RunFolder.create(tmp_path, "run"), fleet)
    losses = losses_of(seen)
    assert losses == pytest.approx(plain, rel=1e-4)
    assert losses != pytest.approx(
        plain_losses(replace(job, method="local", packing="joined")), rel=1e-3
    )
    assert [record.step for record in seen if isinstance(record, EvalRecord)] == [3]


@pytest.mark.nightly
def test_plans_count_what_tells_documents_apart() -> None:
    model = small_model("opt")
    graphs = graphs_of(model, packed=packed_by(model))
    costs = ModelWork(model, graphs, DType.FP32).costs([TOKENS] * 4, TOKENS, DType.FP32)
    plain = graphs_of(model)
    assert costs.beside_bytes >= TOKENS  # a byte for each pair of tokens
    assert not ModelWork(model, plain, DType.FP32).costs([TOKENS], TOKENS, DType.FP32).beside_bytes


@pytest.mark.nightly
def test_masks_of_past_steps_are_not_kept() -> None:
    model = small_model("mistral")
    graphs = graphs_of(model, packed=packed_by(model))
    work = ModelWork(model, graphs, DType.FP32)
    found = []
    for cut in range(1, TOKENS):
        ids, positions = documents(cut)
        calls = layer_calls(model, ids, positions=positions)
        work.layers([Embedded(calls[0].x, [call.extras for call in calls])])
        # not isinstance, which asks what a weak reference points at, and that may be gone
        found.append(sum(type(one) is StageArray for one in gc.get_objects()))
    assert found[-1] <= found[2]


@pytest.mark.parametrize(("family", "tied"), [("opt", True), ("llama", True), ("llama", False)])
def test_devices_do_not_embed_separate_documents(
    family: str, monkeypatch: pytest.MonkeyPatch, *, tied: bool
) -> None:
    """The server is slow. In the first batch, no sequence has two documents."""
    notes: list[str] = []
    monkeypatch.setattr(test_staged, "PS", PsCompute(1e3, 0.0))
    model = small_model(family, tie_word_embeddings=tied)
    packed = packed_by(model)
    with emulated(2, seed=1) as fleet:
        optimizer = Optimizer(model, UpdateRule(OptimizerKind.SGD), clip=1.0, in_backward=False)
        found = staged(model, fleet, graphs=graphs_of(model, packed=packed), note=notes.append)
        found.keep_on_devices(optimizer, head=None)
        for cut in (0, 5):
            ids, positions = documents(cut)
            batch = Rows(ids, ids, mask_for(packed, positions), positions)
            optimizer.step_whole(1e-3, partial(found.gradients, batch))
        assert found.work.resident_head == (not tied)
        assert not any("differently than before" in note for note in notes)
        found.sync()
