"""Frozen weights in 4 or 8 bits: what they become, and what training beside them gives."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import cleave
from cleave.arrays import DType
from cleave.errors import UsageError
from cleave.training.loop.job import JobSpec
from cleave.training.lora.adapters import add_adapters, frozen_digest
from cleave.training.lora.quantized import (
    NORMAL_FLOAT,
    QuantizedLinear,
    dequantize,
    dequantize_all,
    quantize,
    quantize_frozen,
)
from cleave.training.lora.spec import LoraSpec
from cleave.training.results.export import export_run, find_checkpoint
from cleave.training.results.trained import open_trained
from cleave.training.stages.audits import Auditor
from cleave.training.stages.stage_work import ModelWork
from cleave.workload.build import load_folder
from cleave.workload.stages import BLOCK, Adapters, Bits, StageSizes
from tests.graphs.models import TOKENS, graphs_of, plain_gradients, small_model
from tests.training.runs import losses, nightly, save_model
from tests.training.test_lora import SMALL, logits, plain_losses, run_in
from tests.training.test_staged import batches, staged
from tests.training.test_staged import rows as rows_of
from tests.training.test_suspicion import Scaled, activation, fleet_of

WIDE: dict[str, Any] = {"hidden_size": BLOCK, "intermediate_size": 2 * BLOCK, "head_dim": 16}
BITS = pytest.mark.parametrize("bits", list(Bits))


@given(
    st.integers(1, 5), st.integers(1, 3), st.sampled_from(list(Bits)), st.integers(-60, 60),
    st.integers(0, 2**32),
)  # fmt: skip
def test_an_element_is_off_by_half_a_step_at_most(
    rows: int, blocks: int, bits: Bits, exponent: int, seed: int
) -> None:
    made = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, blocks * BLOCK, generator=made) * 2.0**exponent
    codes, scales = quantize(weight, bits)
    assert codes.dtype is torch.uint8
    assert codes.numel() * 8 == weight.numel() * bits
    off = (dequantize(codes, scales) - weight).reshape(rows, blocks, BLOCK).abs().amax(-1)
    values = torch.tensor(NORMAL_FLOAT)
    step = float((values[1:] - values[:-1]).max()) if bits is Bits.FOUR else 1 / 127
    rounded = 2**-8  # of a scale, and so of the largest element
    assert torch.all(off <= (step / 2 + rounded) * 1.01 * scales.float())


@BITS
@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_what_is_quantized_again_stays_the_same(bits: Bits, factor: float) -> None:
    once = dequantize(*quantize(factor * torch.randn(8, 4 * BLOCK), bits))
    assert torch.equal(dequantize(*quantize(once, bits)), once)
    assert once.any() == bool(factor)


def test_four_bits_are_the_nearest_of_the_sixteen_values() -> None:
    weight = torch.linspace(-1, 1, 16 * BLOCK).reshape(16, BLOCK)
    weight[:, 0] = 1  # so that scales are 1
    values = torch.tensor(NORMAL_FLOAT)
    nearest = values[(weight[..., None] - values).abs().argmin(-1)]
    assert torch.equal(dequantize(*quantize(weight, Bits.FOUR)), nearest)


@BITS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_multiplies_by_the_weight_that_it_shows(bits: Bits, dtype: torch.dtype) -> None:
    layer = QuantizedLinear(nn.Linear(2 * BLOCK, 24), bits)
    plain = layer.dequantized()
    x = torch.randn(3, 5, 2 * BLOCK)
    found, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    with torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
        y, wanted = layer(found), plain(expected)
    assert y.dtype is wanted.dtype
    assert torch.allclose(y.float(), wanted.float(), atol=1e-5 if dtype is torch.float32 else 2e-2)
    torch.autograd.backward([y, wanted], [torch.ones_like(y), torch.ones_like(wanted)])
    assert found.grad is not None
    assert expected.grad is not None
    assert torch.allclose(found.grad, expected.grad, atol=1e-5 if dtype is torch.float32 else 0.1)


def test_the_gradient_keeps_codes_and_no_weight() -> None:
    layer = QuantizedLinear(nn.Linear(4 * BLOCK, 4 * BLOCK), Bits.FOUR)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(torch.randn(2, 4 * BLOCK, requires_grad=True))
    assert sum(t.numel() * t.itemsize for t in kept) < 4 * BLOCK * 4 * BLOCK


def test_what_is_trained_whole_and_the_head_are_not_quantized() -> None:
    spec = LoraSpec(4, targets=("q_proj",), save=("up_proj",), bits=4)
    adapted = add_adapters(small_model("llama", **WIDE), spec)
    quantized = {n: m for n, m in adapted.named_modules() if isinstance(m, QuantizedLinear)}
    assert not any("up_proj" in name or "lm_head" in name for name in quantized)
    assert len(quantized) == 2 * 6  # of 7 in each layer
    assert all(p.is_floating_point() for p in adapted.parameters())
    before = frozen_digest(adapted)
    next(iter(quantized.values())).codes[0, 0] ^= 1
    assert frozen_digest(adapted) != before


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_model_without_such_layers_is_refused(family: str) -> None:
    with pytest.raises(UsageError, match=r"bits=4, but no layer of .* can be quantized"):
        add_adapters(small_model(family), LoraSpec(4, bits=4))


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_change_nothing_at_first(dora: bool) -> None:
    spec = LoraSpec(4, targets=("q_proj", "down_proj"), bits=4, dora=dora)
    adapted = add_adapters(small_model("llama", **WIDE), spec).eval()
    ids = torch.arange(16)[None]
    with torch.no_grad():
        found = adapted(input_ids=ids).logits
        with adapted.disable_adapter():
            without = adapted(input_ids=ids).logits
    assert torch.allclose(found, without, atol=1e-6)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"method": "tiles"}, "tiles cannot use quantized weights; use --method stages"),
        ({"journal": True}, "--journal works only with tiles, which cannot use quant"),
        ({"lora": "r=4,bits=5"}, "bits=5; use 4 or 8"),
    ],
)
def test_jobs_that_cannot_be_quantized_are_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        JobSpec("opt-nano", **{"lora": "r=4,bits=4", **changed})


def test_the_report_names_them() -> None:
    with cleave.emulated(2) as fleet:
        model = add_adapters(small_model("llama", **WIDE), LoraSpec(4, bits=4))
        with pytest.warns(UserWarning, match="tiles cannot use quantized weights"):
            report = cleave.offload(model, fleet, method="tiles")
        cleave.restore(model)
    assert "tiles cannot use quantized weights" in str(report)
    assert report.shortfall


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small Llama whose rows are whole blocks, and its tokenizer."""
    return save_model(tmp_path_factory.mktemp("base") / "small", **WIDE)


