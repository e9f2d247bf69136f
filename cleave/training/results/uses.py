"""Requests to use a trained model: text generation, perplexity, and multiple-choice questions."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from msgspec import Meta, Struct
from torch import Tensor

from cleave.errors import UsageError, unknown
from cleave.fleet.local_fallback import AbandonedError
from cleave.training.data.batches import (
    IGNORED,
    begin_of,
    encode_documents,
    end_of,
    ids_of,
    labels_of,
)
from cleave.training.data.conversations import clean
from cleave.training.data.documents import check_source, read_documents
from cleave.training.loop.records import AnsweredRecord, PredictedRecord, ProgressRecord, TextRecord
from cleave.training.loop.run_folder import runs_beside
from cleave.training.results.trained import TrainedModel
from cleave.workload.build import quiet_transformers

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
        raise UsageError(
            f"--seq must be between 1 and the context length, {trained.most_tokens}, not {seq}"
        )
    parts = []
    for document in read_documents(source):
        parts.append(begin_of(document, trained.tokenizer))
        parts += encode_documents([document], trained.tokenizer)
        parts.append(end_of(document, trained.tokenizer))
    tokens = np.concatenate(parts)
    trained.check_ids([int(ids_of(torch.from_numpy(tokens)).max())])
    if not (counted := int((tokens[1:] >= 0).sum())):
        raise UsageError(f"{source!r} has no token to predict; add more text")
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
        raise UsageError(
            f"{str(path)!r} cannot be read ({error}); use a readable CSV file"
        ) from error
    if not rows:
        raise UsageError(f"{str(path)!r} has no questions; use a CSV file with questions")
    for number, row in enumerate(rows, 1):
        if len(row) != _COLUMNS or row[-1].strip() not in tuple(LETTERS):
            raise UsageError(
                f"line {number} of {str(path)!r} is not a question: it has {len(row)} columns and "
                f"ends in {row[-1][:20]!r}, but needs {_COLUMNS} columns with A, B, C or D in the "
                "last; use a CSV file in MMLU's format, without a header line"
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
        examples: questions that precede each question in the prompt, with their answers.
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


_UNFINISHED = "\ufffd"  # replacement character for an incomplete UTF-8 sequence


_NEW_TOKENS: Final = 100  # default number of generated tokens
_NEW_TOKENS_IN_CHAT: Final = 400
_WINDOW: Final = 1024  # default tokens per window, limited by the model's context length

Report = Callable[[TextRecord | ProgressRecord | PredictedRecord | AnsweredRecord], None]
Stop = Callable[[], bool]


class Generation(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Request to continue the text `prompt`, or to answer it as a user's message if `chat` is set.

    Attributes:
        earlier: with `chat`, the earlier messages of the conversation, with `role` and `content`.
        tokens: maximum number of generated tokens; by default 100, or 400 with `chat`. An answer,
            or a text of the default length, also ends at the context length.
        temperature: sampling temperature; 0 for greedy decoding.
        top_p: threshold of nucleus sampling.
    """

    prompt: str
    chat: bool = False
    earlier: tuple[dict[str, str], ...] = ()
    tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0)] = 0.0
    top_p: float = 1.0
    seed: Annotated[int, Meta(ge=0)] = 0

    def check(self) -> None:
        """Raise UsageError if the prompt is empty, or a number is out of range."""
        if not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p must be more than 0 and at most 1, not {self.top_p:g}")
        for option, number in (("--seed", self.seed), ("--tokens", self.tokens or 0)):
            if not 0 <= number < 2**63:
                raise UsageError(f"{option} must be between 0 and 2**63 - 1, not {number}")
        if not self.prompt:
            raise UsageError("the prompt is empty; pass --prompt TEXT, or pipe text to stdin")

    def run(self, trained: TrainedModel, report: Report, stop: Stop) -> None:
        """Generate text with transformers' `generate`, up to an end token or `tokens` tokens.

        The model's generation configuration sets the end tokens, penalties and other options. Each
        part of the text is reported as soon as it is generated. Unless `chat` is set, the prompt is
        reported first.

        Raises:
            UsageError: if the text has no tokens or a token outside the model's vocabulary, or if
                the text and the new tokens together exceed the model's context length.
        """
        text = clean(self.prompt)
        if self.chat:
            # The chat template includes begin tokens.
            text = trained.tokenizer.question(text, clean(self.earlier))
        else:
            report(TextRecord(text))
        (found,) = trained.tokenizer.encode_batch([text])
        begin = [] if self.chat else trained.tokenizer.begin_ids.tolist()
        given = begin + found.tolist()
        if not given:
            raise UsageError(f"the tokenizer encodes {text!r} as no tokens; use another text")
        room = trained.most_tokens - len(given)
        tokens = self.tokens or (_NEW_TOKENS_IN_CHAT if self.chat else _NEW_TOKENS)
        if self.chat or self.tokens is None:
            tokens = max(1, min(tokens, room))
        if tokens > room:
            asked = "" if tokens == 1 else f" and --tokens asks for {tokens} more"
            remedy = "" if tokens == 1 else " or reduce --tokens"
            raise UsageError(
                f"the text has {len(given)} tokens{asked}, but the context is "
                f"{trained.most_tokens} tokens; shorten the text{remedy}"
            )
        trained.check_ids(given)
        model: Any = trained.model
        ends = model.generation_config.eos_token_id
        ends = trained.tokenizer.eos_id if ends is None else ends
        over = ends if isinstance(ends, list) else [ends]

        def text_of(ids: list[int]) -> str:
            return trained.tokenizer.decode(ids[:-1] if ids[-1] in over else ids, special=False)

        shown = trained.tokenizer.decode(given, special=False)
        wanted = True

        def added(ids: Tensor, *_: Any, **__: Any) -> Tensor:
            """Report the newly generated text and return whether to stop."""
            nonlocal shown, wanted
            whole = text_of(ids[0].tolist())
            open_ended = whole.endswith(_UNFINISHED) or trained.tokenizer.is_byte(int(ids[0, -1]))
            if not open_ended and whole != shown:
                report(TextRecord(whole[len(shown) :]))
                wanted = not stop()
                shown = whole
            return torch.full((len(ids),), not wanted)

        drawing = {"temperature": self.temperature, "top_p": self.top_p} if self.temperature else {}
        with torch.random.fork_rng(devices=[]), quiet_transformers():
            torch.manual_seed(self.seed)
            ids = model.generate(
                torch.tensor([given]),
                attention_mask=torch.ones(1, len(given), dtype=torch.long),
                max_new_tokens=tokens,
                do_sample=bool(self.temperature),
                num_beams=1,
                eos_token_id=ends,
                pad_token_id=trained.tokenizer.eos_id,  # unused: a single text needs no padding
                stopping_criteria=[added],
                **drawing,
            )
        if wanted and (rest := text_of(ids[0].tolist())[len(shown) :]):
            report(TextRecord(rest))  # `rest` ends with an incomplete character


