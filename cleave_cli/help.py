"""Formatting of `cleave --help`: commands in groups, and options in short or long form."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

GROUPS: Final = {
    "Start here": {
        "demo": "Show in a minute that a fleet has the losses of one machine.",
        "train": "Train a model, on emulated devices or those of a server.",
        "serve": "Run the parameter server, which devices join.",
        "join": "Make this machine a device of a server.",
        "pair": "Make a join code for a device; phones scan it.",
        "doctor": "Say what this machine lacks, and whether a model fits it.",
    },
    "A running server": {
        "status": "Show its job, devices, traffic, energy and events.",
        "dashboard": "Print the address of its dashboard.",
        "jobs": "List its jobs; stop, pause and resume them, read logs.",
        "devices": "List its devices; revoke and release them, mark your own.",
        "service": "Start `cleave join` with the machine.",
    },
    "What comes of training": {
        "export": "Write a run's model as a folder that transformers loads.",
        "eval": "Measure a model on a text or on questions.",
        "generate": "Go on with a text.",
        "footprint": "Say what a run cost in energy and carbon.",
    },
    "Before there are devices": {
        "plan": "Compare the ways to train a model on a fleet.",
        "emulate": "Emulate a fleet of up to thousands of devices.",
        "simulate": "Compare with other systems, and with cloud GPUs.",
        "profile": "Measure devices and links; list and compare profiles.",
    },
}
"""Maps the title of each group to its commands, with one line of help for each command."""


class GroupedCommands(TyperGroup):
    """The `cleave` command, whose help lists its subcommands in the groups of `GROUPS`."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the subcommands, group by group."""
        widest = max(len(name) for commands in GROUPS.values() for name in commands)
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(widest), text) for name, text in commands.items()])


def few_options(common: Set[str]) -> type[TyperCommand]:
    """Return a command class whose `--help` lists only the common options.

    `--help-all` lists every option.

    Args:
        common: parameter names of the common options.
    """

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
    """Print the help with every option and end, as the callback of `--help-all`."""
    if asked:
        context.meta[_EVERY] = True
        typer.echo(context.get_help())
        raise typer.Exit


_EVERY: Final = "cleave.help_all"
