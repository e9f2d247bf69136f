"""Options and helpers that several commands share, and the layout of `cleave --help`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import typer
from typer import Option
from typer.core import TyperCommand, TyperGroup

from cleave.errors import UsageError, not_installed
from cleave.files import figure_file
from cleave.transport.addresses import is_loopback


def need_train_extra(command: str, *more: str) -> None:
    """Raise UsageError if a Python module for training, or one of `more`, is not installed."""
    missing = [
        name
        for name in ("torch", "transformers", "tokenizers", "safetensors", *more)
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise not_installed(command, ", ".join(missing), "train")


@contextmanager
def usage_errors() -> Iterator[None]:
    """Convert a ValueError from the `with` block to a UsageError."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from None


@contextmanager
def writes(path: Path) -> Iterator[None]:
    """Raise UsageError if the `with` block fails to write the file `path`."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot write {path}: {reason}") from None


def check_plot(path: Path) -> None:
    """Raise UsageError if a figure cannot be saved to `path`, before anything is computed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise not_installed("--plot", "matplotlib", "train") from None
    with writes(path):
        suffix, known = figure_file(path).suffix[1:], Figure().canvas.get_supported_filetypes()
        if suffix not in known:
            raise ValueError(f"{suffix!r} is no format of figures; use one of {', '.join(known)}")


def was_given(context: typer.Context, parameter: str) -> bool:
    """Return True if an option is on the command line, even with its default value."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def human_bytes(count: float) -> str:
    """Format a number of bytes with a decimal unit, such as "1.5 MB"."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"


def counted(number: int, noun: str) -> str:
    """Format a number with its noun, such as "1 device" or "1,000 devices"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def not_empty(context: typer.Context, parameter: typer.CallbackParam, value: str) -> str:
    """Return an option's value; raise UsageError if the option is given with an empty value.

    Without this check, `--server "$URL"` with an unset variable would silently be ignored.
    """
    assert parameter.name is not None
    if was_given(context, parameter.name) and not value.strip():
        raise UsageError(f"--{parameter.name.replace('_', '-')} is empty; set a value, or omit it")
    return value


GROUPS: Final = {
    "Start here": {
        "demo": "Show in a minute that devices give the same losses as one machine.",
        "data": "Show examples of data as the model will see them.",
        "train": "Train a model on emulated devices, or on the devices of a server.",
        "serve": "Run a parameter server for devices to join.",
        "join": "Make this machine a device of a server.",
        "pair": "Make a join code for a device, which phones can scan.",
        "doctor": "Check this machine, and whether a model fits in memory.",
    },
    "A running server": {
        "status": "Show its job, devices, traffic, energy and events.",
        "dashboard": "Print the address of its dashboard.",
        "jobs": "List its jobs; stop, pause and resume them, read logs.",
        "devices": "List its devices; revoke and release them, mark your own.",
        "service": "Start `cleave join` when this machine starts.",
    },
    "After training": {
        "export": "Write a run's model as a folder that transformers loads.",
        "eval": "Measure a model on a text or on questions.",
        "generate": "Continue a text with a model.",
        "chat": "Chat with a model.",
        "footprint": "Report the energy and carbon of a run.",
    },
    "Without devices": {
        "plan": "Compare the ways to train a model on a fleet.",
        "emulate": "Emulate a fleet of up to thousands of devices.",
        "simulate": "Compare with other systems, and with cloud GPUs.",
        "profile": "Measure devices and links; list and compare profiles.",
    },
}


class GroupedCommands(TyperGroup):
    """The `cleave` command, whose help lists its subcommands in the groups of `GROUPS`."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the subcommands, group by group."""
        widest = max(len(name) for commands in GROUPS.values() for name in commands)
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(widest), text) for name, text in commands.items()])

    def invoke(self, ctx: Any) -> Any:
        """Run a subcommand. The error for an invalid option names the option's value."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            # Typer's own errors leave the value out: "Input should be a valid integer, ...".
            found: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
            if found:
                expected = error.message.removeprefix("Input ").partition(",")[0]
                error.message = f"{found[0]['input']!r} {expected}."
            raise


def few_options(common: Set[str]) -> type[TyperCommand]:
    """Return a command class with `common` options in `--help` and all options in `--help-all`."""

    class FewOptions(TyperCommand):
        def format_options(self, ctx: Any, formatter: Any) -> None:
            shown = [
                record
                for parameter in self.get_params(ctx)
                if ctx.meta.get(_EVERY) or parameter.name in common | {"help_all", "help"}
                if (record := parameter.get_help_record(ctx)) is not None
            ]
            with formatter.section("Options"):
                formatter.write_dl(shown)

    return FewOptions


def show_every_option(context: typer.Context, asked: bool) -> None:
    """If `asked`, print the help with every option and exit. Callback of `--help-all`."""
    if asked:
        context.meta[_EVERY] = True
        typer.echo(context.get_help())
        raise typer.Exit


_EVERY: Final = "cleave.help_all"


def only_here(url: str) -> str:
    """Return a warning that only this machine can use a loopback URL; empty for other URLs."""
    host = urlsplit(url).hostname or ""
    if not is_loopback(host):
        return ""
    return (
        f"only this machine can reach {host}, so phones cannot use this address: for phones and "
        f"other machines, start the server with `cleave serve --host 0.0.0.0`"
    )


def browsers_warn(page_url: str) -> str:
    """Return what to send along with a link whose certificate no browser knows; else empty."""
    if "&fp=" not in page_url:
        return ""
    return (
        "browsers warn of this server's own certificate. Send this along with the link:\n\n"
        '  "Your browser will say once that the connection is not private, because it goes to my\n'
        "  own computer. Choose Advanced, then Proceed (iPhone: Show Details, then visit this\n"
        '  website)."\n\n'
        "for strangers' phones, use a certificate that browsers trust (docs/phones.md)"
    )


Json = Annotated[bool, Option("--json", help="One JSON document on stdout.")]
