"""Models as GGUF files: transformers reads the same model and the same tokens from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from typer.testing import CliRunner

from cleave.errors import UsageError
from cleave.training.data.tokenizer import default_tokenizer
from cleave.training.loop.run_folder import RunFolder
from cleave.training.results.export import export_run
from cleave.training.results.gguf_file import check_gguf
from cleave.training.results.trained import open_trained
from cleave_cli.main import app
from tests.graphs.models import small_model
from tests.training.runs import nightly, save_tokenizer
from tests.training.test_export import trained
from tests.training.test_trained import pieces_of_sentences

pytestmark = pytest.mark.slow

TEXT = "Hello world, it's 12345 \n\n  def step(a):<|endoftext|> été"
GPT2 = {"n_positions": 1024}  # transformers reads no other number from a file
LLAMA3 = PRETOKENIZE_REGEX.replace(r"\p{N}|", r"\p{N}{1,3}|")
ROPE_3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip


def run_of(tmp_path: Path, corpus_file: Path, family: str, **config: Any) -> RunFolder:
    """Return a run that trained a small model of a family for a step."""
    source = tmp_path / "source"
    model: Any = small_model(family, **{"vocab_size": 300, **config})
    model.save_pretrained(source)
    save_tokenizer(source)
    return trained(tmp_path, corpus_file, str(source), steps=1)


def read(folder: Path) -> tuple[Any, Any]:
    """Return the model and the tokenizer that transformers reads from a GGUF file."""
    source: dict[str, Any] = {"gguf_file": "model.gguf", "local_files_only": True}
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, **source
    )
    assert not report["missing_keys"]
    return model.eval(), AutoTokenizer.from_pretrained(folder, **source)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.arange(3, 40)[None]).logits
    return found


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("gpt2", GPT2),
        nightly("llama", {"num_key_value_heads": 4}),
        nightly("mistral", {"sliding_window": None}),
        nightly("qwen2", {}),
        nightly("qwen3", {"head_dim": 128}),
    ],
)
def test_transformers_reads_the_same_model(
    tmp_path: Path, corpus_file: Path, family: str, config: dict[str, Any]
) -> None:
    run = run_of(tmp_path, corpus_file, family, **config)
    command = ["export", str(run.path), str(tmp_path / "out"), "--gguf"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert "llama-server -m" in done.stdout
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == ["Modelfile", "README.md", "model.gguf"]
    assert (tmp_path / "out" / "Modelfile").read_text() == "FROM ./model.gguf\n"
    model, tokenizer = read(tmp_path / "out")
    ours = open_trained(run.path)
    assert torch.allclose(logits(model), logits(ours.model), atol=1e-5)
    (ids,) = ours.tokenizer.encode_batch([TEXT])
    assert tokenizer(TEXT)["input_ids"] == ids.tolist()
    assert tokenizer.eos_token_id == ours.tokenizer.eos_id


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_matrices_are_narrow_and_vectors_are_not(
    tmp_path: Path, corpus_file: Path, dtype: str
) -> None:
    run = run_of(tmp_path, corpus_file, "gpt2", **GPT2)
    export_run(run, tmp_path / "out", dtype=dtype, gguf=True)
    for tensor in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors:
        vector = len(tensor.shape) == 1 or tensor.name == "position_embd.weight"
        assert tensor.tensor_type.name == ("F32" if vector else dtype.upper().replace("P", ""))
    model, _ = read(tmp_path / "out")
    assert torch.allclose(logits(model), logits(open_trained(run.path).model), atol=2e-2)


def test_the_context_is_not_longer_than_a_sliding_window(tmp_path: Path, corpus_file: Path) -> None:
    """llama.cpp has no such window here: longer texts would be computed wrongly."""
    run = run_of(tmp_path, corpus_file, "mistral", sliding_window=48)
    export_run(run, tmp_path / "out", gguf=True)
    fields = gguf.GGUFReader(tmp_path / "out" / "model.gguf").fields
    assert fields["llama.context_length"].contents() == 48


def test_merged_adapters_and_a_chat_template(tmp_path: Path, corpus_file: Path) -> None:
    from cleave.training.loop.context import TrainContext
    from cleave.training.loop.job import JobSpec
    from cleave.training.loop.start import train

    source = tmp_path / "source"
    model: Any = small_model("llama", vocab_size=300)
    model.save_pretrained(source)
    save_tokenizer(source)
    (source / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    run = RunFolder.create(tmp_path / "runs", "adapted")
    job = JobSpec(str(source), str(corpus_file), 2, batch=2, seq=16, method="local", lora="r=4")
    train(job, run, TrainContext(None, lambda record: None))
    with pytest.raises(UsageError, match="--gguf writes whole models; add --merge"):
        export_run(run, tmp_path / "out", gguf=True)
    export_run(run, tmp_path / "out", gguf=True, merge=True)
    model, tokenizer = read(tmp_path / "out")
    assert torch.allclose(logits(model), logits(open_trained(run.path).model), atol=1e-5)
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}"


def test_a_model_with_new_weights_and_the_built_in_tokenizer(
    tmp_path: Path, corpus_file: Path
) -> None:
    run = trained(tmp_path, corpus_file, "llama-nano", steps=1)
    export_run(run, tmp_path / "out", gguf=True)
    model, tokenizer = read(tmp_path / "out")
    ours = open_trained(run.path)
    assert torch.allclose(logits(model), logits(ours.model), atol=1e-5)
    (ids,) = ours.tokenizer.encode_batch([TEXT])
    assert tokenizer(TEXT)["input_ids"] == ids.tolist()


def vocabulary(folder: Path) -> dict[str, Any]:
    fields = gguf.GGUFReader(folder / "model.gguf").fields
    names = ("model", "pre", "tokens", "scores", "token_type", "bos_token_id", "add_bos_token",
             "add_space_prefix", "unknown_token_id")  # fmt: skip
    keys = {name: f"tokenizer.ggml.{name}" for name in names}
    return {name: fields[key].contents() for name, key in keys.items() if key in fields}


def test_a_sentencepiece_tokenizer(tmp_path: Path, corpus_file: Path) -> None:
    """Its merges become scores; bytes, `<s>` before texts and the first space stay."""
    source = tmp_path / "source"
    made = pieces_of_sentences()
    model: Any = small_model("llama", vocab_size=made.get_vocab_size() + 2)
    model.save_pretrained(source)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    wrapped.save_pretrained(source)
    run = trained(tmp_path, corpus_file, str(source), steps=1)
    export_run(run, tmp_path / "out", gguf=True)
    found = vocabulary(tmp_path / "out")
    assert (found["model"], found["add_bos_token"], found["add_space_prefix"]) == ("llama", 1, 1)
    assert (found["bos_token_id"], found["unknown_token_id"]) == (1, 0)
    types = dict(zip(found["tokens"], found["token_type"], strict=True))
    kinds = {"<unk>": 2, "</s>": 3, "<0x0A>": 6, "cat": None, "\u2581the": 1, "[PAD270]": None}
    for token, kind in kinds.items():
        assert types.get(token) == kind, token
    assert found["token_type"][-2:] == [5, 5]  # the model has two tokens that the tokenizer has not
    scores = dict(zip(found["tokens"], found["scores"], strict=True))
    assert scores["\u2581t"] > scores["\u2581th"] > scores["\u2581the"] > scores["\u2581cat"]
    _, tokenizer = read(tmp_path / "out")
    text = "the cat that ate\ntea"
    assert tokenizer(text)["input_ids"] == wrapped(text)["input_ids"]


def split(*steps: Any) -> Any:
    return pre_tokenizers.Sequence(list(steps))


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


@pytest.mark.parametrize(
    ("how", "name"),
    [
        (split(pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated"), BYTES), "qwen2"),
        (split(pre_tokenizers.Split(Regex(LLAMA3), "isolated"), BYTES), "llama-bpe"),
        (
            split(
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ),
            "smollm",
        ),
        (split(pre_tokenizers.Split(Regex("a|b"), "isolated"), BYTES), None),
        (pre_tokenizers.ByteLevel(add_prefix_space=True), None),
        (None, None),
    ],
)
def test_how_text_is_split_has_a_name(
    tmp_path: Path, corpus_file: Path, how: Any, name: str | None
) -> None:
    run = run_of(tmp_path, corpus_file, "qwen2")
    path = run.path / "model" / "tokenizer.json"
    held: Any = Tokenizer.from_str(default_tokenizer(vocab_size=300).library_tokenizer.to_str())
    held.pre_tokenizer = how
    held.save(str(path))
    if name is None:
        with pytest.raises(UsageError, match="in a way that --gguf does not support"):
            export_run(run, tmp_path / "out", gguf=True)
        assert not (tmp_path / "out").exists()
        return
    export_run(run, tmp_path / "out", gguf=True)
    assert vocabulary(tmp_path / "out")["pre"] == name
    if name != "smollm":  # which transformers does not know
        _, tokenizer = read(tmp_path / "out")
        assert tokenizer(TEXT)["input_ids"] == held.encode(TEXT).ids


def test_the_scaling_of_llama_3(tmp_path: Path, corpus_file: Path) -> None:
    """Slow frequencies are divided by 8, fast ones stay, and those between are in between."""
    run = run_of(tmp_path, corpus_file, "llama", head_dim=64, rope_parameters=ROPE_3)
    export_run(run, tmp_path / "out", gguf=True)
    tensors = gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors
    (factors,) = (tensor.data for tensor in tensors if tensor.name == "rope_freqs.weight")
    assert len(factors) == 32
    assert factors[0] == pytest.approx(1.0)
    assert factors[-1] == pytest.approx(8.0)
    assert sorted(factors) == pytest.approx(factors.tolist())
    assert any(1.1 < factor < 7.9 for factor in factors)


@pytest.mark.parametrize(
    ("family", "config", "text"),
    [
        ("opt", {}, r"llama, mistral, qwen2, qwen3, gpt2, not 'opt'; export without"),
        ("llama", {"hidden_act": "gelu"}, "no llama with the activation 'gelu'"),
        ("gpt2", {"activation_function": "relu"}, "no gpt2 with the activation 'relu'"),
        ("qwen2", {"rope_parameters": ROPE_3}, "no qwen2 with the RoPE scaling 'llama3'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "attention that is scaled by layer"),
    ],
)
def test_what_a_file_cannot_hold_is_refused(family: str, config: Any, text: str) -> None:
    model: Any = small_model(family, **config)
    with pytest.raises(UsageError, match=text):
        check_gguf(model.config)


def test_a_tokenizer_of_another_kind_is_refused(tmp_path: Path, corpus_file: Path) -> None:
    run = run_of(tmp_path, corpus_file, "llama")
    path = run.path / "model" / "tokenizer.json"
    held = json.loads(path.read_text())
    tokens = sorted(held["model"]["vocab"], key=held["model"]["vocab"].get)
    held["model"] = {"type": "Unigram", "unk_id": 0, "vocab": [[token, 0.0] for token in tokens]}
    path.write_text(json.dumps(held))
    with pytest.raises(UsageError, match="of type Unigram, but --gguf supports only BPE"):
        export_run(run, tmp_path / "out", gguf=True)
