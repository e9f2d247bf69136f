"""`cleave simulate` as people use it."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cleave.errors import UsageError
from cleave_cli.commands.simulate import counts
from cleave_cli.main import app

pytestmark = pytest.mark.slow

SMALL = ["simulate", "--model", "opt-tiny", "--batch", "8", "--seq", "128", "--devices", "4,8"]


def run(*more: str) -> str:
    done = CliRunner().invoke(app, [*SMALL, *more], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_ranges_double() -> None:
    assert counts("32..200") == [32, 64, 128, 200]
    assert counts("256,32") == [32, 256]


@pytest.mark.parametrize("text", ["", "0", "many", "8..x", "8..4"])
def test_no_devices_are_an_error(text: str) -> None:
    with pytest.raises(UsageError, match="--devices"):
        counts(text)


@pytest.mark.nightly
def test_json_says_time_and_memory_of_every_row() -> None:
    document = json.loads(run("--json"))
    assert document["batch"] == 8
    for row in document["rows"]:
        assert row["step_s"] == pytest.approx(sum(row["parts_s"].values()))
        assert row["memory_needed_bytes"] > 0
        assert row["fits"] == (row["misfit"] == "")
    assert {row["devices"] for row in document["rows"]} == {4, 8, None}
    lines = list(csv.DictReader(io.StringIO(run("--csv", "--methods", "cleave,data-parallel"))))
    assert [line["method"] for line in lines] == ["cleave", "data-parallel"] * 2


def test_an_unknown_method_names_near_ones() -> None:
    with pytest.raises(UsageError, match="cleave-2d"):
        CliRunner().invoke(app, [*SMALL, "--methods", "cleave-3d"], catch_exceptions=False)


@pytest.mark.nightly
def test_a_plot_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "sweep.png"
    run("--methods", "cleave,cloud", "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
