"""Requests to use a trained model: generate text, measure perplexity, answer questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from cleave.errors import UsageError
from cleave.fleet.local_fallback import AbandonedError
from cleave.training.data.conversations import clean
from cleave.training.loop.records import AnsweredRecord, PredictedRecord, ProgressRecord, TextRecord
from cleave.training.results.trained import TrainedModel, open_trained

_WINDOW: Final = 1024  # default tokens per window, if the model's context is not shorter

Report = Callable[[TextRecord | ProgressRecord | PredictedRecord | AnsweredRecord], None]
Stop = Callable[[], bool]


class Generation(Struct, frozen=True, forbid_unknown_fields=True):
    """Request to continue a text with a model; see `cleave.training.results.generation.go_on`.

    Attributes:
        prompt: the text to continue, or a user's message to a chat model.
        chat: whether to render the prompt with the model's chat template.
        tokens: maximum number of generated tokens.
        temperature: sampling temperature; 0 for greedy decoding.
        top_p: nucleus sampling threshold, above 0 and at most 1.
        seed: seed of the random number generator for sampling.
    """

    prompt: str
    chat: bool = False
    tokens: Annotated[int, Meta(ge=1)] = 100
    temperature: Annotated[float, Meta(ge=0)] = 0.0
    top_p: float = 1.0
    seed: Annotated[int, Meta(ge=0)] = 0

    def check(self) -> None:
        """Check the values of the request.

        Raises:
            UsageError: the prompt is empty, or `top_p` or `seed` is out of range.
        """
        if not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p is {self.top_p:g}; give a share above 0, up to 1")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed is {self.seed}; give a number from 0 to 2**63 - 1")
        if not self.prompt:
            raise UsageError("the prompt is empty; give --prompt TEXT, or a text on stdin")

    def run(self, trained: TrainedModel, report: Report, stop: Stop) -> None:
        """Generate the text, and report each piece of text when it is generated.

        Unless `chat` is set, the prompt is reported first.

        Args:
            trained: the model.
            report: called with each record.
            stop: returns whether to stop.
        """
        from cleave.training.results.generation import go_on

        prompt = clean(self.prompt)
        if not self.chat:
            report(TextRecord(prompt))

        def say(piece: str) -> bool:
            report(TextRecord(piece))
            return not stop()

        go_on(
            trained,
            trained.tokenizer.question(prompt) if self.chat else prompt,
            self.tokens,
            say,
            chat=self.chat,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
        )


class Prediction(Struct, frozen=True, forbid_unknown_fields=True):
    """Request for the perplexity of a text; see `cleave.training.results.evaluation.perplexity`.

    Attributes:
        data: path of a text, JSONL or Parquet file or of a folder, or the name of a data set.
        seq: tokens per window; 0 for the smaller of 1024 and the model's context length.
        batch: windows per forward pass.
    """

    data: str
    seq: Annotated[int, Meta(ge=0)] = 0
    batch: Annotated[int, Meta(ge=1)] = 4

    def check(self) -> None:
        """Check that `data` is an existing path, or may be the name of a data set.

        Raises:
            UsageError: `data` is no path, and the library for data sets is not installed.
        """
        from cleave.training.data.documents import check_source

        check_source(self.data)

    def run(self, trained: TrainedModel, report: Report, stop: Stop) -> None:
        """Compute the model's loss and perplexity on the text, and report them.

        Args:
            trained: the model.
            report: called with records of the progress, and at the end with the result.
            stop: returns whether to stop.

        Raises:
            AbandonedError: `stop` returned True before the end.
        """
        from cleave.training.results.evaluation import perplexity

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
    """Request to answer multiple-choice questions; see `cleave.training.results.evaluation.answer`.

    Attributes:
        choices: path of a CSV file with questions in the format of MMLU.
        examples: path of a CSV file with few-shot examples in the same format; empty to ask the
            questions without examples.
        shots: maximum number of few-shot examples.
        subject: subject of the questions, which the prompt names; may be empty.
    """

    choices: str
    examples: str = ""
    shots: Annotated[int, Meta(ge=0)] = 5
    subject: str = ""

    def check(self) -> None:
        """Check that the CSV files exist and have valid questions.

        Raises:
            UsageError: a file cannot be read, is empty or has another format.
        """
        from cleave.training.results.evaluation import read_questions

        read_questions(Path(self.choices))
        if self.examples:
            read_questions(Path(self.examples))

    def run(self, trained: TrainedModel, report: Report, stop: Stop) -> None:
        """Ask the model all questions, and report the number of right answers.

        Args:
            trained: the model.
            report: called with records of the progress, and at the end with the result.
            stop: returns whether to stop.

        Raises:
            AbandonedError: `stop` returned True before the end.
        """
        from cleave.training.results.evaluation import answer, read_questions

        asked = read_questions(Path(self.choices))
        shown = read_questions(Path(self.examples))[: self.shots] if self.examples else []
        got = answer(trained, asked, shown, subject=self.subject, progress=_counted(report, stop))
        text = (
            f"{trained.title}: {got.right:,} of {got.questions:,} right "
            f"({got.accuracy:.1%}; chance is 25 %), after {len(shown)} examples"
        )
        if got.cut:
            text += f"; the beginning of {got.cut:,} did not fit the model"
        report(AnsweredRecord(got.accuracy, got.right, got.questions, got.cut, text))


class UseRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Request to load a model and use it for one of three purposes.

    Exactly one of `generate`, `predict` and `answer` must be set.

    Attributes:
        model: path of a run folder, or of a folder with a saved model.
        step: step of the checkpoint in a run folder; 0 for the newest intact checkpoint.
        generate: request to continue a text.
        predict: request to measure perplexity.
        answer: request to answer multiple-choice questions.
    """

    model: str
    step: Annotated[int, Meta(ge=0)] = 0
    generate: Generation | None = None
    predict: Prediction | None = None
    answer: Examination | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> UseRequest:
        """Parse a request from the plain values that `to_dict` returns.

        Raises:
            UsageError: the values are malformed.
        """
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise UsageError(f"a model's use cannot be read: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Convert the request to plain values that can be sent in a message.

        Attributes that are None are left out.
        """
        found: dict[str, Any] = msgspec.to_builtins(self)
        return {name: value for name, value in found.items() if value is not None}

    @property
    def use(self) -> Generation | Prediction | Examination:
        """Return whichever of `generate`, `predict` and `answer` is set.

        Raises:
            UsageError: the number of purposes that are set is not 1.
        """
        given = [use for use in (self.generate, self.predict, self.answer) if use is not None]
        if len(given) != 1:
            raise UsageError(
                f"a model is used for one thing at a time, and {len(given)} are asked for; give "
                f"one of generate, predict and answer"
            )
        return given[0]

    def check(self) -> None:
        """Check the values of the request without loading the model.

        Raises:
            UsageError: a value is invalid, or a file or the model's folder does not exist.
        """
        self.use.check()
        if not Path(self.model).is_dir():
            raise UsageError(
                f"{self.model!r} is no folder; give a run folder, or one of a saved model"
            )

    def opened(self) -> TrainedModel:
        """Load the requested model and its tokenizer; see `open_trained`."""
        return open_trained(Path(self.model), self.step)


def _counted(report: Report, stop: Stop) -> Callable[[int, int], None]:
    """Return a callback that reports progress, and raises AbandonedError if `stop` returns True."""

    def progress(done: int, total: int) -> None:
        report(ProgressRecord(done, total))
        if stop():
            raise AbandonedError(f"stopped after {done} of {total}")

    return progress
