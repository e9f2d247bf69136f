"""Graphs through WebGPU, on a GPU in software, against ONNX Runtime on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cleave.arrays import DType
from cleave.machine import webgpu_session
from cleave.machine.graph_choice import open_on_cpu, open_on_webgpu
from cleave.machine.graph_run import FetchRun, GraphRun, Kept, StoredGraph, fetch, run_graph
from cleave.machine.graph_session import GraphError, GraphSession
from cleave.machine.graph_trials import LARGEST_ERROR, accuracy
from cleave.machine.onnx_graph import ArrayType, Node, written
from cleave.machine.webgpu_session import WebgpuArray, WebgpuSession
from tests.graphs.models import graphs_of, small_model
from tests.machine.swiftshader import environment
from tests.machine.test_torch_session import _feed, assert_arrays_stay_between_runs, stored

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(environment() is None, reason="SwiftShader is not installed"),
    pytest.mark.skipif(not webgpu_session.installed(), reason="the extra gpu is not installed"),
]


@pytest.fixture(autouse=True, scope="module")
def _gpu_in_software() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (environment() or {}).items():
            patch.setenv(name, value)
        yield


def test_it_computes_exactly() -> None:
    assert accuracy(WebgpuSession).error < LARGEST_ERROR


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_layers_and_the_loss_are_those_of_the_cpu(family: str) -> None:
    """Gradients through ReLU may differ in single elements, so errors are compared by norm."""
    graphs = graphs_of(small_model(family))
    layer = graphs.layers[0]
    assert graphs.loss is not None
    for model in (layer.forward, layer.backward, layer.from_activations, graphs.loss.graph):
        mine, theirs = WebgpuSession(model), GraphSession(model, 1)
        assert dict(mine.inputs) == dict(theirs.inputs)
        assert mine.outputs == theirs.outputs
        feed = _feed(model)
        found, wanted = mine.run(feed), theirs.run(feed)
        for name, array in wanted.items():
            assert found[name].shape == array.shape
            off = np.linalg.norm(found[name] - array)
            assert off <= 1e-5 * np.linalg.norm(array) + 1e-6, name


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
def test_arrays_stay_on_the_gpu_between_runs(dtype: DType) -> None:
    assert_arrays_stay_between_runs(WebgpuSession, open_on_webgpu, WebgpuArray, dtype)


@pytest.mark.parametrize(
    ("first", "then"), [(open_on_webgpu, open_on_cpu), (open_on_cpu, open_on_webgpu)]
)
def test_another_runner_takes_what_one_has_computed(first: Any, then: Any) -> None:
    """As when the GPU cannot run one of a stage's graphs."""
    three = ArrayType(["batch", 3])
    model = written([Node("Neg", ["x"], ["y"])], {"x": three}, {"y": three})
    made, again = Kept(12), Kept(12)
    x = stored(np.array([[1, 2, 3]], np.float32))
    run_graph(GraphRun(1, StoredGraph(model, 0), [x], [made], 0), first)
    run_graph(GraphRun(2, StoredGraph(model, 0), [made], [again], 0), then)
    found = np.frombuffer(fetch(FetchRun(3, again, 0, 1, 3, DType.FP32)), np.float32)
    np.testing.assert_array_equal(found, [1, 2, 3])


def test_a_failed_run_says_why() -> None:
    shapes = {"x": ArrayType(["batch", 3]), "w": ArrayType([3])}
    model = written([Node("Mul", ["x", "w"], ["y"])], shapes, {"y": shapes["x"]})
    session = WebgpuSession(model)
    with pytest.raises(GraphError, match="the graph also needs w"):
        session.run({"x": np.ones((1, 3), np.float32)})
    with pytest.raises(GraphError, match="the graph cannot be run: "):
        session.run({"x": np.ones((1, 3), np.float32), "w": np.ones(2, np.float32)})
