"""One page of results: which sections claim figures, and which of them no benchmark reaches."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.all import BENCHMARKS, PAGES, Ended, page
from benchmarks.claims import Section, claims_of, sections_of, unreached

ROOT = Path(__file__).parents[2]

PAGE = """\
# Title

Nothing is claimed here: `--limit 30 s` is an option.

## Measured

A step takes 12 s and 30 MB (`python -m benchmarks.one`).

## Told

It is 1.5 times as fast.

| by | s |
| --- | --- |
| tiles | 12.5 |

```sh
sleep 10 s
python -m benchmarks.two  # 5 s
```
"""


def ended(name: str, code: int | None) -> Ended:
    """Return how a benchmark ended."""
    date, where = "2026-01-02T00:00:00+00:00", "a machine"
    return Ended(name, f"python -m benchmarks.{name}", code, 60.0, "fine", "abc", date, where)


def test_sections_with_figures_are_claims_and_code_is_not() -> None:
    assert [*sections_of("a.md", PAGE)] == [
        Section("a.md", "Measured", 2, frozenset({"one"})),
        Section("a.md", "Told", 2, frozenset({"two"})),
    ]


def test_what_no_benchmark_reaches_is_told_with_the_reason() -> None:
    claims = [*sections_of("a.md", PAGE), Section("b.md", "Alone", 3, frozenset())]
    told = [(claim.title, why) for claim, why in unreached(claims, {"one"}, {"two": "failed"})]
    assert told == [("Told", "`benchmarks.two` failed"), ("Alone", "names no benchmark")]


def test_the_page_tells_how_each_benchmark_ended() -> None:
    text = page(
        [ended("one", 0), ended("two", 1), ended("three", None)], [*sections_of("a.md", PAGE)]
    )
    assert "| `python -m benchmarks.one` | whole | 1.0 |" in text
    assert "| `python -m benchmarks.two` | ended with 1 | 1.0 |" in text
    assert "took longer than its limit" in text
    assert "Measured on a machine, commit `abc`, 2026-01-02" in text
    assert "a.md, *Told* (2 figures): `benchmarks.two` ended with 1." in text
    assert "*Measured*" not in text


def test_every_benchmark_of_the_readme_is_run_or_left_out_with_a_reason() -> None:
    text = (ROOT / "benchmarks" / "README.md").read_text()
    named = {*re.findall(r"^\| `python -m benchmarks\.([a-z_0-9]+)", text, re.MULTILINE)}
    assert named - {"all"} <= {benchmark.name for benchmark in BENCHMARKS}
    assert all((ROOT / "benchmarks" / f"{one.name}.py").exists() or one.name == "side_by_side"
               for one in BENCHMARKS)  # fmt: skip


def test_the_documentation_has_claims() -> None:
    pages = {claim.page for claim in claims_of(ROOT, PAGES)}
    assert {"docs/verification.md", "docs/planner.md", "docs/when-not.md"} <= pages
