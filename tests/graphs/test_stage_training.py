"""Training by stages in one process follows plain PyTorch, for several families of models."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch

from cleave.graphs.graph_cache import GraphCache
from cleave.graphs.model_graphs import ModelGraphs, model_graphs
from tests.graphs.models import (
    VOCABULARY,
    StagesInProcess,
    plain_gradients,
    small_model,
    trained,
    with_lora,
)

pytestmark = pytest.mark.slow
TOKENS = 12


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> GraphCache:
    return GraphCache(Path(tmp_path_factory.mktemp("graphs")))


def batches(count: int, samples: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(3)
    return [torch.randint(1, VOCABULARY, (samples, TOKENS)) for _ in range(count)]


@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_ten_steps_have_the_losses_of_plain_training(family: str, cache: GraphCache) -> None:
    model = small_model(family)
    for clip in (None, 1.0):
        plain, ours = copy.deepcopy(model), copy.deepcopy(model)
        graphs = model_graphs(ours, TOKENS, cache)  # the second time from the cache
        stages = StagesInProcess(ours, graphs, twice=clip is not None)
        expected = trained(plain, partial(plain_gradients, plain), batches(10), clip=clip)
        found = trained(ours, stages.gradients, batches(10), clip=clip)
        assert found == pytest.approx(expected, rel=1e-4)


def test_adapters_alone_are_trained(cache: GraphCache) -> None:
    plain = with_lora(small_model("llama"))
    ours = copy.deepcopy(plain)
    graphs = model_graphs(ours, TOKENS, cache)
    assert all("lora" in name for kind in graphs.layers for name in kind.trainable)
    assert graphs.loss.trainable == ()
    found = trained(ours, StagesInProcess(ours, graphs).gradients, batches(10), clip=1.0)
    expected = trained(plain, partial(plain_gradients, plain), batches(10), clip=1.0)
    assert found == pytest.approx(expected, rel=1e-4)


def _check_gradients(model: torch.nn.Module, graphs: ModelGraphs, mask: torch.Tensor) -> None:
    """Within 1e-5 of the largest gradient of each layer."""
    (ids,) = batches(1)
    stages = StagesInProcess(model, graphs)
    found_loss = stages.gradients(ids, mask)
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    assert plain_gradients(model, ids, mask) == pytest.approx(found_loss, rel=1e-5)
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-5 * largest)


def test_padding_is_masked_as_in_the_model(cache: GraphCache) -> None:
    """Also for samples of the batch that have none."""
    model = small_model("qwen3")
    mask = torch.ones(3, TOKENS, dtype=torch.long)
    mask[0, 5:] = 0
    mask[2, 9:] = 0
    _check_gradients(model, model_graphs(model, TOKENS, cache, padded=True), mask)
