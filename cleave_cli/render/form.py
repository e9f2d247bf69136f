"""Output formats of a command: tables, JSON and CSV."""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Final

import typer

from cleave.errors import UsageError

Csv = Annotated[bool, typer.Option("--csv", help="The table's rows as CSV on stdout.")]


_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
"""Prefixes that make a spreadsheet execute a cell. Device names are untrusted, so such cells are
escaped."""


class Form(Enum):
    """Format of a command's output. `PEOPLE` means tables and text."""

    PEOPLE = "people"
    JSON = "json"
    CSV = "csv"


def form_of(*, as_json: bool, as_csv: bool) -> Form:
    """Return the output format for `--json` and `--csv`.

    Raises:
        UsageError: when both options are given.
    """
    if as_json and as_csv:
        raise UsageError("--json and --csv are two forms of the same; give one of them")
    if as_csv:
        return Form.CSV
    return Form.JSON if as_json else Form.PEOPLE


def write_csv(records: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> None:
    """Print records as CSV, with a header row.

    Args:
        records: for each row, a mapping from column name to value. A value that is a mapping or a
            list is printed in one cell, such as "a 1; b 2".
        columns: names of the columns to print. If empty, the columns are the keys of the first
            record, which must exist.
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