class Prediction(Struct, frozen=True, forbid_unknown_fields=True):
    """Request for the perplexity of a text; see `cleave.training.results.uses.perplexity`.

    If `seq` is 0, the smaller of 1024 and the model's context length is used.
    """

    data: str
    seq: Annotated[int, Meta(ge=0)] = 0
    batch: Annotated[int, Meta(ge=1)] = 4

    def check(self) -> None:
        """Raise UsageError if `data` is neither an existing path nor a valid data set name."""
        check_source(self.data)

    def run(self, trained: TrainedModel, report: Report, stop: Stop) -> None:
        """Report progress, then the model's loss and perplexity on the text.

        Raise AbandonedError if `stop` returns True.
        """
        window = self.seq or min(_WINDOW, trained.most_tokens)
        told = perplexity(
            trained, self.data, seq=window, batch=self.batch, progress=_counted(report, stop)
        )
        text = (
            f"{trained.title}: perplexity {told.perplexity:.4g} (loss {told.loss:.4f}) on "
            f"{told.tokens:,} tokens of {self.data}, in windows of {window:,}"
        )
        report(PredictedRecord(told.loss, told.perplexity, told.tokens, text))


class Examination(Struct, frozen=True, forbid_unknown_fields=True):
    """Request to answer multiple-choice questions; see `cleave.training.results.uses.answer`.

    `choices` and `examples` are paths of CSV files in the format of MMLU. At most `shots` examples
    precede each question.
    """

    choices: str
    examples: str = ""
    shots: Annotated[int, Meta(ge=0)] = 5
    subject: str = ""

    def check(self) -> None:
        """Raise UsageError if a CSV file cannot be read, is empty or has another format."""
        read_questions(Path(self.choices))
        if self.examples:
            read_questions(Path(self.examples))

    def run(self, trained: TrainedModel, report: Report, stop: Stop) -> None:
        """Report progress, then the number of questions that the model answers correctly.

        Raise AbandonedError if `stop` returns True.
        """
        asked = read_questions(Path(self.choices))
        shown = read_questions(Path(self.examples))[: self.shots] if self.examples else []
        got = answer(trained, asked, shown, subject=self.subject, progress=_counted(report, stop))
        text = (
            f"{trained.title}: {got.right:,} of {got.questions:,} right "
            f"({got.accuracy:.1%}; chance is 25 %), after {len(shown)} examples"
        )
        if got.cut:
            text += f"; {got.cut:,} prompts were cut at the beginning to fit the model"
        report(AnsweredRecord(got.accuracy, got.right, got.questions, got.cut, text))


class UseRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Request to use a model. Exactly one of `generate`, `predict` and `answer` must be set.

    Attributes:
        model: a run folder, or the folder of a saved model.
        step: step of the checkpoint in a run folder; 0 for the newest intact checkpoint.
    """

    model: str
    step: Annotated[int, Meta(ge=0)] = 0
    generate: Generation | None = None
    predict: Prediction | None = None
    answer: Examination | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> UseRequest:
        """Parse a dict in the format of `to_dict`. Raise UsageError if the dict is invalid."""
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise UsageError(f"the request to use a model is invalid: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Convert the request to a dict for a message, without attributes that are None."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return {name: value for name, value in found.items() if value is not None}

    @property
    def use(self) -> Generation | Prediction | Examination:
        """Return whichever of `generate`, `predict` and `answer` is set.

        Raise UsageError unless exactly one of the three is set.
        """
        given = [use for use in (self.generate, self.predict, self.answer) if use is not None]
        if len(given) != 1:
            raise UsageError(
                f"a request must have exactly one of generate, predict and answer, not {len(given)}"
            )
        return given[0]

    def check(self) -> None:
        """Raise UsageError if a value is invalid, or if a file or the model's folder is missing."""
        self.use.check()
        if not Path(self.model).is_dir():
            raise unknown("folder of a run or model", self.model, runs_beside(Path(self.model)))


def _counted(report: Report, stop: Stop) -> Callable[[int, int], None]:
    """Return a callback that reports progress and raises AbandonedError if `stop` returns True."""

    def progress(done: int, total: int) -> None:
        report(ProgressRecord(done, total))
        if stop():
            raise AbandonedError(f"stopped after {done} of {total}")

    return progress
