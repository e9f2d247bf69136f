import json
import shutil
import socket
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaForCausalLM, OPTForCausalLM

from cleave.errors import UsageError
from cleave.workload.build import (
    build_model,
    enable_checkpointing,
    hf_config,
    load_folder,
    resolve_model,
)
from cleave.workload.registry import MODELS, Family, ModelSpec, find_model
from cleave.workload.step import linear_shapes

CLASSES = {Family.OPT: OPTForCausalLM, Family.LLAMA: LlamaForCausalLM}
NANOS = ["opt-nano", "llama-nano"]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("tried to go online")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, 512, (2, 16), generator=generator)


def small(name: str, **changes: Any) -> ModelSpec:
    return replace(find_model(name), **changes)


# OPT-350m's layout: norms after the sub-layers, and an embedding narrower than the model.
ALL_LAYOUTS = [
    *(find_model(name) for name in NANOS),
    small("opt-nano", pre_norm=False, embedding_width=32),
    small("llama-nano", tied_head=True),
]


@pytest.mark.slow
@pytest.mark.parametrize("spec", [*MODELS.values(), *ALL_LAYOUTS], ids=lambda s: s.name)
def test_sizes_agree_with_transformers(spec: ModelSpec) -> None:
    with torch.device("meta"):
        model = CLASSES[spec.family](hf_config(spec))
    assert sum(p.numel() for p in model.parameters()) == spec.parameters
    linears: Counter[tuple[str, int, int]] = Counter()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            linears[name.rsplit(".", 1)[-1], module.in_features, module.out_features] += 1
    assert linears == {(s.name, s.inputs, s.outputs): s.count for s in linear_shapes(spec)}


@pytest.mark.parametrize("spec", ALL_LAYOUTS, ids=range(len(ALL_LAYOUTS)))
def test_built_model_computes_what_an_ordinary_one_does(
    spec: ModelSpec, tokens: torch.Tensor
) -> None:
    model = build_model(spec, seed=7)
    ordinary = CLASSES[spec.family](hf_config(spec))
    ordinary.load_state_dict(model.state_dict())
    assert {n: b.tolist() for n, b in model.named_buffers()} == {
        n: b.tolist() for n, b in ordinary.named_buffers()
    }
    assert torch.equal(model(tokens).logits, ordinary.train()(tokens).logits)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.training
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == spec.tied_head


def test_weights_follow_the_models_own_rule() -> None:
    model = build_model(find_model("opt-nano"), seed=0)
    for key, p in model.named_parameters():
        if key.endswith("bias"):
            assert torch.all(p == 0), key
        elif "norm" in key:
            assert torch.all(p == 1), key
        else:
            assert p.std().item() == pytest.approx(0.02, rel=0.1), key
    embedding = model.get_input_embeddings()
    assert torch.all(embedding.weight[embedding.padding_idx] == 0)


def test_equal_seeds_give_bit_equal_weights() -> None:
    spec = find_model("llama-nano")
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = build_model(spec, seed=5).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    again, other = (build_model(spec, seed=seed).state_dict() for seed in (5, 6))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", NANOS)
def test_checkpointing_changes_memory_and_not_gradients(name: str, tokens: torch.Tensor) -> None:
    def gradients(checkpointing: bool) -> tuple[dict[str, torch.Tensor], int]:
        model = build_model(find_model(name), seed=3)
        if checkpointing:
            enable_checkpointing(model)
        saved = 0

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal saved
            saved += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, saved

    plain, plain_bytes = gradients(False)
    checkpointed, checkpointed_bytes = gradients(True)
    assert plain.keys() == checkpointed.keys()
    assert all(torch.equal(plain[key], checkpointed[key]) for key in plain)
    assert checkpointed_bytes < plain_bytes / 2


# Folders


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name in NANOS:
        folders[name] = tmp_path_factory.mktemp("models") / name
        build_model(find_model(name), seed=11).save_pretrained(folders[name])
    return folders


