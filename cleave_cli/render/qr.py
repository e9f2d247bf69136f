"""QR codes as terminal text and as PNG files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Final

from cleave.errors import UsageError
from cleave.files import write_output

_DOT_PIXELS: Final = 8  # width of one square of the code: large enough for screens and paper


def qr_code(text: str) -> str:
    """Return a QR code for `text` as Unicode half blocks, with the margin that cameras need."""
    import segno

    drawn = io.StringIO()
    segno.make(text, error="l", micro=False).terminal(drawn, compact=True)
    return drawn.getvalue()


def write_qr_png(text: str, path: Path) -> None:
    """Write a QR code for `text` to a PNG file; raise UsageError if writing fails."""
    import segno

    try:
        image = io.BytesIO()
        segno.make(text, error="m", micro=False).save(image, kind="png", scale=_DOT_PIXELS)
        write_output(path, image.getvalue())
    except OSError as error:
        raise UsageError(
            f"--png {path} cannot be written ({error.strerror}); name a file in a folder of yours"
        ) from None
