from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.errors import UsageError
from cleave.gemm import Gemm
from cleave.planner.plan import GemmKind
from cleave.workload.registry import MODELS, ModelSpec, find_model
from cleave.workload.step import (
    linear_shapes,
    siblings_in_order,
    step_flops,
    step_gemms,
)

models = st.sampled_from(list(MODELS.values()))
sizes = st.integers(1, 2048)
lengths = st.integers(1, 256)  # the shortest context of the models


def test_three_gemms_of_one_linear() -> None:
    with pytest.raises(UsageError, match="--seq must be 1 or more, not 0"):
        step_gemms(find_model("opt-nano"), 8, 0)
    spec = find_model("opt-13b")
    assert step_flops(spec, 4, 1024) == pytest.approx(6 * spec.parameters * 4096, rel=0.03)
    gemms = {g.kind: g for g in step_gemms(spec, 2, 1024) if g.name == "fc1"}
    assert {g.count for g in gemms.values()} == {40}
    assert gemms[GemmKind.FORWARD].gemm == Gemm(2048, 20480, 5120)
    assert gemms[GemmKind.INPUT_GRADIENT].gemm == Gemm(2048, 5120, 20480)
    assert gemms[GemmKind.WEIGHT_GRADIENT].gemm == Gemm(20480, 5120, 2048)


def test_fused_siblings_of_grouped_query_attention() -> None:
    shapes = {s.name: s for s in linear_shapes(find_model("llama2-70b"), fused_siblings=True)}
    assert list(shapes) == ["qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"]
    assert shapes["qkv_proj"].outputs == 8192 + 2 * 1024
    assert shapes["gate_up_proj"].outputs == 2 * 28672


def test_devices_hold_the_input_after_a_sibling_of_the_same_shape() -> None:
    held = {(g.name, g.kind): g.held for g in step_gemms(find_model("llama2-70b"), 1, 8)}
    forward, d_weight = GemmKind.FORWARD, GemmKind.WEIGHT_GRADIENT
    assert {key: side for key, side in held.items() if side} == {
        ("v_proj", forward): "a",  # k has the same shape, q has more heads
        ("up_proj", forward): "a",
        ("k_proj", d_weight): "b",  # from the last to the first
        ("gate_proj", d_weight): "b",
    }


@given(models, sizes, lengths)
def test_fusing_changes_the_count_of_gemms_and_not_the_work(
    spec: ModelSpec, batch: int, seq: int
) -> None:
    plain, fused = step_gemms(spec, batch, seq), step_gemms(spec, batch, seq, fused_siblings=True)
    assert len(fused) < len(plain)
    for kind in GemmKind:
        work = [sum(g.flops for g in gemms if g.kind is kind) for gemms in (plain, fused)]
        assert work[0] == work[1]
    assert sum(g.flops for g in fused) == step_flops(spec, batch, seq)


@given(models, sizes, lengths)
def test_each_kind_does_the_same_work(spec: ModelSpec, batch: int, seq: int) -> None:
    work: Counter[GemmKind] = Counter()
    gemms = step_gemms(spec, batch, seq)
    for g in gemms:
        work[g.kind] += g.flops
    assert len(set(work.values())) == 1
    names = [[g.name for g in gemms if g.kind is kind] for kind in GemmKind]
    assert names[0] == names[1][::-1] == names[2][::-1]
    assert step_flops(spec, batch, seq) == work.total()


@given(models)
def test_siblings_in_order_are_all_linears_layer_after_layer(spec: ModelSpec) -> None:
    groups = siblings_in_order(spec)
    counted = Counter((s.name, s.inputs, s.outputs) for group in groups for s in group)
    listed = {(s.name, s.inputs, s.outputs): s.count for s in linear_shapes(spec)}
    assert counted == listed
    assert all(s.count == 1 for group in groups for s in group)
    assert all(len({s.inputs for s in group}) == 1 for group in groups)
    assert groups[-1][-1].name == "lm_head"
    layers = [i for i, group in enumerate(groups) if group[0].name == "q_proj"]
    assert len(layers) == spec.layers
    length = layers[1] - layers[0]
    assert all(groups[i : i + length] == groups[layers[0] :][:length] for i in layers)
