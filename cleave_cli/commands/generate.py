"""`cleave generate`: a model goes on with a text."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from cleave.errors import UsageError
from cleave_cli.render.say import printable
from cleave_cli.trained_model import Devices, Model, Step, trained_model


def generate(
    model: Model,
    prompt: Annotated[str, typer.Option(help="The text; - to read it from stdin.")] = "-",
    chat: Annotated[
        bool, typer.Option("--chat", help="It is a question to a chat model; print the answer.")
    ] = False,
    tokens: Annotated[int, typer.Option(help="That are added at most.", min=1)] = 100,
    temperature: Annotated[
        float, typer.Option(help="0: always the likeliest token; higher: more varied.", min=0.0)
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Of the likeliest tokens that have this share together.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the choice of tokens.")] = 0,
    devices: Devices = 0,
    step: Step = 0,
) -> None:
    """Print a text and what a model adds to it, as it comes.

    Examples:

      cleave generate runs/20261121-101500 --prompt 'def add(a, b):'

      cleave generate my-chat-model --chat --prompt 'What does os.walk do?'

      cleave generate my-model --temperature 0.8 --top-p 0.95 < prompt.txt
    """
    from cleave.training.generation import continued

    if not 0 < top_p <= 1:
        raise UsageError(f"--top-p is {top_p:g}; give a share above 0, up to 1")
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise UsageError("the prompt is empty; give --prompt TEXT, or a text on stdin")
    settings: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "seed": seed}
    with trained_model(model, step, devices) as trained:
        if chat:
            text = trained.tokenizer.question(text)
        else:
            typer.echo(printable(text), nl=False)
        for piece in continued(trained, text, tokens, **settings):
            typer.echo(printable(piece), nl=False)
    typer.echo()
