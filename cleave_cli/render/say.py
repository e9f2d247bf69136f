"""Printing what others said: once more clean, wherever it came from.

Texts are clean since they came in over the network (`cleave.protocol.texts`). They may also come
from a store, a file or a library, and this is the last place before a terminal obeys them.
"""

from __future__ import annotations

import typer

from cleave.protocol.texts import clean


def printable(text: str) -> str:
    """A text that a terminal shows as it is, on as many lines as it has."""
    return "\n".join(map(clean, text.split("\n")))


def say(text: str, *, err: bool = True) -> None:
    """Print a text that others had a part in: on stderr, unless it is what was asked for."""
    typer.echo(printable(text), err=err)
