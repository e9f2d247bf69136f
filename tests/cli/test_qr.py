"""QR codes as pictures: every dot where it belongs."""

from __future__ import annotations

import re
from pathlib import Path

import segno
from PIL import Image

from cleave_cli.render.text import qr_code, write_qr_png

URL = "https://192.168.1.20:8765/join#c=7KQ4-MWX2-PDH9&s=ABCDEFGHJK&fp=sha256:" + "0f" * 32


def test_a_picture_shows_the_code(tmp_path: Path) -> None:
    write_qr_png(URL, tmp_path / "code.png")
    dots = segno.make(URL, error="m", micro=False).matrix
    with Image.open(tmp_path / "code.png") as opened:
        picture = opened.convert("L")
    dot = picture.width // (len(dots) + 8)  # with a margin of four dots
    assert picture.size == (dot * (len(dots) + 8),) * 2
    for y, row in enumerate(dots):
        for x, dark in enumerate(row):
            middle = ((x + 4) * dot + dot // 2, (y + 4) * dot + dot // 2)
            assert (picture.getpixel(middle) == 0) == bool(dark)


def test_a_terminal_has_room_for_it() -> None:
    lines = re.sub(r"\x1b\[[0-9;]*m", "", qr_code(URL)).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 40
