"""`cleave eval`: measure a model's loss on text, or its accuracy on multiple-choice questions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from cleave.errors import UsageError
from cleave_cli.options import Json
from cleave_cli.render.text import say
from cleave_cli.trained_model import Devices, Model, Server, Step, progress_bar, use


def evaluate(
    model: Model,
    data: Annotated[str, Option(help="Text to predict: a file, a folder, JSONL or Parquet.")] = "",
    choices: Annotated[Path | None, Option(help="Questions: a CSV file in MMLU's format.")] = None,
    examples: Annotated[Path | None, Option(help="With --choices: questions with answers.")] = None,
    shots: Annotated[int, Option(help="Number of --examples in the prompt.", min=0)] = 5,
    subject: Annotated[str, Option(help="With --choices: subject of the questions.")] = "",
    seq: Annotated[int, Option(help="Tokens per window; 0: 1024 or the model's limit.", min=0)] = 0,
    batch: Annotated[int, Option(help="Windows per batch.", min=1)] = 4,
    devices: Devices = 0,
    server: Server = "",
    step: Step = 0,
    as_json: Json = False,
) -> None:
    """Measure how well a model predicts text or answers multiple-choice questions.

    Examples:

      cleave eval runs/20261121-101500 --data held-out.txt

      cleave eval my-model --choices anatomy_test.csv --examples anatomy_dev.csv --subject anatomy
    """
    from cleave.training.results.uses import Examination, Prediction, UseRequest

    if bool(data) == (choices is not None):
        raise UsageError("give either --data with a text, or --choices with questions")
    if choices is None:
        if examples is not None or subject:
            raise UsageError("--examples and --subject go with --choices")
        request = UseRequest(str(model), step, predict=Prediction(data, seq, batch))
    else:
        asked = Examination(str(choices), str(examples or ""), shots, subject)
        request = UseRequest(str(model), step, answer=asked)
    if not server:
        request.use.check()  # report errors in the input files before the model is loaded
    found: dict[str, Any] = {}
    with progress_bar("reading" if data else "answering", hidden=as_json) as progress:

        def report(record: dict[str, Any]) -> None:
            match record["event"]:
                case "progress":
                    progress(record["done"], record["total"])
                case "predicted" | "answered":
                    found.update(record)

        use(request, devices, server, report)
    if as_json:
        typer.echo(json.dumps({name: found[name] for name in found.keys() - {"event", "text"}}))
    else:
        say(found["text"], err=False)
