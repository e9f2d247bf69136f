"""A run's model as a folder that transformers loads: the same logits, the same tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cleave.errors import CleaveError, UsageError
from cleave.training.data.tokenizer import default_tokenizer
from cleave.training.loop.checkpoint import load_latest
from cleave.training.loop.context import TrainContext
from cleave.training.loop.job import JobSpec
from cleave.training.loop.run_folder import CHECKPOINTS, RunFolder
from cleave.training.loop.start import train
from cleave.training.results import export
from cleave.training.results.export import export_run
from cleave.training.results.trained import open_trained
from cleave_cli.main import app
from tests.graphs.models import small_model
from tests.training.runs import nightly, save_tokenizer
from tests.training.test_checkpoint import full_disk

pytestmark = pytest.mark.slow


def trained(tmp_path: Path, corpus_file: Path, model: str, steps: int = 2) -> RunFolder:
    run = RunFolder.create(tmp_path / "runs", "mine")
    job = JobSpec(
        model, str(corpus_file), steps, batch=2, seq=16, method="local", checkpoint_every=1
    )
    train(job, run, TrainContext(None, lambda record: None))
    return run


def from_pretrained(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, report = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, output_loading_info=True
    )
    assert not any(report.values()), report
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


def check_weights(model: Any, run: RunFolder) -> None:
    checkpoint = load_latest(run.path / CHECKPOINTS)
    assert checkpoint is not None
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, checkpoint.tensors[f"model.{name}"]), name


def check_others_may_have(folder: Path, private: Path, *, but: str = "") -> None:
    """All files are as readable as any, and none says where on this machine something is."""
    plain = folder.parent / "plain"
    plain.touch()
    for path in filter(Path.is_file, folder.rglob("*")):
        assert path.stat().st_mode == plain.stat().st_mode, path
        if path.suffix in (".json", ".md", ".jinja") and path.name != but:
            assert str(private) not in path.read_text(), path


def test_a_model_of_the_registry(tmp_path: Path, corpus_file: Path) -> None:
    """Its head is its embedding; and the tokenizer is the built-in one."""
    run = trained(tmp_path, corpus_file, "opt-nano")
    done = CliRunner().invoke(app, ["export", str(run.path), "--json"], catch_exceptions=False)
    said = json.loads(done.stdout)
    folder = run.path / "export"
    assert (said["folder"], said["step"], said["dtype"]) == (str(folder), 2, "fp32")
    model, tokenizer = from_pretrained(folder)
    check_weights(model, run)
    assert said["parameters"] == sum(p.numel() for p in model.parameters())
    assert model.config.use_cache
    text = "def step(a, b):\n    return a\n"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    found = model.generate(torch.tensor([ids]), max_new_tokens=4, do_sample=False)
    assert found.shape == (1, len(ids) + 4)
    card = (folder / "README.md").read_text()
    assert f"| data | {corpus_file.name} |" in card
    assert "library_name: transformers" in card
    check_others_may_have(folder, tmp_path)


def test_a_folders_model_though_the_folder_is_gone(tmp_path: Path, corpus_file: Path) -> None:
    source = tmp_path / "source"
    small: Any = small_model("llama", vocab_size=300)
    small.save_pretrained(source)
    default_tokenizer(vocab_size=300).library_tokenizer.save(str(source / "tokenizer.json"))
    told = {"eos_token": "<|endoftext|>", "name_or_path": str(source), "unk_token": "/home"}
    (source / "tokenizer_config.json").write_text(json.dumps(told))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "_name_or_path": str(source)}))
    for name in ("chat_template.jinja", "additional_chat_templates/tools.jinja"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("{{ messages[0]['content'] }}")
    run = trained(tmp_path, corpus_file, str(source))
    assert (run.path / "model" / "additional_chat_templates" / "tools.jinja").is_file()
    shutil.rmtree(source)
    done = export_run(run, tmp_path / "out", step=1, dtype="bf16", facts={"devices": "none"})
    assert (done.step, done.dtype) == (1, "bf16")
    model, tokenizer = from_pretrained(done.folder)
    assert tokenizer.chat_template.keys() == {"default", "tools"}
    assert model.dtype is torch.bfloat16
    assert model.config.num_key_value_heads == small.config.num_key_value_heads
    assert "| devices | none |" in (done.folder / "README.md").read_text()
    assert (done.folder / "tokenizer.json").is_file()
    assert json.loads((done.folder / "tokenizer_config.json").read_text())["unk_token"] == "/home"
    assert "| model | source |" in (done.folder / "README.md").read_text()
    check_others_may_have(done.folder, tmp_path)


def saved(folder: Path, model: Any, **config: Any) -> Path:
    """Save a model with the built-in tokenizer, and change what its config says."""
    save_tokenizer(folder)
    model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder


def all_agree(run: RunFolder, source: Path, into: Path) -> None:
    """Assert that a run, its export and transformers have the same logits, not the source's."""
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        before = from_pretrained(source)[0](input_ids=ids).logits
        ours = open_trained(run.path).model(input_ids=ids).logits
        export_run(run, into)
        theirs = from_pretrained(into)[0](input_ids=ids).logits
        again = open_trained(into).model(input_ids=ids).logits
    assert torch.equal(ours, theirs)
    assert torch.equal(again, theirs)
    assert not torch.allclose(before, theirs, atol=1e-3)


