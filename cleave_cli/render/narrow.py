"""Text for terminals of 80 columns."""

from __future__ import annotations

from typing import Final

from rich.console import Console

WIDTH: Final = 80


def narrow_console() -> Console:
    """Return a console on stdout that is 80 columns wide, whatever the terminal is."""
    return Console(width=WIDTH)
