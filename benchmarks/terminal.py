"""Terminal sessions: run a command in a pseudo-terminal, and save what it shows."""

from __future__ import annotations

import codecs
import io
import itertools
import json
import os
import pty
import re
import select
import signal
import subprocess
import termios
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pyte
from pyte.screens import Char
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.style import Style
from rich.text import Text

TERMINAL: Final = "xterm-256color"
CUT: Final = "…"
"""The character that rich puts where it cuts a text."""

_SCROLLBACK_LINES: Final = 10_000
_READ_BYTES: Final = 65_536
_FONT_FACE: Final = re.compile(r"@font-face \{\{.*?\}\}", re.DOTALL)
# Documentation pages fetch nothing from other sites, so pictures use the reader's fonts.
_SVG_FORMAT: Final = _FONT_FACE.sub("", CONSOLE_SVG_FORMAT).replace("Fira Code, ", "")


@dataclass(frozen=True)
class Output:
    """A piece of a session's output."""

    at_s: float
    text: str


@dataclass(frozen=True)
class Recording:
    """A command's terminal output and exit code."""

    command: str
    columns: int
    rows: int
    output: tuple[Output, ...]
    exit_code: int

    @property
    def text(self) -> str:
        """Return the whole output."""
        return "".join(piece.text for piece in self.output)


def record(
    words: Sequence[str],
    *,
    command: str,
    columns: int,
    rows: int,
    folder: Path,
    environment: Mapping[str, str],
    limit_s: float,
) -> Recording:
    """Run a program in its own pseudo-terminal until it ends.

    Args:
        words: the program and its arguments.
        command: command line shown in the recording.
        columns: width of the terminal.
        rows: height of the terminal.
        folder: working directory of the program.
        environment: complete environment of the program.
        limit_s: seconds after which the program and its children are killed.
    """
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (rows, columns))
    began_s = time.monotonic()
    process = subprocess.Popen(
        words,
        stdin=its,
        stdout=its,
        stderr=its,
        cwd=folder,
        env=dict(environment),
        start_new_session=True,
    )
    os.close(its)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    output = [Output(0.0, prompt(command, columns))]
    try:
        while (left_s := began_s + limit_s - time.monotonic()) > 0:
            if not select.select([ours], [], [], left_s)[0]:
                continue
            try:
                read = os.read(ours, _READ_BYTES)
            except OSError:  # on Linux: the other end is closed
                break
            if not read:
                break
            output.append(Output(time.monotonic() - began_s, decoder.decode(read)))
        else:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    finally:
        os.close(ours)
    return Recording(command, columns, rows, tuple(output), process.wait())


def prompt(command: str, columns: int) -> str:
    """Return a typed command as a terminal shows it, on several lines if it is long."""
    lines = ["$"]
    for word in command.split(" "):
        if len(lines[-1]) + len(word) + len(" \\") >= columns:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {word}"
    return "".join(f"\x1b[1m{line}\x1b[0m\r\n" for line in lines)


def renamed(recording: Recording, old: str, new: str) -> Recording:
    """Return the recording with a folder renamed to a name of the same length.

    Tables stay aligned and lines break as before. The name may span two pieces.

    Raises:
        ValueError: when the lengths differ.
    """
    if len(old) != len(new):
        raise ValueError(f"{old!r} and {new!r} differ in length; give two names of one length")
    text, pieces, start = recording.text.replace(old, new), [], 0
    for piece in recording.output:
        stop = start + len(piece.text)
        pieces.append(replace(piece, text=text[start:stop]))
        start = stop
    return replace(recording, output=tuple(pieces))


def to_cast(recording: Recording) -> str:
    """Return a recording in asciinema's format, version 2, with relative times.

    https://docs.asciinema.org/manual/asciicast/v2/
    """
    header = {
        "version": 2,
        "width": recording.columns,
        "height": recording.rows,
        "title": recording.command,
        "env": {"TERM": TERMINAL},
    }
    lines: list[Any] = [header]
    lines += [[round(piece.at_s, 6), "o", piece.text] for piece in recording.output]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