@pytest.mark.parametrize(
    "said", [{"tie_word_embeddings": True}, nightly({"tie_encoder_decoder": True})]
)
def test_a_head_that_the_files_have_is_not_tied_whatever_the_config_says(
    tmp_path: Path, corpus_file: Path, said: dict[str, Any]
) -> None:
    """As in transformers, which keeps both where the files have two that differ."""
    model: Any = small_model("llama", vocab_size=300, tie_word_embeddings=False)
    source = saved(tmp_path / "source", model, **said)
    run = trained(tmp_path, corpus_file, str(source))
    checkpoint = load_latest(run.path / CHECKPOINTS)
    assert checkpoint is not None
    head = checkpoint.tensors["model.lm_head.weight"]
    assert not torch.equal(head, checkpoint.tensors["model.model.embed_tokens.weight"])
    all_agree(run, source, tmp_path / "out")
    if "tie_word_embeddings" in said:
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert config["tie_word_embeddings"] is False


def test_a_head_that_the_files_have_twice_is_tied(tmp_path: Path, corpus_file: Path) -> None:
    model: Any = small_model("llama", vocab_size=300, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    source = saved(tmp_path / "source", model, tie_word_embeddings=True)
    run = trained(tmp_path, corpus_file, str(source))
    all_agree(run, source, tmp_path / "out")
    assert from_pretrained(tmp_path / "out")[0].config.tie_word_embeddings


def test_a_head_that_the_files_lack_is_refused(tmp_path: Path, corpus_file: Path) -> None:
    """Transformers draws a random one and warns."""
    model: Any = small_model("llama", vocab_size=300, tie_word_embeddings=True)
    source = saved(tmp_path / "source", model, tie_word_embeddings=False)
    with pytest.raises(UsageError, match=r"lacks 1 of .*such as lm_head\.weight"):
        trained(tmp_path, corpus_file, str(source))
    with pytest.raises(UsageError, match=r"lacks 1 of .*such as lm_head\.weight"):
        open_trained(source)


def test_what_is_not_trained_is_in_an_export_as_well(tmp_path: Path, corpus_file: Path) -> None:
    """The biases of DeepSeek-V3's routers are buffers: no parameters, but in its files."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(1)
    model = DeepseekV3ForCausalLM(
        DeepseekV3Config(
            vocab_size=300, hidden_size=32, intermediate_size=48, moe_intermediate_size=16,
            num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4,
            num_experts_per_tok=1, n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=8,
            kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
            max_position_embeddings=64,
        )
    )  # fmt: skip
    biases = {n: b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
    assert len(biases) == 1
    for bias in biases.values():
        bias.copy_(torch.tensor([0.0, 9.0, 0.0, 0.0]))  # all tokens go to the second expert
    source = saved(tmp_path / "source", model)
    run = trained(tmp_path, corpus_file, str(source))
    all_agree(run, source, tmp_path / "out")
    model, _ = from_pretrained(tmp_path / "out")
    assert all(torch.equal(model.get_buffer(name), bias) for name, bias in biases.items())


def test_what_cannot_be_exported_says_why(tmp_path: Path, corpus_file: Path) -> None:
    run = trained(tmp_path, corpus_file, "opt-nano", steps=1)
    with pytest.raises(UsageError, match="no checkpoint of step 7; it has checkpoints of 1"):
        export_run(run, tmp_path / "out", step=7)
    with pytest.raises(UsageError, match="--dtype is 'int3'"):
        export_run(run, tmp_path / "out", dtype="int3")
    with full_disk(50_000), pytest.raises(CleaveError, match="free some space there"):
        export_run(run, tmp_path / "out")
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "thesis.tex").touch()
    with pytest.raises(UsageError, match="already exists"):
        export_run(run, taken)
    shutil.rmtree(run.path / CHECKPOINTS)
    with pytest.raises(UsageError, match="has no checkpoint, because the run has not ended"):
        export_run(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert [path.name for path in taken.iterdir()] == ["thesis.tex"]


def test_cards_have_no_private_paths() -> None:
    for given, shown in (
        ("/home/alice/texts/", "texts"),
        ("../alice/texts", "texts"),
        ("C:\\Users\\alice\\diary.txt", "diary.txt"),
        ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M"),
        ("the source of Python's standard library", "the source of Python's standard library"),
    ):
        assert export._public(given) == shown
