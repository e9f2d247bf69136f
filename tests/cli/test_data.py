"""`cleave data show` prints the sequences that training uses, with what it does not learn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cleave.errors import UsageError
from cleave.training.data.batches import IGNORED, START, Batch, BatchLoader
from cleave.training.loop.context import TrainContext
from cleave.training.loop.inputs import prepare
from cleave.training.loop.job import JobSpec
from cleave_cli.main import app
from tests.training.runs import save_model, write_chats

pytestmark = pytest.mark.slow

CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tmp_path_factory.mktemp("chat") / "model")
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    write_chats(path, 60)
    return path


def show(*options: str | Path) -> Any:
    return CliRunner().invoke(app, ["data", "show", *map(str, options)], catch_exceptions=False)


def first_batch(job: JobSpec) -> Batch:
    corpus = prepare(job, TrainContext(None, lambda record: None)).corpus
    separate = job.packing == "separate"
    return BatchLoader(
        corpus.train, batch=job.batch, seq=job.seq, seed=job.seed, separate=separate
    ).next_batch()


@pytest.mark.parametrize("packing", ["joined", "separate"])
@pytest.mark.parametrize("held_out", [False, True])
def test_they_are_the_first_sequences_of_the_training(
    model: Path, chats: Path, packing: str, held_out: bool
) -> None:
    more: dict[str, Any] = {"eval_data": str(chats), "eval_every": 1} if held_out else {}
    job = JobSpec(str(model), str(chats), batch=2, seq=40, packing=packing, seed=3, **more)
    batch = first_batch(job)
    told = ("--eval-data", chats) if held_out else ()
    done = show(
        "--model", model, "--data", chats, "--seq", "40", "--seed", "3", "--packing", packing,
        "--examples", "2", "--json", *told,
    )  # fmt: skip
    found = json.loads(done.stdout)["examples"]
    assert [each["ids"] for each in found] == batch.ids.tolist()
    learned = torch.tensor([each["learned"] for each in found])
    assert not learned[:, 0].any()
    assert torch.equal(learned[:, 1:], batch.labels[:, :-1] != IGNORED)


def test_sequences_that_cut_a_conversation_are_counted(model: Path, chats: Path) -> None:
    """The share is that of the sequences whose first token is not a document's first."""
    job = JobSpec(str(model), str(chats), seq=40, packing="separate")
    tokens = prepare(job, TrainContext(None, lambda record: None)).corpus.train
    firsts = tokens[: (len(tokens) - 1) // 40 * 40 : 40]
    cut = sum((~t if t < 0 else t) < START for t in firsts.tolist()) / len(firsts)
    assert 0 < cut < 1
    options = ("--model", model, "--data", chats, "--seq", "40", "--packing", "separate")
    assert json.loads(show(*options, "--json").stdout)["cut"] == pytest.approx(cut)
    words = " ".join(show(*options).stdout.split())
    assert f"{cut:.0%} of the sequences begin within a document or conversation" in words


def test_text_that_is_not_learned_is_marked(model: Path, chats: Path) -> None:
    done = show("--model", model, "--data", chats, "--seq", "200", "--examples", "1")
    marked, learned, deep = "", "", False
    _, _, text = done.stdout.partition("learned\n")
    for character in text.partition("\n\n")[0]:
        if character in "«»":
            deep = character == "«"
        elif deep:
            marked += character
        else:
            learned += character
    assert "<|user|>What is" in marked
    assert "It is" not in marked
    assert "It is" in learned
    assert "é.<|endoftext|>" in learned
    assert "user" not in learned
    assert "example 1: 200 tokens, " in done.stdout


def test_settings_of_a_file_are_those_of_the_training(
    model: Path, chats: Path, tmp_path: Path
) -> None:
    """The options of the command line take precedence, and settings of other things do not matter.

    Settings of a cluster and of adapters are among these.
    """
    config = tmp_path / "job.toml"
    config.write_text(
        f"model = {str(model)!r}\ndata = {str(chats)!r}\nseq = 40\nlora = 'r=4'\nsteps = 5\n"
        "[cluster]\nservers = 2\n"
    )
    done = show("--config", config, "--seed", "1", "--json")
    assert "error" not in done.stderr
    expected = first_batch(JobSpec(str(model), str(chats), batch=3, seq=40, seed=1))
    assert [each["ids"] for each in json.loads(done.stdout)["examples"]] == expected.ids.tolist()


def test_what_training_would_refuse_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a")
    for options, text in (
        ((), "--model is missing"),
        (("--model", model, "--data", tmp_path / "short.txt"), "need 129 each"),
        (("--model", model, "--data", tmp_path / "none.txt"), "no file or folder"),
        (("--model", "opt-nano", "--seq", "999"), "--seq"),
    ):
        with pytest.raises(UsageError, match=text):
            show(*options)
