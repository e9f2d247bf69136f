"""Layers on a browser's GPU, in software here: all of them, as exactly as on the processor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from playwright.sync_api import Browser, Page

from cleave.graphs.graph_cache import GraphCache
from cleave.graphs.model_graphs import ModelGraphs, model_graphs
from tests.graphs.models import small_model
from tests.web.browser import serving

TOKENS = 12
SAMPLES = 3
ROUNDING = 1e-5  # of the largest element, between two orders of summing
SMALL_BYTES = 2**16  # uniforms of shaders, and the arrays of a micro-batch
TYPES = {
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.INT64: "int64",
    onnx.TensorProto.BOOL: "bool",
    onnx.TensorProto.UINT8: "uint8",
}

pytestmark = pytest.mark.nightly  # the GPU is emulated, and takes most of a minute


@pytest.fixture(scope="module")
def page(browser: Browser, lab: Path) -> Iterator[Page]:
    with serving(lab) as url:
        page = browser.new_page()
        page.goto(url)
        page.wait_for_function("'lab' in globalThis")
        yield page
        page.close()


def graphs_of(family: str, **changed: int) -> ModelGraphs:
    return model_graphs(small_model(family, **changed).train(), TOKENS, GraphCache.of_user())


def types_of(model: bytes) -> dict[str, str]:
    graph = onnx.load_model_from_string(model).graph
    return {one.name: TYPES[one.type.tensor_type.elem_type] for one in graph.input}


def outcome(page: Page, lab: Path, model: bytes) -> dict[str, float | str]:
    """What became of a graph on the GPU alone."""
    path = lab / "graph.onnx"
    path.write_bytes(model)
    try:
        found: dict[str, float | str] = page.evaluate(
            "([file, types, samples]) => lab.gpuGraph(file, types, samples)",
            [path.name, types_of(model), SAMPLES],
        )
        return found
    finally:
        path.unlink()


def test_the_gpu_passes_the_self_test_alone(page: Page) -> None:
    assert 0 < page.evaluate("lab.gpuSelfTest()") < 2e-5


def test_a_layer_is_computed_by_the_gpu_alone(page: Page, lab: Path) -> None:
    """OPT's is run there by the test of training by stages; `benchmarks.web_graphs` has both."""
    layer = graphs_of("llama").layers[0]
    for model in (layer.forward, layer.backward, layer.from_activations):
        found = outcome(page, lab, model)
        assert "apart" in found, found
        assert float(found["apart"]) < ROUNDING


def test_arrays_stay_on_the_gpu_between_runs(page: Page, lab: Path) -> None:
    """Parameters are uploaded once. Activations and sums do not leave the GPU until the fetch."""
    layer = graphs_of("llama", intermediate_size=2048).layers[0]
    models = {"forward.onnx": layer.forward, "backward.onnx": layer.from_activations}
    for name, model in models.items():
        (lab / name).write_bytes(model)
    types = {name: of for model in models.values() for name, of in types_of(model).items()}
    found: dict[str, Any] = page.evaluate(
        "([files, types, samples]) => lab.gpuTraining(files, types, samples)",
        [list(models), types, SAMPLES],
    )
    assert {"y", "dx", f"sum:{layer.trainable[0]}"} <= set(found["apart"])
    assert max(found["apart"].values()) < ROUNDING, found
    first, second = found["uploaded_bytes"]
    assert first >= found["parameter_bytes"]
    assert second <= first - found["parameter_bytes"] + SMALL_BYTES
    assert max(found["downloaded_bytes"]) < found["parameter_bytes"] / 4, found
    before, after = found["kept"]
    assert before > len(layer.parameters)
    assert after == 0


def test_a_loss_needs_the_processor_and_is_refused(page: Page, lab: Path) -> None:
    loss = graphs_of("opt").loss
    assert loss is not None
    assert "does not do this graph" in str(outcome(page, lab, loss.graph))
