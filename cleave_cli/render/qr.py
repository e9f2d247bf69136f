"""QR codes, in a terminal and as pictures."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Final

from cleave.errors import UsageError

_DOT_PIXELS: Final = 8  # of a picture: sharp on a screen and on paper


def qr_code(text: str) -> str:
    """Return a text as a QR code of half blocks, with the quiet margin that cameras need."""
    import segno

    drawn = io.StringIO()
    segno.make(text, error="l", micro=False).terminal(drawn, compact=True)
    return drawn.getvalue()


def write_qr_png(text: str, path: Path) -> None:
    """Write a text as a QR code into a PNG file.

    Raises:
        UsageError: when the file cannot be written.
    """
    import segno

    try:
        with path.open("wb") as file:
            segno.make(text, error="m", micro=False).save(file, kind="png", scale=_DOT_PIXELS)
    except OSError as error:
        raise UsageError(
            f"--png {path} cannot be written ({error.strerror}); name a file in a folder of yours"
        ) from None
