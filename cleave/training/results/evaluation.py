"""How good a model is: its loss on a text, and its answers to multiple-choice questions."""

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

LETTERS: Final = "ABCD"
"""Of the choices of a question."""

_COLUMNS: Final = 2 + len(LETTERS)
_LARGEST_LOSS: Final = 709.0  # whose exponential is a double


@dataclass(frozen=True, slots=True)
class Perplexity:
    """How well a model predicts a text.

    Attributes:
        loss: mean cross-entropy, in nats for each predicted token.
        tokens: that were predicted.
    """

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """Return e to the loss; infinity where that is too large for a number."""
        return math.inf if self.loss > _LARGEST_LOSS else math.exp(self.loss)


def perplexity(
    trained: TrainedModel,
    source: str,
    *,
    seq: int,
    batch: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Perplexity:
    """Return how well a model predicts documents, one after another.

    They are cut into windows, of which each begins with the last token of the one before. So every
    token but the first is predicted once, from those before it in its window. Of conversations, and
    of prompts with completions, only answers count. What the tokenizer puts before a text is seen
    and does not count.

    Args:
        trained: the model.
        source: of the documents; see `read_documents`.
        seq: tokens that a window predicts, at most as many as the model takes.
        batch: windows at once.
        progress: called with the windows that are done and their number.

    Raises:
        UsageError: when the source has too little text, or windows are too long.
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
    """Yield windows of equal length, in order, not more than so many at once."""
    group: list[torch.Tensor] = []
    for window in windows:
        if group and (len(group) == most or len(window) != len(group[0])):
            yield group
            group = []
        group.append(window)
    yield group


@dataclass(frozen=True, slots=True)
class Question:
    """A question with four choices.

    Attributes:
        text: the question.
        choices: in the order of their letters.
        answer: the right one's number.
    """

    text: str
    choices: tuple[str, ...]
    answer: int

    def asked(self) -> str:
        """Return it as a model is asked, without the answer."""
        lines = (f"{letter}. {one}" for letter, one in zip(LETTERS, self.choices, strict=True))
        return "\n".join([self.text, *lines, "Answer:"])

    def answered(self) -> str:
        """Return it with the answer, as an example."""
        return f"{self.asked()} {LETTERS[self.answer]}\n\n"


@dataclass(frozen=True, slots=True)
class Answers:
    """How a model answered.

    Attributes:
        right: number of right answers.
        questions: number of questions.
        cut: of how many the beginning did not fit the model.
    """

    right: int
    questions: int
    cut: int = 0

    @property
    def accuracy(self) -> float:
        """Return the share of right answers."""
        return self.right / self.questions


def read_questions(path: Path) -> list[Question]:
    """Read a CSV file in the format of MMLU: question, four choices, letter of the right one.

    There is no line of headings.

    Raises:
        UsageError: when it is none.
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
    """Let a model answer questions: its choice is the letter that it takes for most likely next.

    The prompt is that of Hendrycks et al. (2021, arXiv 2009.03300): a heading, answered examples,
    the question, "Answer:".

    Args:
        trained: the model.
        questions: what is asked.
        examples: what stands answered before each question.
        subject: of the heading; empty for none.
        progress: called with the questions that are answered and their number.
    """
    about = f" about {subject}" if subject else ""
    heading = f"The following are multiple choice questions (with answers){about}.\n\n"
    before = heading + "".join(example.answered() for example in examples)
    letters = [_last_token(trained, f"Answer: {letter}") for letter in LETTERS]
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


def _last_token(trained: TrainedModel, text: str) -> int:
    (ids,) = trained.tokenizer.encode_batch([text])
    return int(ids[-1])
