"""Output for terminals with 80 columns."""

from __future__ import annotations

import textwrap
from typing import Final

from rich.console import Console

WIDTH: Final = 80


def narrow_console() -> Console:
    """Return a console on stdout that is always 80 columns wide."""
    return Console(width=WIDTH)


def filled(text: str, width: int = WIDTH) -> str:
    """Wrap the lines of a text at word boundaries, and keep each line's indentation.

    A word that is longer than a line, such as a URL, is not split, so that users can copy it.
    """
    lines: list[str] = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip(" "))]
        lines += textwrap.wrap(
            line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        ) or [""]
    return "\n".join(lines)
