"""The page of results, and which benchmarks are in the README."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.all import BENCHMARKS, Ended, page

ROOT = Path(__file__).parents[2]


def ended(name: str, code: int | None) -> Ended:
    """Return how a benchmark ended."""
    date, where = "2026-01-02T00:00:00+00:00", "a machine"
    return Ended(name, f"python -m benchmarks.{name}", code, 60.0, "fine", "abc", date, where)


def test_the_page_tells_how_each_benchmark_ended() -> None:
    text = page([ended("one", 0), ended("two", 1), ended("three", None)])
    assert "| `python -m benchmarks.one` | whole | 1.0 |" in text
    assert "| `python -m benchmarks.two` | ended with 1 | 1.0 |" in text
    assert "took longer than its limit" in text
    assert "Measured on a machine, commit `abc`, 2026-01-02" in text


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
    assert all((ROOT / "benchmarks" / f"{one.name}.py").exists() or one.name == "side_by_side"
               for one in BENCHMARKS)  # fmt: skip
