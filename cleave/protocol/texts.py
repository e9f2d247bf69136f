"""Cleaning a peer's texts, so that they can be shown anywhere."""

from __future__ import annotations

from typing import Any


def clean(text: str) -> str:
    """Return a text without line ends, terminal codes, marks that change direction, and the like.

    The result is on one line: white space of any kind becomes a space, and of the rest only what
    Unicode calls printable is kept.
    """
    if text.isprintable():  # nearly all
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else "" for c in text)


def clean_plain(value: Any) -> Any:
    """Return an untyped value with all its texts cleaned, keys included."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list | tuple):
        return type(value)(clean_plain(item) for item in value)
    if isinstance(value, dict):
        return {clean(key): clean_plain(item) for key, item in value.items()}
    return value
