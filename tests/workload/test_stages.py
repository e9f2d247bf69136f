"""The sizes of layers for a step by stages."""

from __future__ import annotations

import pytest

from cleave.workload.registry import find_model
from cleave.workload.stages import Adapters, StageSizes


def test_flops_of_a_frozen_head_are_those_of_its_input_gradient() -> None:
    spec = find_model("opt-nano")
    full, adapted = StageSizes(spec, 8), StageSizes(spec, 8, adapters=Adapters(2))
    assert full.loss_flops == 6 * spec.vocabulary * spec.width
    assert adapted.loss_flops == 4 * spec.vocabulary * spec.width


def test_a_projected_embedding_is_in_the_head() -> None:
    spec = find_model("opt-350m")
    head = {one.name: (one.rows, one.columns) for one in StageSizes(spec, 8).head}
    assert head == {"project_out.weight": (512, 1024), "lm_head.weight": (50272, 512)}


@pytest.mark.parametrize("name", ["opt-nano", "llama-nano", "opt-350m", "llama2-70b"])
def test_layers_and_head_have_the_parameters_of_the_model(name: str) -> None:
    spec = find_model(name)
    sizes = StageSizes(spec, 8)
    held = spec.layers * sum(one.size for one in sizes.layer)
    held += sum(one.size for one in sizes.head)
    opt = name.startswith("opt")
    outside = (spec.max_positions + 2) * spec.width if opt else 0
    outside += spec.vocabulary * spec.width if not spec.tied_head else 0
    outside += spec.embedding_width * spec.width if spec.embedding_width != spec.width else 0
    assert held + outside == spec.parameters == sizes.trained_parameters


def test_adapters_alone_are_trained() -> None:
    spec = find_model("llama-nano")
    few, every = (
        StageSizes(spec, 8, adapters=Adapters(2, targets))
        for targets in (("q_proj", "v_proj", "down_proj"), ())
    )
    sides = 64 + 64, 64 + 32, 176 + 64  # of queries, of values, and down
    assert few.trained_parameters == 2 * 2 * sum(sides)
    others = 64 + 32, 64 + 64, 64 + 176, 64 + 176  # of keys, of outputs, gate and up
    assert every.trained_parameters == 2 * 2 * sum((*sides, *others))


def test_the_server_keeps_what_the_optimizer_needs_of_what_is_trained() -> None:
    spec = find_model("opt-nano")
    full, adapted = StageSizes(spec, 8), StageSizes(spec, 8, adapters=Adapters(2))
    assert full.state_bytes == 16 * spec.parameters
    assert adapted.state_bytes == 4 * spec.parameters + 16 * adapted.trained_parameters
