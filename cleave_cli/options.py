"""Helpers for the options and the output of several commands."""

from __future__ import annotations

import importlib.util

import typer

from cleave.errors import UsageError, not_installed


def need_train_extra(command: str, *more: str) -> None:
    """Raise if a Python module for training, or one of `more`, is not installed.

    Raises:
        UsageError: when a module is missing. The message names the extra to install.
    """
    missing = [
        name
        for name in ("torch", "transformers", "tokenizers", "safetensors", *more)
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise not_installed(command, ", ".join(missing), "train")


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
    """Return an option's value; refuse an empty one, such as an unset shell variable.

    Without this check, a command for a server would silently run without one.

    Raises:
        UsageError: when the option is given and empty.
    """
    assert parameter.name is not None
    if was_given(context, parameter.name) and not value.strip():
        raise UsageError(f"--{parameter.name.replace('_', '-')} is empty; give it, or leave it out")
    return value
