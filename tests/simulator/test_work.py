"""FLOPs and memory of a step against counts made by hand and published ones."""

from __future__ import annotations

import pytest

from cleave.workload.registry import MODELS, find_model
from simulator.work import edge_parameters, layer_work, train_flops


def test_flops_of_gpt_layers_are_the_published_count() -> None:
    # Narayanan et al. (2021, arXiv 2104.04473, section 5.1) with recomputation:
    # 96 B s l h^2 (1 + s / (6 h) + V / (16 l h)); three quarters of the layers' without it, and
    # the head's 6 B s h V is not recomputed there.
    spec, batch, seq = find_model("opt-13b"), 128, 1024
    h, layers, vocabulary = spec.width, spec.layers, spec.vocabulary
    published = 72 * batch * seq * layers * h**2 * (1 + seq / (6 * h)) + (
        6 * batch * seq * h * vocabulary
    )
    assert train_flops(spec, batch, seq) == pytest.approx(published, rel=1e-12)


def test_six_flops_per_parameter_is_near_but_not_it() -> None:
    spec = find_model("opt-175b")
    per_token = train_flops(spec, 1, 1024) / 1024
    assert per_token == pytest.approx(6 * spec.parameters, rel=0.03)
    assert per_token != pytest.approx(6 * spec.parameters, rel=0.001)


@pytest.mark.parametrize("name", MODELS)
def test_layers_and_edges_are_all_parameters(name: str) -> None:
    spec = MODELS[name]
    layer = layer_work(spec, 128, 2)
    total = spec.layers * layer.parameters + edge_parameters(spec)
    assert total == pytest.approx(spec.parameters, rel=1e-12)


def test_kept_activations_are_korthikantis_without_dropout_masks() -> None:
    # 34 s b h bytes for a layer, less two masks of one byte each: 32 s b h.
    spec = find_model("opt-13b")
    assert layer_work(spec, 1024, 2).kept_bytes == 32 * 1024 * spec.width