@pytest.fixture
def folder(saved: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of a Llama folder, to be broken."""
    return shutil.copytree(saved["llama-nano"], tmp_path / "copy")


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("name", NANOS)
def test_folder_round_trip(name: str, saved: dict[str, Path]) -> None:
    model, spec = load_folder(saved[name])
    assert spec == find_model(name)
    assert resolve_model(str(saved[name])).spec == spec
    expected = build_model(spec, seed=11).state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == spec.tied_head
    assert model.training


def test_sharded_bf16_folder_loads_as_fp32(tmp_path: Path) -> None:
    model = build_model(find_model("opt-nano"), seed=2).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    loaded, _ = load_folder(tmp_path)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    for key, value in loaded.state_dict().items():
        assert torch.equal(value, model.state_dict()[key].float())

    next(tmp_path.glob("model-00002*")).unlink()
    with pytest.raises(UsageError, match="lacks 1 of its weight files, such as model-00002"):
        load_folder(tmp_path)


def test_weights_outlive_their_files(folder: Path, tokens: torch.Tensor) -> None:
    model, _ = load_folder(folder)
    before = model(tokens).logits
    weights = folder / "model.safetensors"
    with weights.open("r+b") as file:
        file.write(b"\0" * weights.stat().st_size)
    assert torch.equal(model(tokens).logits, before)


def test_dropout_is_off(saved: dict[str, Path], tmp_path: Path) -> None:
    assert hf_config(find_model("opt-nano")).dropout == 0.0
    folder = shutil.copytree(saved["opt-nano"], tmp_path / "copy")
    edit_config(folder, dropout=0.1, attention_dropout=0.2, layerdrop=0.3)
    config = load_folder(folder)[0].config
    assert (config.dropout, config.attention_dropout, config.layerdrop) == (0.0, 0.0, 0.0)


def test_other_causal_models_load_with_an_exact_count(tmp_path: Path) -> None:
    config = GPT2Config(n_embd=32, n_head=2, n_layer=2, vocab_size=64, n_positions=32)
    original = AutoModelForCausalLM.from_config(config)
    original.save_pretrained(tmp_path)
    model, spec = load_folder(tmp_path)
    assert spec.parameters == sum(p.numel() for p in original.parameters())
    assert (spec.layers, spec.width, spec.heads) == (2, 32, 2)
    ids = torch.arange(8)[None]
    assert torch.equal(model(ids).logits, original.eval()(ids).logits)


def test_folder_errors_say_what_is_wrong(folder: Path) -> None:
    def message() -> str:
        with pytest.raises(UsageError) as caught:
            load_folder(folder)
        text = str(caught.value)
        assert repr(str(folder))[1:-1] in text
        assert "\n" not in text
        return text

    config, weights = folder / "config.json", folder / "model.safetensors"
    good_config, good_weights = config.read_bytes(), weights.read_bytes()

    edit_config(folder, vocab_size=100)
    assert "[512, 64]" in message()
    edit_config(folder, vocab_size=512, num_hidden_layers=3)
    assert "lacks 9 of the weights" in message()
    edit_config(folder, num_hidden_layers=1)
    assert "has 9 weights" in message()
    edit_config(folder, num_hidden_layers=2, architectures=["BertForMaskedLM"])
    assert "BertForMaskedLM, not a causal language model" in message()
    edit_config(folder, architectures=["LlamaForCausalLM"], rms_norm_eps="small")
    assert "rms_norm_eps" in message()
    edit_config(folder, rms_norm_eps=1e-5, quantization_config={"quant_method": "gptq"})
    assert "quantized" in message()
    config.write_bytes(good_config)

    weights.write_bytes(good_weights[:1000])
    assert "damaged" in message()
    weights.unlink()
    assert "no model.safetensors" in message()
    config.write_text("{")
    assert "cannot be read" in message()
    config.unlink()
    assert "no config.json" in message()
    shutil.rmtree(folder)
    assert "no folder" in message()


def test_a_folder_wins_over_a_name_only_if_it_is_meant(
    saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "opt-tiny").mkdir()
    assert resolve_model("opt-tiny").folder is None
    with pytest.raises(UsageError, match=r"no config\.json"):
        resolve_model("./opt-tiny")
    shutil.copy(saved["llama-nano"] / "config.json", tmp_path / "opt-tiny")
    source = resolve_model("opt-tiny")
    assert source.folder == Path("opt-tiny")
    assert source.spec.family is Family.LLAMA
    assert resolve_model("facebook/opt-125m").spec is MODELS["opt-125m"]
    with pytest.raises(UsageError, match=r"\./nowhere"):
        resolve_model("./nowhere")
