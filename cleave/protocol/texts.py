"""What a peer says, as it can be shown anywhere."""

from __future__ import annotations

from typing import Any


def clean(text: str) -> str:
    """A text without line ends, codes for terminals, marks that turn writing around, and the like.

    What is left is on one line and shows as what it is: white space of any kind is a space, and of
    the rest only what Unicode calls printable stays.
    """
    if text.isprintable():  # nearly all
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else "" for c in text)


def clean_plain(value: Any) -> Any:
    """An untyped value with all its texts clean, keys included."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [clean_plain(item) for item in value]
    if isinstance(value, dict):
        return {clean(key): clean_plain(item) for key, item in value.items()}
    return value
