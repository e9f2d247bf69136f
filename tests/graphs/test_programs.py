"""A graph is translated as it was traced, unless tracing it again would see more."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from onnxruntime import InferenceSession
from onnxscript.rewriter._rewrite_rule import RewriteRule
from torch import Tensor, nn

from cleave.errors import LayerGraphError
from cleave.graphs import tracing
from cleave.graphs.calls import layer_calls
from cleave.graphs.joint_graph import Part
from cleave.graphs.layer_parts import LayerPart, export_layer
from cleave.graphs.programs import CoreAtenProgram
from cleave.graphs.tracing import TracedGraph, core_aten, to_onnx
from tests.graphs.models import small_model

pytestmark = pytest.mark.slow

X = torch.ones(2, 4)


def traced(function: Callable[[Tensor], Tensor]) -> TracedGraph:
    return TracedGraph(lambda given: (function(given["x"]),), {"x": X}, ("y",), {"x"})


def part(function: Callable[[Tensor], Tensor]) -> Part:
    graph, inputs = core_aten(traced(function))
    return Part(graph, inputs, {"x": 0}, ("y",))


def outputs(model: bytes, samples: int) -> np.ndarray:
    x = np.arange(4 * samples, dtype=np.float32).reshape(samples, 4)
    found: np.ndarray = InferenceSession(model).run(None, {"x": x})[0]
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_layers_are_not_traced_again(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(part: Part) -> torch.export.ExportedProgram:
        raise AssertionError("traced again")

    monkeypatch.setattr(tracing, "traced_again", refuse)
    call = layer_calls(small_model(family), torch.arange(20).reshape(2, 10))[0]
    assert export_layer(LayerPart.whole(call, 0)).activations


@pytest.mark.parametrize("samples", [1, 5])
def test_it_computes_what_tracing_again_makes_of_it(
    samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def function(x: Tensor) -> Tensor:
        return (x.reshape(-1, 2) / 3).softmax(0).reshape(x.shape[0], -1) * x.shape[0]

    known = to_onnx(traced(function))
    monkeypatch.setattr(CoreAtenProgram, "of", lambda part: None)
    again = to_onnx(traced(function))
    np.testing.assert_array_equal(outputs(known, samples), outputs(again, samples))


def test_what_depends_on_the_size_of_the_batch_is_refused() -> None:
    def function(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] < 100 else x * 3

    with pytest.raises(LayerGraphError, match="depends on the size of the batch"):
        to_onnx(traced(function))


def test_what_a_device_would_not_run_is_refused() -> None:
    with pytest.raises(LayerGraphError, match=r"what memory its graph needs: .* the operation Det"):
        to_onnx(traced(lambda x: torch.linalg.det(x[:, :1, None]) * x[:, 0]))


def test_tensors_of_its_own_become_constants() -> None:
    held = torch.arange(4.0)

    def function(x: Tensor) -> Tensor:
        return x + held * torch.tensor([1.0, 1.0, 1.0, 1.0])

    assert CoreAtenProgram.of(part(function)) is not None
    np.testing.assert_array_equal(
        outputs(to_onnx(traced(function)), 2)[0], 2 * np.arange(4, dtype=np.float32)
    )


def test_a_tensor_that_is_changed_in_place_is_seen_as_changed() -> None:
    def function(x: Tensor) -> Tensor:
        made = x * 1
        seen = made.view(-1)
        made.add_(1)
        return made + seen.view(made.shape)

    np.testing.assert_array_equal(outputs(to_onnx(traced(function)), 1), [[2, 4, 6, 8]])


def test_an_input_that_is_changed_in_place_is_refused() -> None:
    with pytest.raises(LayerGraphError, match="it changes its input tensors"):
        to_onnx(traced(lambda x: x.add_(1) + x))


def test_translations_of_a_users_own_exports_are_left_alone() -> None:
    """Ours keep torch's table of translations: nobody else's may end up in it."""
    identity = to_onnx(traced(lambda x: x.relu()))
    program = torch.export.export(nn.ReLU(), (-X,))

    def doubled(x: Any) -> Any:
        from onnxscript import opset18

        return opset18.Add(x, x)

    theirs = torch.onnx.export(
        program, custom_translation_table={torch.ops.aten.relu.default: doubled}, verbose=False
    )
    assert theirs is not None
    session = InferenceSession(theirs.model_proto.SerializeToString())
    found = session.run(None, {session.get_inputs()[0].name: -X.numpy()})
    assert (found[0] == -2 * X.numpy()).all()
    assert to_onnx(traced(lambda x: x.relu())) == identity


@pytest.mark.nightly
def test_graphs_are_the_same_where_the_exporter_repeats_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def function(x: Tensor) -> Tensor:
        heads = x.reshape(-1, 1, 2, 2).transpose(1, 2).flatten(-2).transpose(0, 1).transpose(0, 1)
        places = torch.arange(2)[:, None] * 2.5
        return (heads.softmax(-1) + places).squeeze(-2).reshape(x.shape[0], -1)[:, 1:] @ x[0, 1:]

    ours = to_onnx(traced(function))
    tried: list[str] = []
    made = RewriteRule.match

    def match(rule: Any, *given: Any, **how: Any) -> Any:
        tried.append(str(rule))
        return made(rule, *given, **how)

    monkeypatch.setattr(RewriteRule, "match", match)
    assert to_onnx(traced(function)) == ours
    few = len(tried)
    monkeypatch.setattr(tracing, "without_repetition", nullcontext)
    assert to_onnx(traced(function)) == ours
    assert len(tried) - few > 10 * few