def job_of(base: Path, corpus: Path, lora: str, **more: Any) -> JobSpec:
    settings = {"method": "local", "steps": 4, "checkpoint_every": 1, "learning_rate": 0.01, **more}
    return JobSpec(str(base), str(corpus), batch=2, seq=TOKENS, lora=lora, **settings)


def adapted_base(base: Path) -> nn.Module:
    """The model in the folder, with adapters as `SMALL` that change what it computes."""
    torch.manual_seed(2)
    model: nn.Module = load_folder(base)[0]
    add_adapters(model, LoraSpec.of(SMALL))
    for name, parameter in model.named_parameters():
        if ".lora_B" in name:
            nn.init.normal_(parameter)
    return model


def quantized_and_back(model: nn.Module, bits: Bits) -> None:
    """Give the linear layers but the head the weights that their codes stand for."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            with torch.no_grad():
                module.weight.copy_(dequantize(*quantize(module.weight, bits)))


# By stages, a shorter test is test_a_model_of_ones_own_is_quantized_and_trained_by_stages.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "method", "dtype", "within"),
    [
        (Bits.FOUR, "local", "fp32", 1e-5),
        (Bits.EIGHT, "local", "bf16", 2e-3),
        nightly(Bits.EIGHT, "stages", "fp32", 1e-5),
        nightly(Bits.FOUR, "stages", "bf16", 2e-3),
    ],
)
def test_losses_are_those_of_peft_beside_the_dequantized_weights(
    tmp_path: Path,
    base: Path,
    corpus_file: Path,
    bits: Bits,
    method: str,
    dtype: str,
    within: float,
) -> None:
    lora = f"{SMALL},bits={int(bits)}"
    job = job_of(
        base, corpus_file, lora, method=method, dtype=dtype, schedule="constant", warmup_steps=0
    )
    with cleave.emulated(2) as fleet:
        found = losses(job, run_in(tmp_path), None if method == "local" else fleet)
    expected = plain_losses(job, lambda model: quantized_and_back(model, bits))
    assert found == pytest.approx(expected, rel=within)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("bits", [Bits.FOUR, Bits.EIGHT])
def test_costs_without_a_model_are_those_of_a_real_one(base: Path, bits: Bits) -> None:
    model, spec = load_folder(base)
    add_adapters(model, LoraSpec.of(f"{SMALL},bits={int(bits)}"))
    sizes = [2 * TOKENS] * 2
    theirs = ModelWork(model, graphs_of(model), DType.BF16).costs(sizes, TOKENS, DType.BF16)
    mine = StageSizes(
        spec, TOKENS, adapters=Adapters(4, ("q_proj", "v_proj", "down_proj"), bits)
    ).costs(sizes)
    for cost, expected in zip(
        [*mine.layers, mine.loss], [*theirs.layers, theirs.loss], strict=True
    ):
        assert cost.frozen_bytes == expected.frozen_bytes
        assert cost.weight_bytes == expected.weight_bytes
        assert cost.dequantized_bytes == expected.dequantized_bytes
        assert cost.largest_bytes == expected.largest_bytes
        assert cost.flops == pytest.approx(expected.flops, rel=0.02)
    assert theirs.layers[0].dequantized_bytes > 0


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("lies", [False, True])
def test_audits_repeat_what_devices_do_beside_quantized_weights(base: Path, lies: bool) -> None:
    model = adapted_base(base)
    cleave.quantize(model, 4)
    auditor = Auditor(100.0, random.Random(1))  # everything
    with fleet_of(*[Scaled(activation, 1.01)] * lies, devices=3) as fleet:
        found = staged(model, fleet, loss=False, auditor=auditor)
        for ids in batches(2):
            found.gradients(rows_of(ids))
    assert auditor.counters.outputs > 0
    assert (auditor.counters.faults > 0) == lies


@pytest.mark.slow
@pytest.mark.parametrize("bits", [Bits.FOUR, nightly(Bits.EIGHT)])
def test_a_model_of_ones_own_is_quantized_and_trained_by_stages(base: Path, bits: Bits) -> None:
    plain = adapted_base(base)
    quantize_frozen(plain, bits)
    dequantize_all(plain)
    own = adapted_base(base)
    cleave.quantize(own, bits)
    (ids,) = batches(1)
    with cleave.emulated(2) as fleet, cleave.offloaded(own, fleet, method="stages"):
        loss = plain_gradients(own, ids)
        assert loss == pytest.approx(plain_gradients(plain, ids), rel=1e-5)
    found, expected = (
        {name: p.grad for name, p in one.named_parameters() if p.grad is not None}
        for one in (own, plain)
    )
    assert found.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-5 * largest)


def test_what_cannot_be_quantized_is_said() -> None:
    model: Any = small_model("llama", **WIDE)
    with pytest.raises(UsageError, match="no layer of LlamaForCausalLM can be quantized"):
        cleave.quantize(model)
    with pytest.raises(UsageError, match="bits is 3; use 4 or 8"):
        cleave.quantize(model, 3)
    with pytest.raises(UsageError, match="takes a torch module, not int"):
        cleave.quantize(4)


def adapted(*, trainable: bool = True) -> Any:
    """A small Llama in `peft`'s wrapper."""
    import peft

    torch.manual_seed(4)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj"], init_lora_weights=False, inference_mode=not trainable
    )
    return peft.get_peft_model(small_model("llama", **WIDE), config)


