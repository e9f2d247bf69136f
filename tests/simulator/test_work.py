"""FLOPs and memory of a step against counts made by hand and published ones."""

from __future__ import annotations

import numpy as np
import pytest

from cleave.workload.registry import MODELS, find_model
from simulator.data_parallel import DataParallel
from simulator.method import Conditions
from simulator.work import (
    LayerWork,
    all_reduce_s,
    dealt,
    edge_parameters,
    layer_work,
    stage_need,
    train_flops,
)
from tests.simulator.conditions import alike


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


LAYER = LayerWork(parameters=10, forward_flops=1, boundary_bytes=3, kept_bytes=100)


def test_samples_are_whole_and_end_soonest() -> None:
    assert dealt(10, np.array([1.0, 1.0, 3.0])).tolist() == [2, 2, 6]
    assert dealt(1, np.array([1.0, 2.0])).tolist() == [0, 1]
    assert dealt(8, np.ones(3)).sum() == 8
    assert dealt(8, np.ones(3)).max() == 3


def test_activations_are_recomputed_only_where_that_makes_them_fit() -> None:
    # States 2 x 160; everything kept: 4 x 2 x 100; else the inputs 4 x 2 x 3 and one layer's 100.
    assert stage_need(LAYER, 2, 4, offered_bytes=1120).memory_bytes == 1120
    assert not stage_need(LAYER, 2, 4, offered_bytes=1120).recompute
    less = stage_need(LAYER, 2, 4, offered_bytes=1119)
    assert (less.memory_bytes, less.recompute) == (444, True)
    neither = stage_need(LAYER, 2, 4, offered_bytes=443)
    assert (neither.memory_bytes, neither.recompute) == (444, False)


def test_a_ring_moves_each_part_twice_around() -> None:
    # 4 members, 8 bytes, 2 bytes/s: 6 steps of 2 bytes, 1 s each, and their latency.
    assert all_reduce_s(8, 4, 2, 0.5) == pytest.approx(6 * 1.5)
    assert all_reduce_s(8, 1, 2, 0.5) == 0


def test_data_parallel_by_hand() -> None:
    spec = find_model("opt-125m")
    conditions = Conditions(spec, 4, 512, alike(4, memory=1e12))
    (outcome,) = DataParallel().outcomes(conditions)
    compute_s = train_flops(spec, 4, 512) / outcome.devices_used / 6e12
    n = outcome.devices_used
    ring_s = 2 * (n - 1) / n * 2 * spec.parameters / 7.5e6
    assert outcome.step_s == pytest.approx(compute_s + ring_s)
    assert outcome.fits
    (outcome,) = DataParallel().outcomes(Conditions(find_model("opt-13b"), 4, 512, alike(4)))
    assert not outcome.fits
    assert "too little memory" in outcome.misfit
