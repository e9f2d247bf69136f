"""Format and print CSV, and text for 80-column terminals.

`cleave.protocol.messages` sanitizes text from the network, but nothing sanitizes text from a
database, a file or a library. So `printable` sanitizes text again before it is printed.
"""

from __future__ import annotations

import csv
import io
import sys
import textwrap
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer import Option

from cleave.errors import UsageError
from cleave.files import write_output
from cleave.protocol.messages import clean
from cleave_cli.options import human_bytes


def printable(text: str) -> str:
    """Return `text` without control characters, except line breaks."""
    return "\n".join(map(clean, text.split("\n")))


def say(text: str, *, err: bool = True) -> None:
    """Print `text` without control characters, to stderr or (with `err=False`) to stdout."""
    typer.echo(printable(text), err=err)


WIDTH: Final = 80


def filled(text: str, width: int = WIDTH) -> str:
    """Wrap each line of `text` to `width` columns. Keep the line's indentation and whole words."""
    lines: list[str] = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip(" "))]
        lines += textwrap.wrap(
            line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        ) or [""]
    return "\n".join(lines)


def echo_filled(text: str, *, before: str = "") -> None:
    """Print `before`, and then `text` as one paragraph wrapped to 80 columns."""
    typer.echo(before + textwrap.fill(text, WIDTH))


def by_kind(kinds: Mapping[str, int], between: str = ", ") -> str:
    """Format the traffic of each kind, the largest first; "nothing" if there was no traffic."""
    found = sorted(((nbytes, kind) for kind, nbytes in kinds.items() if nbytes), reverse=True)
    return between.join(f"{human_bytes(nbytes)} {kind}" for nbytes, kind in found) or "nothing"


Csv = Annotated[bool, Option("--csv", help="The table's rows as CSV on stdout.")]


# Spreadsheets execute cells that start with these characters, and device names are untrusted.
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")


class Form(Enum):
    """Format of a command's output. `PEOPLE` means tables and text."""

    PEOPLE = "people"
    JSON = "json"
    CSV = "csv"


def form_of(*, as_json: bool, as_csv: bool) -> Form:
    """Return the output format for `--json` and `--csv`; raise UsageError if both are given."""
    if as_json and as_csv:
        raise UsageError("--json and --csv cannot be combined; use one of them")
    if as_csv:
        return Form.CSV
    return Form.JSON if as_json else Form.PEOPLE


def write_csv(records: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> None:
    """Print records as CSV, with a header row.

    Args:
        records: values by column name. A mapping or list is printed in one cell: "a 1; b 2".
        columns: names of the columns to print; if empty, the keys of the first record.
    """
    shown = list(columns) or list(records[0])
    writer = csv.writer(sys.stdout)
    writer.writerow(shown)
    writer.writerows([_cell(record.get(name)) for name in shown] for record in records)


def _cell(value: Any) -> Any:
    if isinstance(value, Mapping):
        return "; ".join(f"{name} {each}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return "; ".join(map(str, value))
    if isinstance(value, str) and value.startswith(_FORMULA):
        return f"'{value}"
    return value


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
            f"--png {path} cannot be written ({error.strerror}); choose a writable folder"
        ) from None
