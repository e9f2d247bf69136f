"""What a terminal shows: the recorder sees wraps, cuts and tracebacks, and writes what it saw."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("pyte")

from benchmarks.terminal import (
    Output,
    Recording,
    faults,
    record,
    renamed,
    screen_text,
    to_cast,
)


def shown(*pieces: str, columns: int = 10, rows: int = 3, exit_code: int = 0) -> Recording:
    """Return a recording of pieces that came a second after one another."""
    output = tuple(Output(float(number), text) for number, text in enumerate(pieces))
    return Recording("cleave demo", columns, rows, output, exit_code)


@pytest.mark.parametrize(
    ("pieces", "columns", "expected"),
    [
        (("0123456789\r\nnext\r\n",), 10, []),
        (("01234567", "89ab\r\n"), 10, ["wrapped at 10 columns: 0123456789"]),
        (  # although it is erased afterwards
            ("0123456789ab", "\x1b[2K\x1b[1A\x1b[2K\rdone\r\n"),
            10,
            ["wrapped at 10 columns: 0123456789"],
        ),
        (("\x1b[1;38;5;197m0123456789\x1b[0m\r\n",), 10, []),  # colours take no columns
        (("step …\r\n",), 10, ["cut: step …"]),
        (("Traceback (most recent call last):\r\n",), 80, ["a traceback"]),
        (("on vm in /tmp/abc/runs\r\n",), 80, ["a private text: vm", "a private text: /tmp/abc"]),
    ],
)
def test_faults_are_seen(pieces: tuple[str, ...], columns: int, expected: list[str]) -> None:
    private = ["vm", "/tmp/abc", "m", "/tmp/abd"]
    assert faults(shown(*pieces, columns=columns), private) == expected


def test_a_folder_is_renamed_across_pieces() -> None:
    recording = renamed(shown("/tmp/a", "bc/runs"), "/tmp/abc", "/home/me")
    assert [piece.text for piece in recording.output] == ["/home/", "me/runs"]
    with pytest.raises(ValueError, match="two names of one length"):
        renamed(recording, "/home/me", "/home/someone")


def test_a_cast_is_what_asciinema_reads() -> None:
    header, *events = map(json.loads, to_cast(shown("a\x1b[1mb\r\n", "ü")).splitlines())
    assert header["version"] == 2
    assert (header["width"], header["height"]) == (10, 3)
    assert events == [[0.0, "o", "a\x1b[1mb\r\n"], [1.0, "o", "ü"]]


def recorded(script: str, folder: Path, *, limit_s: float = 60.0) -> Recording:
    return record(
        ["sh", "-c", script], command="sh", columns=80, rows=30, folder=folder,
        environment={"PATH": os.environ["PATH"]}, limit_s=limit_s,
    )  # fmt: skip


def test_a_command_runs_in_a_terminal_of_its_size(tmp_path: Path) -> None:
    recording = recorded("stty size; [ -t 1 ] && pwd; exit 3", tmp_path)
    assert screen_text(recording)[1:3] == ["30 80", str(tmp_path)[:80]]
    assert recording.exit_code == 3


def test_a_command_that_does_not_end_is_killed(tmp_path: Path) -> None:
    recording = recorded("echo there; exec sleep 600", tmp_path, limit_s=1.0)
    assert "there" in screen_text(recording)
    assert recording.exit_code < 0
