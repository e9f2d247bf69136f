"""Evaluate a model: perplexity on a text, and accuracy on multiple-choice questions."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F

from cleave.errors import UsageError
from cleave.training.data.batches import (
    IGNORED,
    begin_of,
    encode_documents,
    end_of,
    ids_of,
    labels_of,
)
from cleave.training.data.documents import read_documents
from cleave.training.results.trained import TrainedModel

LETTERS: Final = "ABCD"  # labels of the four choices of a question
_COLUMNS: Final = 2 + len(LETTERS)
_LARGEST_LOSS: Final = 709.0  # the exponential of a larger number overflows a double


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Mean loss on a text in nats per predicted token, and the number of predicted tokens."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """Return the exponential of the loss; infinity if it overflows a double."""
        return math.inf if self.loss > _LARGEST_LOSS else math.exp(self.loss)


def perplexity(
    trained: TrainedModel,
    source: str,
    *,
    seq: int,
    batch: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Perplexity:
    """Measure a model's mean loss on the concatenated documents of a source.

    The text is divided into windows. Each window begins with the last token of the previous window.
    Every token except the first is therefore predicted exactly once, from the preceding tokens of
    its window. Only learned tokens count: the assistant's messages in conversations, completions
    but not their prompts, and plain text but not begin tokens.

    Args:
        source: path of a file or folder, or the name of a data set; see `read_documents`.
        seq: number of predicted tokens per window, at most the model's context length.
        batch: number of windows per forward pass.
        progress: called with the number of evaluated windows and the total number of windows.

    Raises:
        UsageError: if `seq` is out of range, or the source cannot be read or has too little text.
    """
    if not 0 < seq <= trained.most_tokens:
        raise UsageError(f"--seq is {seq}; give 1 to {trained.most_tokens}, what the model takes")
    parts = []
    for document in read_documents(source):
        parts.append(begin_of(document, trained.tokenizer))
        parts += encode_documents([document], trained.tokenizer)
        parts.append(end_of(document, trained.tokenizer))
    tokens = np.concatenate(parts)
    trained.check_ids([int(ids_of(torch.from_numpy(tokens)).max())])
    if not (counted := int((tokens[1:] >= 0).sum())):
        raise UsageError(f"{source!r} has no token to predict; give more text")
    starts = range(0, len(tokens) - 1, seq)
    windows = [torch.from_numpy(tokens[s : s + seq + 1].astype(np.int64)) for s in starts]
    total, done = 0.0, 0
    with torch.no_grad():
        for group in _groups(windows, batch):
            given = torch.stack(group)
            model: Any = trained.model
            logits = model(input_ids=ids_of(given[:, :-1]), use_cache=False).logits
            losses = F.cross_entropy(
                logits.flatten(0, 1).float(),
                labels_of(given[:, 1:]).flatten(),
                ignore_index=IGNORED,
                reduction="sum",
            )
            total += float(losses)
            done += len(group)
            progress(done, len(windows))
    return Perplexity(total / counted, counted)


def _groups(windows: Sequence[torch.Tensor], most: int) -> Iterable[list[torch.Tensor]]:
    group: list[torch.Tensor] = []
    for window in windows:
        if group and (len(group) == most or len(window) != len(group[0])):
            yield group
            group = []
        group.append(window)
    yield group


@dataclass(frozen=True, slots=True)
class Question:
    """A multiple-choice question with four choices; `answer` is the index of the correct choice."""

    text: str
    choices: tuple[str, ...]
    answer: int

    def asked(self) -> str:
        """Return the question and its choices as a prompt that ends with `Answer:`."""
        lines = (f"{letter}. {one}" for letter, one in zip(LETTERS, self.choices, strict=True))
        return "\n".join([self.text, *lines, "Answer:"])

    def answered(self) -> str:
        """Return the prompt followed by the correct letter, as a few-shot example."""
        return f"{self.asked()} {LETTERS[self.answer]}\n\n"


@dataclass(frozen=True, slots=True)
class Answers:
    """Numbers of correct answers, questions, and prompts that were cut to fit the context."""

    right: int
    questions: int
    cut: int = 0

    @property
    def accuracy(self) -> float:
        """Return the fraction of questions that the model answered correctly."""
        return self.right / self.questions


def read_questions(path: Path) -> list[Question]:
    """Read multiple-choice questions from a CSV file in the format of MMLU, without a header line.

    The columns are the question, four choices and the letter of the correct choice. Raise
    UsageError if the file cannot be read, is empty or has another format.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{str(path)!r} cannot be read ({error}); give a CSV file") from error
    if not rows:
        raise UsageError(f"{str(path)!r} has no questions; give a CSV file that has some")
    for number, row in enumerate(rows, 1):
        if len(row) != _COLUMNS or row[-1].strip() not in tuple(LETTERS):
            raise UsageError(
                f"line {number} of {str(path)!r} is no question: it has {len(row)} columns and "
                f"ends in {row[-1][:20]!r}, not {_COLUMNS} with the letter A, B, C or D at the "
                f"end; give a CSV file as MMLU has them, without headings"
            )
    return [Question(row[0], tuple(row[1:-1]), LETTERS.index(row[-1].strip())) for row in rows]


def answer(
    trained: TrainedModel,
    questions: Sequence[Question],
    examples: Sequence[Question] = (),
    *,
    subject: str = "",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Answers:
    """Answer multiple-choice questions with a model and count the correct answers.

    The model's answer is the letter whose token has the largest logit after the prompt. The prompt
    has the format of Hendrycks et al. (2021, arXiv 2009.03300). If a prompt is longer than the
    model's context, its beginning is cut off.

    Args:
        examples: questions whose text and answers are put before each question in the prompt.
        subject: subject of the questions, named in the prompt's heading; may be empty.
        progress: called with the number of answered questions and the total number of questions.
    """
    about = f" about {subject}" if subject else ""
    heading = f"The following are multiple choice questions (with answers){about}.\n\n"
    before = heading + "".join(example.answered() for example in examples)
    asked = trained.tokenizer.encode_batch([f"Answer: {letter}" for letter in LETTERS])
    letters = [int(ids[-1]) for ids in asked]
    right = cut = 0
    with torch.no_grad():
        for number, question in enumerate(questions, 1):
            (ids,) = trained.tokenizer.encode_batch([before + question.asked()])
            begin = trained.tokenizer.begin_ids.tolist()
            room = trained.most_tokens - len(begin)
            cut += len(ids) > room
            trained.check_ids(ids)
            given = torch.tensor(begin + ids[-room:].tolist())[None]
            model: Any = trained.model
            logits = model(input_ids=given, use_cache=False).logits[0, -1]
            right += int(logits[letters].argmax()) == question.answer
            progress(number, len(questions))
    return Answers(right, len(questions), cut)