def test_adapters_are_never_quantized_nor_lost_in_codes() -> None:
    model, (ids,) = adapted(trainable=False), batches(1)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    cleave.quantize(model)
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    assert isinstance(layer.base_layer, QuantizedLinear)
    assert type(layer.lora_A["default"]) is nn.Linear
    with torch.no_grad():
        before = model(input_ids=ids).logits
        for merge in (model.merge_adapter, model.merge_and_unload):
            with pytest.raises(UsageError, match="cannot be merged into quantized weights"):
                merge()
        assert torch.equal(model(input_ids=ids).logits, before)
        dequantize_all(model)
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(input_ids=ids).logits, before, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_what_is_offloaded_is_not_quantized() -> None:
    with cleave.emulated(2) as fleet:
        for method in ("stages", "tiles"):
            model = adapted()
            with (
                cleave.offloaded(model, fleet, method=method),
                pytest.raises(UsageError, match="offloaded; quantize it before"),
            ):
                cleave.quantize(model)


@pytest.mark.slow
@pytest.mark.parametrize("lora", ["r=4,bits=4", nightly("r=4,bits=8,dora,targets=q_proj")])
def test_a_run_goes_on_and_is_exported(
    tmp_path: Path, base: Path, corpus_file: Path, lora: str
) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    job = job_of(base, corpus_file, lora, steps=2)
    whole = losses(job, run_in(tmp_path, "whole"))
    run = run_in(tmp_path)
    first = losses(job_of(base, corpus_file, lora, steps=1), run)
    assert first + losses(job, run, resume=True) == whole
    assert all(".lora_" in n for n in find_checkpoint(run).tensors if n.startswith("model."))

    ours = open_trained(run.path)
    ids = ours.tokenizer.encode_batch(["def step(a, b):"])[0].tolist()
    expected = logits(ours.model, ids)
    export_run(run, tmp_path / "merged", merge=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(logits(merged, ids), expected, atol=1e-4)
    export_run(run, tmp_path / "adapters")
    beside_plain = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapters")
    assert torch.allclose(logits(beside_plain, ids), expected, atol=0.5)
