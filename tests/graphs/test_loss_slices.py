"""The loss in slices by vocabulary: together they are the loss in one graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cleave import graph_names as names
from cleave.arrays import Array
from cleave.errors import LayerGraphError
from cleave.graphs.calls import layer_calls
from cleave.graphs.loss_graph import IGNORED, combined, export_loss, export_slice, rows_of_head
from cleave.machine.graph_session import GraphSession
from cleave.planner.stages.model import HeadSlice
from tests.graphs.models import VOCABULARY, WIDTH, small_model, with_lora
from tests.training.runs import nightly

pytestmark = pytest.mark.slow

TOKENS = 13
IDS = torch.arange(22).reshape(2, 11)


def run(graph: GraphSession, feed: dict[str, Any]) -> dict[str, Array]:
    return graph.run({name: feed[name] for name in graph.inputs})


@pytest.mark.parametrize("family", [nightly("opt"), nightly("gemma2"), nightly("phi"), "lora"])
def test_slices_are_the_loss(family: str) -> None:
    model = with_lora(small_model("llama")) if family == "lora" else small_model(family)
    calls = layer_calls(model, IDS)
    whole = export_loss(model, calls)
    count = 2
    cut = export_slice(model, calls, whole, VOCABULARY // count)
    assert (cut.parameters, cut.trainable) == (whole.parameters, whole.trainable)
    held = {n: t.detach().numpy() for n, t in model.state_dict(keep_vars=True).items()}
    torch.manual_seed(4)
    targets = torch.randint(VOCABULARY, (TOKENS,))
    targets[3] = IGNORED
    given = {names.X: torch.randn(TOKENS, 1, WIDTH).numpy(), names.TARGETS: targets.numpy()}
    given[names.SCALE] = np.array(1 / (TOKENS - 1), np.float32)

    def feed(rows: slice) -> dict[str, Any]:
        mine = {n: held[n][rows] if n in cut.cut else held[n] for n in cut.parameters}
        zeros = {names.total(n): np.zeros_like(mine[n]) for n in cut.trainable}
        first = {names.FIRST: np.array([rows.start or 0])}
        return {**given, **{names.parameter(n): t for n, t in mine.items()}, **zeros, **first}

    expected = run(GraphSession(whole.graph), feed(slice(None)))
    forward, backward = GraphSession(cut.forward), GraphSession(cut.backward)
    slices = [slice(*HeadSlice(number, count).rows(VOCABULARY)) for number in range(count)]
    made = [run(forward, feed(rows)) for rows in slices]
    found = [each[names.Y] for each in made]
    loss, total = combined(found, targets.numpy(), float(given[names.SCALE]))
    assert loss == pytest.approx(float(expected[names.LOSS][0]), rel=1e-6)
    back = [
        run(backward, {**feed(rows), names.DY: total, names.LOGITS: each[names.LOGITS]})
        for rows, each in zip(slices, made, strict=True)
    ]
    dx = sum(part[names.DX] for part in back)
    assert np.abs(dx - expected[names.DX]).max() < 1e-6 * np.abs(expected[names.DX]).max()
    for name in cut.trainable:
        parts = [part[names.new_total(name)] for part in back]
        together = np.concatenate(parts) if name in cut.cut else sum(parts)
        wanted = expected[names.new_total(name)]
        assert np.abs(together - wanted).max() < 3e-6 * np.abs(wanted).max(), name


def test_a_head_that_is_no_linear_is_not_cut() -> None:
    model: Any = small_model("llama")
    model.lm_head = nn.Sequential(model.lm_head)
    calls = layer_calls(model, IDS)
    whole = export_loss(model, calls)
    assert rows_of_head(model, whole) == ()
    with pytest.raises(LayerGraphError, match="LM head"):
        export_slice(model, calls, whole, 5)
