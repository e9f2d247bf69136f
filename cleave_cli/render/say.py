"""Print external texts without control characters.

Texts from the network are already clean (`cleave.protocol.texts`). Texts may also come from a
store, a file or a library, so they are cleaned again before a terminal interprets them.
"""

from __future__ import annotations

import typer

from cleave.protocol.texts import clean


def printable(text: str) -> str:
    """Return a text without control characters except line breaks."""
    return "\n".join(map(clean, text.split("\n")))


def say(text: str, *, err: bool = True) -> None:
    """Print a text with external parts, on stderr unless `err` is false."""
    typer.echo(printable(text), err=err)
