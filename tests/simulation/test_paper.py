"""The report of claims."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cleave.simulation.claims import Evidence, Verdict, bytes_fall, faster_than_dtfm
from cleave.simulation.method import Outcome, Part
from cleave.simulation.paper import Scope, write
from cleave.simulation.sweep import Row
from cleave_cli.main import app


def row(devices: int | None, method: str, step_s: float, bytes_: float = 1.0) -> Row:
    return Row(devices, Outcome(method, "", 1, (Part("all", step_s),), bytes_, bytes_, 1.0, 1.0))


def evidence(*rows: Row) -> Evidence:
    return Evidence("some", {"some": rows}, ())


def dtfm(devices: int, *times: float) -> list[Row]:
    return [
        row(devices, f"{name} ({variant})", seconds)
        for name in ("dtfm", "dtfm-all")
        for variant, seconds in zip(("formula", "pipelined", "serial"), times, strict=True)
    ]


@pytest.mark.parametrize(
    ("times", "verdict"),
    [
        ((4, 5, 6), Verdict.HOLDS),
        ((3, 5, 6), Verdict.SOMETIMES),
        ((1, 2, 3), Verdict.FAILS),
    ],
)
def test_verdicts_follow_the_rows(times: tuple[float, ...], verdict: Verdict) -> None:
    claim = faster_than_dtfm(evidence(row(8, "cleave", 1.0), *dtfm(8, *times)))
    assert claim.verdict is verdict
    assert len(claim.rows) == 6
    assert all(len(line) == len(claim.columns) for line in claim.rows)


def test_slopes_by_hand() -> None:
    claim = bytes_fall(evidence(row(4, "cleave", 1.0, 8.0), row(16, "cleave", 1.0, 4.0)))
    assert claim.verdict is Verdict.HOLDS
    assert claim.rows[0][3] == "-0.50"


def test_a_report_is_written(tmp_path: Path) -> None:
    out = tmp_path / "report"
    done = CliRunner().invoke(app, ["simulate", "paper", "--quick", "--out", str(out)])
    assert done.exit_code == 0, done.output
    text = (out / "report.md").read_text()
    for heading in ("DT-FM", "more devices", "cloud GPU", "recovery", "Bytes", "512 MB"):
        assert heading in text
    for figure in ("sweep.png", "recovery.png"):
        assert figure in text
        assert (out / figure).read_bytes().startswith(b"\x89PNG")


def test_the_same_report_twice(tmp_path: Path) -> None:
    scope = Scope("opt-nano", (4, 8), (), (8,), (8,), batch=4, seq=64)
    texts = []
    for name in ("once", "again"):
        folder = tmp_path / name
        folder.mkdir()
        write(folder, scope, 0, not_drawn, not_drawn, str)
        texts.append((folder / "report.md").read_bytes())
    assert texts[0] == texts[1]


def not_drawn(path: Path, rows: Sequence[Row], title: str) -> None:
    """Figures are compared by nobody."""
