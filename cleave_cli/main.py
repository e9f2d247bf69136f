"""Entry point of the `cleave` command."""

from __future__ import annotations

import gc
import os
import sys
from typing import Final

import typer
from rich.console import Console
from typer import Option

import cleave
from cleave.errors import CleaveError
from cleave_cli.commands import (
    data,
    demo,
    devices,
    doctor,
    emulate,
    export,
    footprint,
    jobs,
    join,
    plan,
    profile,
    serve,
    service,
    simulate,
    status,
    train,
    trained_model,
)
from cleave_cli.options import GroupedCommands, few_options
from cleave_cli.render.text import printable

_OBJECTS_BETWEEN_COLLECTIONS: Final = 100_000

app = typer.Typer(
    name="cleave",
    help="Train transformers exactly on fleets of edge devices.",
    cls=GroupedCommands,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"cleave {cleave.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    debug: bool = Option(False, "--debug", help="Show tracebacks of errors."),
    version: bool = Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Train transformers exactly on fleets of edge devices."""
    if debug:
        os.environ["CLEAVE_DEBUG"] = "1"
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command("demo")(demo.demo)
app.command("serve")(serve.serve)
app.command("join")(join.join)
app.command("pair")(devices.pair)
app.command("dashboard")(status.dashboard)
app.command("status")(status.status)
app.command("train", cls=few_options(train.COMMON))(train.train)
app.command("export")(export.export)
app.command("eval")(trained_model.evaluate)
app.command("generate")(trained_model.generate)
app.command("chat")(trained_model.chat)
app.command("doctor")(doctor.doctor)
app.command("plan")(plan.plan)
app.command("emulate")(emulate.emulate)
app.command("simulate")(simulate.simulate)
app.command("footprint")(footprint.footprint)
app.add_typer(data.app)
app.add_typer(jobs.app)
app.add_typer(devices.app)
app.add_typer(profile.app)
app.add_typer(service.app)


def main() -> None:
    """Run the `cleave` command. If it fails, print the error and exit with status 1 or 2."""
    # `--debug` may be anywhere on the command line, because users often append it.
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1
    # With the default threshold, garbage collection takes a sixth of the import time of torch.
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    try:
        app(args=arguments)  # exits the process; the exit code for invalid options is 2
    except CleaveError as error:
        if debug:
            raise
        _complain(str(error))
        sys.exit(error.exit_code)
    except Exception as error:
        if debug:
            raise
        _complain(
            f"unexpected {type(error).__name__}: {error}; run again with --debug, and report it"
        )
        sys.exit(1)


def _complain(message: str) -> None:
    text = printable(f"cleave: {message}")
    Console(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False)
