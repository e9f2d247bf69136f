"""A browser and coded arrays: the very same losses, fewer bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from playwright.sync_api import Browser

import cleave
from cleave.arrays import DType
from cleave.graphs.graph_cache import GraphCache
from cleave.graphs.model_graphs import model_graphs
from cleave.planner.stages.model import PsCompute
from cleave.scheduler.counters import Traffic
from cleave.training.stages.stage_work import ModelWork
from cleave.training.stages.staged import StagedModel
from cleave.workload.build import build_model
from cleave.workload.registry import find_model
from tests.graphs.models import trained
from tests.training.test_staged import EvenStages, rows
from tests.web.test_join import forced, join, pages_of_program, visit

# Tests of the client alone have the vectors of compressed arrays.
pytestmark = [pytest.mark.usefixtures("pages"), pytest.mark.nightly]

STEPS = 2
SEQ = 16


def test_losses_by_stages_are_the_same_to_the_bit(browser: Browser) -> None:
    """By the same plan: where the loss is computed changes rounding."""
    spec = find_model("opt-nano")
    torch.manual_seed(3)
    batches = [torch.randint(3, spec.vocabulary, (4, SEQ)) for _ in range(STEPS)]

    def found(coding: str) -> tuple[list[float], Traffic]:
        model = build_model(spec, seed=0).train()
        work = ModelWork(model, model_graphs(model, SEQ, GraphCache.of_user()), DType.FP32)
        with (
            cleave.serve(stages_on="any", coding=coding, pages=pages_of_program) as listening,
            visit(browser) as page,
        ):
            join(page, forced(listening.page_url, "wasm"))
            runtime = listening.fleet.runtime
            staged = StagedModel(work, runtime, EvenStages(loss=True), PsCompute(1e11, 0.0))

            def gradients(ids: torch.Tensor) -> Any:
                return staged.gradients(rows(ids))

            losses = trained(model, gradients, batches, clip=1.0)
            staged.close()
            return losses, runtime.counters().saved

    (plain, nothing), (coded, saved) = found("off"), found("on")
    assert coded == plain
    assert (nothing.down.total, nothing.up.total) == (0, 0)
    assert saved.down.weights > 0
    assert saved.up.gradients > 0
