"""Printing texts from elsewhere without control characters.

Texts from the network are already clean (`cleave.protocol.texts`). Texts may also come from a
store, a file or a library, so they are cleaned again before a terminal could obey them.
"""

from __future__ import annotations

import typer

from cleave.protocol.texts import clean


def printable(text: str) -> str:
    """Return a text that a terminal shows literally, with its line breaks."""
    return "\n".join(map(clean, text.split("\n")))


def say(text: str, *, err: bool = True) -> None:
    """Print a text with parts from elsewhere, on stderr unless `err` is false."""
    typer.echo(printable(text), err=err)
