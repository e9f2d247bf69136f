"""What several commands share."""

from __future__ import annotations

import importlib.util

import typer

from cleave.errors import UsageError


def need_train_extra(command: str, *more: str) -> None:
    """Say how to get what training needs, and `more` modules, where it is not installed.

    Raises:
        UsageError: when torch or transformers is missing.
    """
    missing = [
        name
        for name in ("torch", "transformers", "tokenizers", "safetensors", *more)
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise UsageError(
            f"{command} needs {', '.join(missing)}, which is not installed here; "
            f"install it with: pip install 'cleave[train]'"
        )


def was_given(context: typer.Context, parameter: str) -> bool:
    """Whether an option is on the command line, be it with its default value."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def human_bytes(count: float) -> str:
    """A number of bytes, as people read it."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
