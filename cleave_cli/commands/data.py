"""`cleave data show`: print examples of the training data as the model will see them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer import Option

from cleave_cli.commands.train import settings_of, with_job_options
from cleave_cli.options import Json, counted, need_train_extra, was_given
from cleave_cli.render.text import printable, say

if TYPE_CHECKING:
    from cleave.training.data.tokenizer import TextTokenizer

app = typer.Typer(
    name="data", help="Show examples of data as the model will see them.", no_args_is_help=True
)

_SETTINGS: Final = ("model", "data", "eval_data", "seq", "packing", "seed")  # the relevant ones
_OPEN, _CLOSE = "«", "»"  # around text that is not learned


@app.callback()
def data() -> None:
    """Show examples of data as the model will see them."""


def show(
    examples: Annotated[int, Option(help="Number of sequences.", min=1)] = 3,
    config: Annotated[
        Path | None, Option(help="Settings of cleave train: a TOML file, such as a recipe.")
    ] = None,
    as_json: Json = False,
    context: typer.Context = None,  # type: ignore[assignment]
    **job: Any,
) -> None:
    """Print the first sequences that cleave train will use, before anything is trained.

    The text between « and » is not learned: prompts, and the turns of users. The first token of a
    sequence is never learned, because nothing precedes it.

    Examples:

      cleave data show --model my-chat-model --data chats.jsonl

      cleave data show --config examples/recipes/chat-lora.toml --examples 1
    """
    need_train_extra("cleave data show")
    from cleave.errors import UsageError
    from cleave.training.data.batches import IGNORED, BatchLoader, cut_documents
    from cleave.training.loop.context import TrainContext
    from cleave.training.loop.inputs import prepare
    from cleave.training.loop.job import JobSpec, Packing
    from cleave.training.loop.records import NoteRecord

    settings = settings_of(config) if config is not None else {}
    settings |= {name: job[name] for name in _SETTINGS if was_given(context, name)}
    settings = {name: settings[name] for name in _SETTINGS if name in settings}
    if not settings.get("model"):
        raise UsageError("--model is missing; name the model whose tokenizer encodes the data")
    spec = JobSpec.from_dict({**settings, "eval_every": int("eval_data" in settings)})

    def told(record: object) -> None:
        if isinstance(record, NoteRecord):
            say(record.text)

    dataset = prepare(spec, TrainContext(None, told))
    separate = spec.packing == Packing.SEPARATE.value
    loader = BatchLoader(
        dataset.corpus.train, batch=examples, seq=spec.seq, seed=spec.seed, separate=separate
    )
    batch = loader.next_batch()
    shown = []
    for ids, labels in zip(batch.ids.tolist(), batch.labels.tolist(), strict=True):
        learned = [False, *(label != IGNORED for label in labels[:-1])]
        shown.append({"ids": ids, "learned": learned})
    cut = cut_documents(dataset.corpus.train, spec.seq)
    if as_json:
        typer.echo(json.dumps({"sequences": len(loader), "cut": cut, "examples": shown}))
        return
    for number, each in enumerate(shown, 1):
        count = sum(each["learned"])
        typer.secho(
            f"example {number}: {counted(spec.seq, 'token')}, {count:,} of them learned", bold=True
        )
        for text, learns in _spans(dataset.tokenizer, each["ids"], each["learned"]):
            typer.secho(text if learns else f"{_OPEN}{text}{_CLOSE}", dim=not learns, nl=False)
        typer.echo("\n")
    typer.echo(f"{counted(len(loader), 'sequence')} in an epoch; {_OPEN} {_CLOSE}: not learned")
    if cut:
        say(
            f"{cut:.0%} of the sequences begin within a document or conversation, whose earlier "
            f"part the model does not see there; with a larger --seq than {spec.seq}, fewer do",
            err=False,
        )


show.__signature__ = with_job_options(show, _SETTINGS)  # type: ignore[attr-defined]
app.command("show")(show)


def _spans(
    tokenizer: TextTokenizer, ids: list[int], learned: list[bool]
) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a sequence as text, and whether the model learns them."""
    done, end = "", 0
    for learns, group in groupby(learned):
        end += len(list(group))
        whole = tokenizer.decode(ids[:end])  # the text of a token may depend on earlier tokens
        yield printable(whole[len(done) :]), learns
        done = whole
