"""The page of results, and which benchmarks are in the README."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.all import BENCHMARKS

ROOT = Path(__file__).parents[2]


def test_every_benchmark_is_in_the_readme_and_what_pages_name_is_run_or_left_out() -> None:
    text = (ROOT / "benchmarks" / "README.md").read_text()
    listed = {*re.findall(r"^\| `python -m benchmarks\.([a-z_0-9]+)", text, re.MULTILINE)}
    assert listed - {"all"} == {benchmark.name for benchmark in BENCHMARKS}
    pages = [
        path for pattern in ("*.md", "docs/**/*.md", "*/README.md") for path in ROOT.glob(pattern)
    ]
    named = {
        name
        for path in pages
        for name in re.findall(r"python -m\s+benchmarks\.([a-z_0-9]+)", path.read_text())
    }
    assert named <= listed
    found = {path.stem for path in (ROOT / "benchmarks").iterdir()}
    assert {benchmark.name for benchmark in BENCHMARKS} <= found
