"""Model evaluation: perplexity on a text, and accuracy on multiple-choice questions."""

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
"""Letters of a question's choices."""

_COLUMNS: Final = 2 + len(LETTERS)
_LARGEST_LOSS: Final = 709.0  # the exponential of more overflows a double


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Result of `perplexity`.

    Attributes:
        loss: mean cross-entropy in nats per predicted token.
        tokens: number of predicted tokens.
    """

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """Return e to the power of the loss; infinity when that overflows."""
        return math.inf if self.loss > _LARGEST_LOSS else math.exp(self.loss)


def perplexity(
    trained: TrainedModel,
    source: str,
    *,
    seq: int,
    batch: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Perplexity:
    """Return the model's loss on the concatenated documents of a source.

    The text is cut into windows, each of which begins with the last token of the previous one. So
    every token but the first is predicted once, from the tokens before it in its window. The loss
    covers only the answers of conversations and the completions of prompts. It does not cover the
    tokens that the tokenizer puts before a text.

    Args:
        trained: the model.
        source: source of the documents; see `read_documents`.
        seq: predicted tokens per window, at most the model's context length.
        batch: windows per forward pass.
        progress: called with the number of finished windows and of all windows.

    Raises:
        UsageError: when the text is too short or does not fit the model, or `seq` does not.
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
    """Yield groups of at most `most` consecutive windows of equal length."""
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
        choices: the choices in the order of their letters.
        answer: index of the right choice.
    """

    text: str
    choices: tuple[str, ...]
    answer: int

    def asked(self) -> str:
        """Return the prompt of the question, without the answer."""
        lines = (f"{letter}. {one}" for letter, one in zip(LETTERS, self.choices, strict=True))
        return "\n".join([self.text, *lines, "Answer:"])

    def answered(self) -> str:
        """Return the prompt with the answer, as a few-shot example."""
        return f"{self.asked()} {LETTERS[self.answer]}\n\n"


@dataclass(frozen=True, slots=True)
class Answers:
    """Result of `answer`.

    Attributes:
        right: number of right answers.
        questions: number of questions.
        cut: number of prompts truncated at the beginning to fit the model's context.
    """

    right: int
    questions: int
    cut: int = 0

    @property
    def accuracy(self) -> float:
        """Return the fraction of right answers."""
        return self.right / self.questions


def read_questions(path: Path) -> list[Question]:
    """Read questions from a CSV file in the format of MMLU.

    Columns are the question, four choices and the right choice's letter, without a header line.

    Raises:
        UsageError: when the file cannot be read, is empty or has another format.
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
    """Answer questions with a model. Its choice is the letter with the largest next-token logit.

    The prompt is that of Hendrycks et al. (2021, arXiv 2009.03300).

    Args:
        trained: the model.
        questions: the questions.
        examples: few-shot examples that precede each question.
        subject: subject named in the heading; may be empty.
        progress: called with the number of answered questions and of all questions.
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
