"""What a trained model is used for: its loss on a text, answers to questions, a text's end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

from cleave.errors import UsageError
from cleave.training.data.tokenizer import TextTokenizer, default_tokenizer
from cleave.training.loop.records import Record, TextRecord
from cleave.training.loop.run_folder import RunFolder
from cleave.training.results.export import export_run
from cleave.training.results.trained import TrainedModel, open_trained
from cleave.training.results.uses import Generation, Question, answer, perplexity, read_questions
from cleave_cli.main import app
from tests.graphs.models import small_model
from tests.training.test_export import trained

pytestmark = pytest.mark.slow

TEXT = "def step(a, b):\n    return a * 3 + b - 1\n" * 5


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus_file: Path) -> RunFolder:
    return trained(tmp_path_factory.mktemp("used"), corpus_file, "opt-nano", steps=3)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "held-out.txt"
    path.write_text(TEXT)
    return path


def test_a_texts_loss_is_that_of_all_its_tokens(run: RunFolder, text_file: Path) -> None:
    """Each but the first is predicted once, from those before it in its window."""
    opened = open_trained(run.path)
    found = perplexity(opened, str(text_file), seq=10, batch=2)
    (ids,) = opened.tokenizer.encode_batch([TEXT])
    tokens = torch.tensor([*ids.tolist(), opened.tokenizer.eos_id])
    assert found.tokens == len(tokens) - 1
    model: Any = opened.model
    total = 0.0
    for start in range(0, len(tokens) - 1, 10):
        window = tokens[start : start + 11]
        logits = model(input_ids=window[None, :-1]).logits[0]
        total += float(F.cross_entropy(logits, window[1:], reduction="sum").detach())
    assert found.loss == pytest.approx(total / found.tokens, rel=1e-5)
    assert found.perplexity == pytest.approx(2.718281828**found.loss)


def test_a_run_its_export_and_a_fleet_agree(
    run: RunFolder, text_file: Path, tmp_path: Path
) -> None:
    export_run(run, tmp_path / "out")

    def loss(*arguments: str) -> float:
        command = ["eval", *arguments, "--data", str(text_file), "--seq", "16", "--json"]
        done = CliRunner().invoke(app, command, catch_exceptions=False)
        return float(json.loads(done.stdout)["loss"])

    expected = loss(str(run.path))
    assert loss(str(tmp_path / "out")) == expected
    assert loss(str(run.path), "--devices", "2") == pytest.approx(expected, rel=1e-5)
    assert loss(str(run.path), "--step", "2") != expected


def added(trained: TrainedModel, text: str, tokens: int, **more: Any) -> list[str]:
    """Return the pieces that a model adds to a text."""
    pieces: list[str] = []

    def report(record: Record) -> None:
        assert isinstance(record, TextRecord)
        pieces.append(record.text)

    Generation(text, tokens=tokens, **more).run(trained, report, lambda: False)
    assert pieces[0] == text
    return pieces[1:]


def test_a_text_goes_on_as_transformers_says(run: RunFolder) -> None:
    opened = open_trained(run.path)
    model: Any = opened.model
    (ids,) = opened.tokenizer.encode_batch(["def step("])
    expected = model.generate(
        torch.tensor([ids.tolist()]), max_new_tokens=12, do_sample=False,
        eos_token_id=opened.tokenizer.eos_id, pad_token_id=opened.tokenizer.eos_id,
    )[0, len(ids) :].tolist()  # fmt: skip
    ends = [token for token in expected if token != opened.tokenizer.eos_id]
    wanted = opened.tokenizer.decode(ends)
    assert "".join(added(opened, "def step(", 12)).rstrip("\ufffd") == wanted.rstrip("\ufffd")


def test_a_seed_decides_what_is_drawn(run: RunFolder) -> None:
    opened = open_trained(run.path)
    one, same, other, likeliest = (
        "".join(added(opened, "def", 8, temperature=t, top_p=p, seed=seed))
        for t, p, seed in ((2.0, 1.0, 1), (2.0, 1.0, 1), (2.0, 1.0, 2), (2.0, 1e-9, 3))
    )
    assert one == same
    assert one != other
    assert likeliest == "".join(added(opened, "def", 8))
    with pytest.raises(UsageError, match="but the context is"):
        added(opened, "def", 10**6)


def pieces_of_sentences() -> Tokenizer:
    """Return a tokenizer as Llama 2 has it: spaces before words, bytes, and `<s>` in the front."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    ids = {token: number for number, token in enumerate(["<unk>", "<s>", "</s>"])}
    for token in (*(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"aceht", *"\u2581t"):
        ids.setdefault(token, len(ids))
    merges = [("\u2581", "t"), ("\u2581t", "h"), ("\u2581th", "e"), ("\u2581", "c"), ("a", "t")]
    for one, other in [*merges, ("\u2581c", "at")]:
        ids.setdefault(one + other, len(ids))
    made.model = models.BPE(
        vocab=ids, merges=[*merges, ("\u2581c", "at")], unk_token="<unk>", byte_fallback=True
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    steps = decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), *steps])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return made


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a Llama of large random weights, and a tokenizer as Llama 2 has it."""
    folder = tmp_path_factory.mktemp("sentences") / "model"
    made = pieces_of_sentences()
    model: Any = small_model("llama", vocab_size=made.get_vocab_size(), initializer_range=0.4)
    model.save_pretrained(folder)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    wrapped.save_pretrained(folder)
    return folder


GREEDY = {"do_sample": False}
DRAWN = {"do_sample": True, "temperature": 1.3, "top_p": 0.9}


@pytest.mark.parametrize("how", [GREEDY, DRAWN])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 1, "do_sample": True, "temperature": 0.6, "top_k": 5},
    ],
)
def test_words_and_settings_are_those_of_transformers(
    sentences: Path, tmp_path: Path, config: dict[str, Any], how: dict[str, Any]
) -> None:
    """The space of the first word, `<s>` before the text, what the generation config asks for."""
    folder = shutil.copytree(sentences, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **config}))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    given = tokenizer("the cat", return_tensors="pt")
    assert given.input_ids[0, 0] == 1
    torch.manual_seed(7)
    ids = model.generate(**given, max_new_tokens=9, **how)[0]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    asked = {"temperature": 1.3, "top_p": 0.9, "seed": 7} if how is DRAWN else {}
    assert "the cat" + "".join(added(open_trained(folder), "the cat", 9, **asked)) == text


@pytest.mark.parametrize(
    ("ends", "config_ends", "expected"),
    [([2, 5], 9, ""), (5, 9, ""), (9, 5, None), (None, 5, ""), (None, None, None)],
)
def test_generation_ends_where_it_does_in_transformers(
    sentences: Path, tmp_path: Path, ends: Any, config_ends: Any, expected: str | None
) -> None:
    """At any of the tokens that the generation config names, or else the model's config.

    Args:
        ends: of generation_config.json; None for no such file.
        config_ends: of config.json.
        expected: what a model adds that says token 5 again and again; None for all of it.
    """
    folder = shutil.copytree(sentences, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": config_ends}))
    (folder / "generation_config.json").unlink()
    if ends is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    opened = open_trained(folder)
    model: Any = opened.model
    always(model, 5)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    always(theirs, 5)
    ids = theirs.generate(torch.tensor([[1, 4]]), max_new_tokens=3, do_sample=False)[0, 2:]
    assert len(ids) == (3 if expected is None else 1)
    found = "".join(added(opened, "the", 3))
    assert found == ("\ufffd\x02\x02\x02"[1:] if expected is None else expected)


def always(model: Any, token: int) -> None:
    """Make a model say one token, whatever it is given."""
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight.fill_(0.5)
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight.zero_()
        model.lm_head.weight[token] = 1.0


def test_half_a_character_comes_with_its_other_half(sentences: Path) -> None:
    opened = open_trained(sentences)
    model: Any = opened.model
    always(model, 3 + 0xC3)  # the first byte of two
    pieces = added(opened, "the", 3)
    assert pieces == ["\ufffd\ufffd\ufffd"]  # transformers shows them, too; nothing is kept back
    assert added(opened, "the", 1) == ["\ufffd"]
    always(model, 3 + ord("a"))  # a later byte that fits no character would take it back
    assert added(opened, "the", 3) == ["aaa"]
    always(model, 3 + 256 + 1)  # "a", after special tokens, bytes and the sign of a space
    heard: list[Record] = []

    def stop() -> bool:
        return len(heard) > 2  # a listener stops a generation

    Generation("the", tokens=9).run(opened, heard.append, stop)
    assert heard == [TextRecord("the"), TextRecord("a"), TextRecord("a")]


def test_a_text_of_more_tokens_than_the_model_has_is_one_sentence(
    sentences: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(sentences, tmp_path / "model")
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_special_tokens(["<pad>"])
    made.save(str(folder / "tokenizer.json"))
    opened = open_trained(folder)
    assert added(opened, "the", 2)
    with pytest.raises(UsageError, match=r"with token (\d+), .* has only \1"):
        added(opened, "the<pad>", 2)
    (tmp_path / "text.txt").write_text("the <pad> cat")
    with pytest.raises(UsageError, match="encodes this text with token"):
        perplexity(opened, str(tmp_path / "text.txt"), seq=8, batch=1)


def test_a_texts_loss_is_that_of_transformers_with_its_first_token(
    sentences: Path, tmp_path: Path
) -> None:
    path = tmp_path / "text.txt"
    path.write_text("the cat the tea that cat")
    opened = open_trained(sentences)
    found = perplexity(opened, str(path), seq=64, batch=1)
    model: Any = opened.model
    ids = AutoTokenizer.from_pretrained(sentences)(path.read_text(), return_tensors="pt").input_ids
    ids = torch.cat([ids, torch.tensor([[2]])], dim=1)
    with torch.no_grad():
        expected = float(model(input_ids=ids, labels=ids).loss)
    assert found.loss == pytest.approx(expected, rel=1e-5)
    assert found.tokens == ids.shape[1] - 1


class Partial(nn.Module):
    """Takes one letter for likeliest, whatever is asked; keeps what it was asked."""

    def __init__(self, token: int, vocabulary: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(max_position_embeddings=4096)
        self.asked: list[Tensor] = []
        self._logits = F.one_hot(torch.tensor(token), vocabulary).float()

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        self.asked.append(input_ids[0])
        return SimpleNamespace(logits=self._logits.expand(*input_ids.shape, -1))


@pytest.fixture
def always_b() -> tuple[TrainedModel, Partial, TextTokenizer]:
    tokenizer = default_tokenizer(vocab_size=300)
    (ids,) = tokenizer.encode_batch(["Answer: B"])
    model = Partial(int(ids[-1]), tokenizer.vocab_size)
    return TrainedModel(model, tokenizer, "always B"), model, tokenizer


def test_answers_are_the_likeliest_letters(
    tmp_path: Path, always_b: tuple[TrainedModel, Partial, TextTokenizer]
) -> None:
    path = tmp_path / "arithmetic_test.csv"
    path.write_text('\ufeff1 + 1?,1,2,3,4,B\n"2 + 2, is?",3,2,1,4,D\n3 + 3?,0,6,1,2,B\n')
    questions = read_questions(path)
    assert questions[1] == Question("2 + 2, is?", ("3", "2", "1", "4"), 3)
    used, model, tokenizer = always_b
    found = answer(used, questions, questions[:1], subject="arithmetic")
    assert (found.right, found.questions, found.cut) == (2, 3, 0)
    assert tokenizer.decode(model.asked[1]) == (
        "The following are multiple choice questions (with answers) about arithmetic.\n\n"
        "1 + 1?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer: B\n\n"
        "2 + 2, is?\nA. 3\nB. 2\nC. 1\nD. 4\nAnswer:"
    )
    model.config.max_position_embeddings = 8
    cut = answer(used, questions)
    assert cut.cut == 3
    assert all(len(ids) == 8 for ids in model.asked[-3:])


def test_what_cannot_be_used_says_why(run: RunFolder, tmp_path: Path) -> None:
    path = tmp_path / "questions.csv"
    path.write_text("1 + 1?,1,2,3,4,B\n2 + 2?,1,2,3,4\n")
    with pytest.raises(UsageError, match=r"line 2 of .* is not a question: it has 5 columns"):
        read_questions(path)
    for letter in ("", "AB", "E"):
        path.write_text(f"1 + 1?,1,2,3,4,{letter}\n")
        with pytest.raises(UsageError, match=f"line 1 of .* ends in '{letter}'"):
            read_questions(path)
    for command, said in (
        (["eval", str(run.path)], "pass either --data with a text, or --choices"),
        (["eval", str(run.path), "--data", str(tmp_path / "no.txt")], "no file or folder"),
        (["eval", str(tmp_path), "--choices", str(path)], "is not a question"),
        (
            ["generate", str(run.path), "--prompt", "x", "--top-p", "0"],
            "--top-p must be more than 0 and at most 1, not 0",
        ),
        (
            ["generate", str(run.path), "--prompt", "x", "--seed", "-1"],
            "--seed must be between 0 and 2**63 - 1, not -1",
        ),
        (
            ["generate", str(run.path), "--prompt", "x", "--tokens", str(10**30)],
            "--tokens must be between 0 and 2**63 - 1, not 1000",
        ),
        (["generate", str(run.path), "--prompt", "x", "--devices", str(10**30)], "too many to em"),
        (["generate", str(tmp_path), "--prompt", "x", "--step", "3"], "--step needs a run"),
    ):
        done = CliRunner().invoke(app, command)
        assert isinstance(done.exception, UsageError)
        assert said in str(done.exception)


def test_odd_bytes_of_a_prompt_end_nothing(run: RunFolder) -> None:
    """A shell hands over bytes that are no UTF-8 as halves of surrogate pairs."""
    command = ["generate", str(run.path), "--tokens", "4"]
    done = CliRunner().invoke(app, [*command, "--prompt", "def step("], catch_exceptions=False)
    expected = "".join(added(open_trained(run.path), "def step(", 4))
    assert done.stdout == f"def step({expected}\n"
    done = CliRunner().invoke(app, [*command, "--prompt", "def \udcff("], catch_exceptions=False)
    assert done.stdout.startswith("def ?(")
    done = CliRunner().invoke(app, command, input=b"def \xff(")
    assert isinstance(done.exception, UsageError)
    assert str(done.exception) == "stdin is not UTF-8 text; convert it"


def test_a_broken_generation_config_is_as_none(run: RunFolder, tmp_path: Path) -> None:
    copied = RunFolder(shutil.copytree(run.path, tmp_path / "copied"))
    (copied.path / "model" / "generation_config.json").write_text("{")
    assert added(open_trained(copied.path), "def", 2) == added(open_trained(run.path), "def", 2)
