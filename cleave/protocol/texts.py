"""Cleaning a peer's texts, so that they are safe to show anywhere."""

from __future__ import annotations

from typing import Any


def clean(text: str) -> str:
    """Return a text without line ends, terminal codes, direction marks, and the like.

    The result is one line: each white space character becomes a space, and other characters that
    Unicode does not call printable are removed.
    """
    if text.isprintable():  # almost always
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else "" for c in text)


def clean_plain(value: Any) -> Any:
    """Return an untyped value with all its texts cleaned, including keys."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list | tuple):
        return type(value)(clean_plain(item) for item in value)
    if isinstance(value, dict):
        return {clean(key): clean_plain(item) for key, item in value.items()}
    return value