class _Screen(pyte.HistoryScreen):
    """A terminal with scrollback that records lines whose text was wrapped or cut."""

    def __init__(self, columns: int, rows: int) -> None:
        self.wrapped: list[str] = []
        self.cut: list[str] = []
        self._drawing = False
        super().__init__(columns, rows, history=_SCROLLBACK_LINES)

    def draw(self, data: str) -> None:
        """Write text without control characters."""
        self._drawing = True
        super().draw(data)
        self._drawing = False
        if CUT in data:
            self.cut.append(self._row())

    def linefeed(self) -> None:
        """Go to the next line; during `draw`, this is a wrap."""
        if self._drawing:
            self.wrapped.append(self._row())
        super().linefeed()

    def all_lines(self) -> list[list[Char]]:
        """Return all lines including scrollback, without empty lines at the end."""
        rows = [*self.history.top, *(self.buffer[y] for y in range(self._used()))]
        return [[row[x] for x in range(self.columns)] for row in rows]

    def _used(self) -> int:
        """Return the number of screen lines in use."""
        used = [y for y, text in enumerate(self.display) if text.strip()]
        return used[-1] + 1 if used else 0

    def _row(self) -> str:
        row = self.buffer[self.cursor.y]
        return "".join(row[x].data for x in range(self.columns)).rstrip()


def _shown(recording: Recording, until_s: float) -> _Screen:
    screen = _Screen(recording.columns, recording.rows)
    stream = pyte.Stream(screen)
    for piece in recording.output:
        if piece.at_s <= until_s:
            stream.feed(piece.text)
    return screen


def screen_text(recording: Recording, until_s: float = float("inf")) -> list[str]:
    """Return the lines of the terminal at a time, with scrollback."""
    lines = _shown(recording, until_s).all_lines()
    return ["".join(char.data for char in line).rstrip() for line in lines]


def to_svg(recording: Recording, name: str, until_s: float = float("inf")) -> str:
    """Draw the terminal at a time, with scrollback, as an SVG.

    Args:
        name: name of the session, which prefixes names inside the picture.
    """
    lines = _shown(recording, until_s).all_lines()
    console = Console(
        record=True,
        width=recording.columns,
        file=io.StringIO(),
        color_system="truecolor",
        force_terminal=True,
        legacy_windows=False,
    )
    for line in lines:
        console.print(_styled(line), no_wrap=True, crop=True)
    svg = console.export_svg(title="Terminal", code_format=_SVG_FORMAT, unique_id=name)
    return "\n".join(line.rstrip() for line in svg.splitlines() if line.strip()) + "\n"


def _styled(line: Iterable[Char]) -> Text:
    text = Text()
    for style, chars in itertools.groupby(line, _style):
        text.append("".join(char.data for char in chars), style)
    text.rstrip()
    return text


def _style(char: Char) -> Style:
    return Style(
        color=_colour(char.fg),
        bgcolor=_colour(char.bg),
        bold=char.bold,
        italic=char.italics,
        underline=char.underscore,
        strike=char.strikethrough,
        reverse=char.reverse,
    )


def _colour(name: str) -> str:
    """Return rich's name of a pyte colour."""
    if re.fullmatch(r"[0-9a-f]{6}", name):
        return f"#{name}"
    name = name.replace("bfight", "bright").replace("brown", "yellow")  # one is misspelt in pyte
    return name.replace("bright", "bright_")


def faults(recording: Recording, private: Sequence[str] = ()) -> list[str]:
    """Return the faults of a session, one sentence each.

    Args:
        private: texts that must not be published, such as names of the machine and its folders.
    """
    found = []
    screen = _shown(recording, float("inf"))
    for line in dict.fromkeys(screen.wrapped):
        found.append(f"wrapped at {recording.columns} columns: {line}")
    for line in dict.fromkeys(screen.cut):
        found.append(f"cut: {line}")
    if "Traceback (most recent call last)" in recording.text:
        found.append("a traceback")
    if recording.exit_code:
        found.append(f"exit code {recording.exit_code}")
    words = set(re.findall(r"[\w.-]+", recording.text))
    for text in private:
        # Match short names such as `vm` only as whole words, but paths anywhere.
        if text in words or ("/" in text and text in recording.text):
            found.append(f"a private text: {text}")
    return found
