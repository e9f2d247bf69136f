"""Sanitize strings from a peer so that a terminal, log or web page can safely show them."""

from __future__ import annotations

from typing import Any


def clean(text: str) -> str:
    """Return `text` as one line of printable characters, without terminal control characters."""
    if text.isprintable():  # true for almost all strings
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else "" for c in text)


def clean_plain(value: Any) -> Any:
    """Return `value` with all its strings sanitized, including map keys and nested strings."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list | tuple):
        return type(value)(clean_plain(item) for item in value)
    if isinstance(value, dict):
        return {clean(key): clean_plain(item) for key, item in value.items()}
    return value
