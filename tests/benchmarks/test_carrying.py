"""What links cost, as the comparison's report is told it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.side_by_side.carrying import Carried, keep, main, read

SUM = Carried("1000/1000", 500, 20.0, 6_000_000_000, 23.0, "a machine")


def test_what_was_found_behind_a_link_takes_the_place_of_what_was(tmp_path: Path) -> None:
    path = tmp_path / "sums.json"
    assert read(path) == []
    slow, again = replace(SUM, link="100/20", mb=50), replace(SUM, took_s=19.0)
    for each in (SUM, slow, again):
        keep(path, each)
    assert read(path) == [slow, again]


def test_a_ring_takes_what_its_slower_way_takes() -> None:
    assert SUM.rate_s == pytest.approx(6.0)
    assert replace(SUM, link="100/20", mb=50).rate_s == pytest.approx(30.0)


def test_a_file_of_something_else_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    for text in ("no JSON", '{"rows": []}', "[1]"):
        path.write_text(text)
        monkeypatch.setattr(sys, "argv", ["carrying", "--json", str(path)])
        with pytest.raises(SystemExit):
            main()
        assert f"{str(path)!r} keeps no such sums" in capsys.readouterr().err
        assert path.read_text() == text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--link", "5"], "'5' is no link; give Mbit/s down and up, as 100/20"),
        (["--mb", "3"], "--mb 3 is less than one bucket; use 25 or more"),
    ],
)
def test_what_cannot_be_summed_is_refused_in_a_sentence(
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["carrying", *arguments])
    with pytest.raises(SystemExit):
        main()
    assert said in capsys.readouterr().err
