"""`cleave eval`, `cleave generate` and `cleave chat`: use a trained model here or on devices."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer
from rich.console import Console
from rich.progress import Progress
from typer import Argument, Option

from cleave.errors import CleaveError, UsageError
from cleave_cli.fleet_options import check_number
from cleave_cli.options import Json, need_train_extra, not_empty
from cleave_cli.render.text import printable, say

if TYPE_CHECKING:
    from cleave.training.results.trained import TrainedModel
    from cleave.training.results.uses import Generation, UseRequest


Model: TypeAlias = Annotated[
    Path, Argument(help="A run folder, or a Hugging Face folder.", show_default=False)
]
Devices: TypeAlias = Annotated[
    int, Option(help="Number of emulated devices; 0 uses this machine alone.")
]
Server: TypeAlias = Annotated[
    str,
    Option(
        help="Use the devices of a server: @FILE, a copy of its operator.url. Paths are on the "
        "server.",
        callback=not_empty,
    ),
]
Step: TypeAlias = Annotated[
    int, Option(help="Step of the checkpoint; 0 means the newest intact one.", min=0)
]
Tokens: TypeAlias = Annotated[
    int | None,
    Option(
        help="Maximum number of new tokens [default: 100, or 400 for an answer; fewer if the "
        "model's context is smaller]",
        min=1,
        show_default=False,
    ),
]
Temperature: TypeAlias = Annotated[
    float,
    Option(
        help="0 always chooses the likeliest token; higher values give more varied text.", min=0.0
    ),
]
TopP: TypeAlias = Annotated[
    float, Option(help="Sample from the likeliest tokens with this total probability.")
]
Seed: TypeAlias = Annotated[int, Option(help="Random seed for sampling tokens.")]


def use(
    request: UseRequest, devices: int, server: str, report: Callable[[dict[str, Any]], None]
) -> None:
    """Evaluate a model or generate text, on this machine, on emulated devices or on a server.

    `report` is called with each record of `cleave.training.results.uses`, as a dictionary.
    """
    import cleave
    from cleave.training.loop.records import Record, to_dict
    from cleave.training.loop.start import use_model

    if devices < 0:
        raise UsageError(f"--devices must be 0 (for this machine alone) or more, not {devices}")
    if devices and server:
        raise UsageError("--devices emulates devices here, and cannot be combined with --server")
    if server:
        _on_server(server, request, report)
        return
    check_number(devices)

    def told(record: Record) -> None:
        report(to_dict(record))

    with cleave.emulated(devices) if devices else nullcontext() as fleet:
        use_model(request, fleet, told, lambda: False)


def _on_server(server: str, request: UseRequest, report: Callable[[dict[str, Any]], None]) -> None:
    import asyncio

    from cleave.training.loop.start import USE
    from cleave_cli.operator_client import OperatorClient

    async def follow() -> None:
        async with OperatorClient.connect(server) as client:
            job = (await client.request("submit", {USE: request.to_dict()}))["job"]
            try:
                async for record in client.records():
                    if record.get("event") in ("failed", "stopped"):
                        raise CleaveError(f"{job} {record['event']}: {record.get('text')}")
                    report(record)
            except asyncio.CancelledError:
                # Stop the job, because no client would read its other records.
                await client.request("stop", {"job": job})

    asyncio.run(follow())


@contextmanager
def progress_bar(what: str, *, hidden: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar in the `with` block; yield a function (done, total) that updates it."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def evaluate(
    model: Model,
    data: Annotated[str, Option(help="Text to predict: a file, a folder, JSONL or Parquet.")] = "",
    choices: Annotated[Path | None, Option(help="Questions: a CSV file in MMLU's format.")] = None,
    examples: Annotated[Path | None, Option(help="With --choices: questions with answers.")] = None,
    shots: Annotated[int, Option(help="Number of --examples in the prompt.", min=0)] = 5,
    subject: Annotated[str, Option(help="With --choices: subject of the questions.")] = "",
    seq: Annotated[
        int, Option(help="Tokens per window; 0 means 1024, or the model's limit if lower.", min=0)
    ] = 0,
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
        raise UsageError("pass either --data with a text, or --choices with questions")
    if choices is None:
        if examples is not None or subject:
            raise UsageError("--examples and --subject need --choices")
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


def generate(
    model: Model,
    prompt: Annotated[str, Option(help="Prompt. Use - to read it from stdin.")] = "-",
    chat: Annotated[
        bool, Option("--chat", help="Treat the prompt as a question to a chat model.")
    ] = False,
    tokens: Tokens = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    devices: Devices = 0,
    server: Server = "",
    step: Step = 0,
) -> None:
    """Print a prompt and a model's continuation, token by token; with --chat, only the answer.

    Examples:

      cleave generate runs/20261121-101500 --prompt 'def add(a, b):'

      cleave generate my-chat-model --chat --prompt 'What does os.walk do?'

      cleave generate my-model --temperature 0.8 --top-p 0.95 < prompt.txt

      cleave generate runs/20261121-101500 --prompt 'def add(' --server @operator.url
    """
    from cleave.training.results.uses import Generation, UseRequest

    try:
        text = sys.stdin.read() if prompt == "-" else prompt
    except UnicodeDecodeError as error:
        raise UsageError("stdin is not UTF-8 text; convert it") from error
    wanted = Generation(text, chat, tokens=tokens, temperature=temperature, top_p=top_p, seed=seed)
    wanted.check()

    def report(record: dict[str, Any]) -> None:
        if record["event"] == "text":
            typer.echo(printable(record["text"]), nl=False)

    use(UseRequest(str(model), step, generate=wanted), devices, server, report)
    typer.echo()


_NEW: Final = "/new"  # what a user types to start over


def chat(
    model: Model,
    system: Annotated[str, Option(help="Instructions that precede the conversation.")] = "",
    tokens: Tokens = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    step: Step = 0,
) -> None:
    """Answer what you type, with a run's model, adapters or a Hugging Face folder.

    The model sees the whole conversation. Without a chat template, it continues your text. Ctrl-C
    ends an answer, /new starts a new conversation, and Ctrl-D ends the command.

    Examples:

      cleave chat runs/20261121-101500

      cleave chat my-model --system 'Answer in one sentence.' --temperature 0.7
    """
    need_train_extra("cleave chat")
    from cleave.training.results.trained import open_trained
    from cleave.training.results.uses import Generation, UseRequest

    wanted = Generation("-", tokens=tokens, temperature=temperature, top_p=top_p, seed=seed)
    UseRequest(str(model), step, generate=wanted).check()
    trained = open_trained(model, step)
    if tokens and tokens >= trained.most_tokens:
        raise UsageError(
            f"--tokens is {tokens}, but the model's context is {trained.most_tokens} tokens, with "
            f"what you type; use fewer"
        )
    typed = sys.stdin.isatty()
    if typed:
        with suppress(ImportError):  # Windows has no readline, but edits lines anyway
            import readline  # noqa: F401  `input` then edits lines and keeps a history
        does = "answers" if trained.tokenizer.has_template else "continues text (no chat template)"
        say(f"{trained.title} {does}. {_NEW} starts over, Ctrl-D ends.")
    begin = [{"role": "system", "content": system}] if system else []
    messages, failed = list(begin), False
    while (text := _asked("> " if typed else "")) is not None:
        if text.strip() == _NEW:
            messages = list(begin)
        elif text.strip():
            try:
                answer = _answer(trained, wanted, messages, text)
            except UsageError as error:
                failed = True
                say(f"cleave: {error}; {_NEW} starts over")
                continue
            messages += [
                {"role": "user", "content": text},
                {"role": "assistant", "content": answer},
            ]
    if typed:
        typer.echo()
    elif failed:  # a script must see that a line has no answer
        raise typer.Exit(1)


def _asked(prompt: str) -> str | None:
    """Return the next line that the user types; None at the end."""
    try:
        return input(prompt)
    except (EOFError, KeyboardInterrupt):
        return None
    except UnicodeDecodeError as error:
        raise UsageError("stdin is not UTF-8 text; convert it") from error


def _answer(
    trained: TrainedModel, wanted: Generation, messages: list[dict[str, str]], text: str
) -> str:
    """Print and return the model's answer to `text`, or its first part after Ctrl-C."""
    from msgspec.structs import replace

    from cleave.training.loop.records import TextRecord

    if trained.tokenizer.has_template:
        request = replace(wanted, prompt=text, chat=True, earlier=tuple(messages))
    else:
        before = [m["content"] + "\n" * (m["role"] == "assistant") for m in messages]
        request = replace(wanted, prompt="".join([*before, text]))
    parts: list[str] = []
    skip = not request.chat  # the first record is then the prompt

    def report(record: object) -> None:
        nonlocal skip
        if isinstance(record, TextRecord) and not skip:
            parts.append(record.text)
            typer.echo(printable(record.text), nl=False)
        skip = False

    with suppress(KeyboardInterrupt):
        request.run(trained, report, lambda: False)
    typer.echo()
    return "".join(parts)
