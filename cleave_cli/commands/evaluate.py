"""`cleave eval`: a model's loss on a text, and its answers to multiple-choice questions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from cleave.errors import UsageError
from cleave_cli.render.say import say
from cleave_cli.trained_model import Devices, Model, Step, progress_bar, trained_model

_WINDOW = 1024  # tokens of a window, unless the model takes fewer


def evaluate(
    model: Model,
    data: Annotated[
        str, typer.Option(help="Text to predict: a file, folder, JSONL, Parquet.")
    ] = "",
    choices: Annotated[
        Path | None, typer.Option(help="Questions: a CSV file in the format of MMLU.")
    ] = None,
    examples: Annotated[
        Path | None, typer.Option(help="With --choices: answered questions to begin with.")
    ] = None,
    shots: Annotated[int, typer.Option(help="How many of --examples.", min=0)] = 5,
    subject: Annotated[str, typer.Option(help="With --choices: what they are about.")] = "",
    seq: Annotated[
        int, typer.Option(help="Tokens of a window; 0: 1024, or what the model takes.", min=0)
    ] = 0,
    batch: Annotated[int, typer.Option(help="Windows at once.", min=1)] = 4,
    devices: Devices = 0,
    step: Step = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Say how well a model predicts a text, or answers multiple-choice questions.

    Examples:

      cleave eval runs/20261121-101500 --data held-out.txt

      cleave eval my-model --choices anatomy_test.csv --examples anatomy_dev.csv --subject anatomy
    """
    from cleave.training.documents import read_documents
    from cleave.training.evaluation import answer, perplexity, read_questions

    if bool(data) == (choices is not None):
        raise UsageError("give either --data with a text, or --choices with questions")
    if choices is None and (examples is not None or subject):
        raise UsageError("--examples and --subject go with --choices")
    if data:
        read_documents(data)  # says at once when there is none
    asked = read_questions(choices) if choices is not None else []
    shown = read_questions(examples)[:shots] if examples is not None else []
    found: dict[str, Any]
    with trained_model(model, step, devices) as trained:
        if data:
            window = seq or min(_WINDOW, trained.most_tokens)
            with progress_bar("reading", hidden=as_json) as report:
                told = perplexity(trained, data, seq=window, batch=batch, progress=report)
            found = {"loss": told.loss, "perplexity": told.perplexity, "tokens": told.tokens}
            text = (
                f"{trained.title}: perplexity {told.perplexity:.4g} (loss {told.loss:.4f}) on "
                f"{told.tokens:,} tokens of {data}, in windows of {window:,}"
            )
        else:
            with progress_bar("answering", hidden=as_json) as report:
                got = answer(trained, asked, shown, subject=subject, progress=report)
            found = {"accuracy": got.accuracy, "right": got.right, "questions": got.questions}
            text = (
                f"{trained.title}: {got.right:,} of {got.questions:,} right "
                f"({got.accuracy:.1%}; chance is 25 %), after {len(shown)} examples"
            )
            if got.cut:
                found["cut"] = got.cut
                text += f"; the beginning of {got.cut:,} did not fit the model"
    if as_json:
        typer.echo(json.dumps(found))
    else:
        say(text, err=False)
