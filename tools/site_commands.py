"""The `cleave` command as the page docs/reference/cli.md shows it."""

from __future__ import annotations

import inspect
import re
from typing import Any, Final

import typer

from cleave_cli.main import app


def shown(command: Any) -> Any:
    """Return a command, and all below it, whose examples are code in Markdown."""
    command.help = re.sub(r"^(?=  \S)", "  ", inspect.cleandoc(command.help or ""), flags=re.M)
    for below in getattr(command, "commands", {}).values():
        shown(below)
    return command


command: Final = shown(typer.main.get_command(app))
