"""Prints untrusted text without control characters, which a terminal would interpret.

Text from the network is already sanitized (`cleave.protocol.texts`). Text from a database, a file
or a library may not be, so all text is sanitized again before it is printed.
"""

from __future__ import annotations

import typer

from cleave.protocol.texts import clean


def printable(text: str) -> str:
    """Return a text without control characters except line breaks."""
    return "\n".join(map(clean, text.split("\n")))


def say(text: str, *, err: bool = True) -> None:
    """Print a text with untrusted parts, on stderr or (with `err=False`) on stdout."""
    typer.echo(printable(text), err=err)
