"""QR codes in a terminal."""

from __future__ import annotations

import io


def qr_code(text: str) -> str:
    """A text as a QR code, of half blocks, with the quiet margin that cameras need."""
    import segno

    drawn = io.StringIO()
    segno.make(text, error="l", micro=False).terminal(drawn, compact=True)
    return drawn.getvalue()
