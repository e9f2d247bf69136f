"""Helpers that several commands share."""

from __future__ import annotations

import importlib.util

import typer

from cleave.errors import UsageError, not_installed


def need_train_extra(command: str, *more: str) -> None:
    """Refuse if what training needs, or a module of `more`, is missing; say how to install it.

    Raises:
        UsageError: when torch, transformers or another module is missing.
    """
    missing = [
        name
        for name in ("torch", "transformers", "tokenizers", "safetensors", *more)
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise not_installed(command, ", ".join(missing), "train")


def was_given(context: typer.Context, parameter: str) -> bool:
    """Say whether an option is on the command line, even with its default value."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def human_bytes(count: float) -> str:
    """Return a number of bytes as text, for people."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"


def counted(number: int, noun: str) -> str:
    """Return a number with what it counts, as "1 device" or "1,000 devices"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def not_empty(context: typer.Context, parameter: typer.CallbackParam, value: str) -> str:
    """Return what an option was given; refuse an empty text, as an unset variable of a shell is.

    Without this, a command that is to use a server would silently do without one.

    Raises:
        UsageError: when it was given and is empty.
    """
    assert parameter.name is not None
    if was_given(context, parameter.name) and not value.strip():
        raise UsageError(f"--{parameter.name.replace('_', '-')} is empty; give it, or leave it out")
    return value
