"""What a trained model is used for: its loss on a text, answers to questions, a text's end."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typer.testing import CliRunner

from cleave.errors import UsageError
from cleave.training.evaluation import Question, answer, perplexity, read_questions
from cleave.training.export import export_run
from cleave.training.generation import continued
from cleave.training.run_folder import RunFolder
from cleave.training.tokenizer import TextTokenizer, default_tokenizer
from cleave.training.trained import TrainedModel, open_trained
from cleave_cli.main import app
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
    assert "".join(continued(opened, "def step(", 12)).rstrip("\ufffd") == wanted.rstrip("\ufffd")


def test_a_seed_decides_what_is_drawn(run: RunFolder) -> None:
    opened = open_trained(run.path)
    one, same, other, likeliest = (
        "".join(continued(opened, "def", 8, temperature=t, top_p=p, seed=seed))
        for t, p, seed in ((2.0, 1.0, 1), (2.0, 1.0, 1), (2.0, 1.0, 2), (2.0, 1e-9, 3))
    )
    assert one == same
    assert one != other
    assert likeliest == "".join(continued(opened, "def", 8))
    with pytest.raises(UsageError, match="but the model takes"):
        list(continued(opened, "def", 10**6))


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
    path.write_text('1 + 1?,1,2,3,4,B\n"2 + 2, is?",3,2,1,4,D\n3 + 3?,0,6,1,2,B\n')
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
    with pytest.raises(UsageError, match=r"line 2 of .* is no question: it has 5 columns"):
        read_questions(path)
    for letter in ("", "AB", "E"):
        path.write_text(f"1 + 1?,1,2,3,4,{letter}\n")
        with pytest.raises(UsageError, match=f"line 1 of .* ends in '{letter}'"):
            read_questions(path)
    for command, said in (
        (["eval", str(run.path)], "give either --data with a text, or --choices"),
        (["eval", str(run.path), "--data", str(tmp_path / "no.txt")], "no file or folder"),
        (["eval", str(tmp_path), "--choices", str(path)], "is no question"),
        (["generate", str(run.path), "--prompt", "x", "--top-p", "0"], "--top-p is 0"),
        (["generate", str(tmp_path), "--prompt", "x", "--step", "3"], "--step goes with a run"),
    ):
        done = CliRunner().invoke(app, command)
        assert isinstance(done.exception, UsageError)
        assert said in str(done.exception)


def test_the_command_goes_on_with_a_text(run: RunFolder) -> None:
    command = ["generate", str(run.path), "--prompt", "def step(", "--tokens", "4"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    expected = "def step(" + "".join(continued(open_trained(run.path), "def step(", 4))
    assert done.stdout == expected + "\n"
