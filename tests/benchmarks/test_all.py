"""One page of results: which sections claim figures, and which of them no benchmark reaches."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.all import BENCHMARKS, PAGES, Ended, page
from benchmarks.claims import (
    SETTINGS,
    SPECIFICATIONS,
    Gap,
    Section,
    claims_of,
    sections_of,
    unreached,
)

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
cleave join URL
```

## Predicted

A step takes 3 s (`cleave plan --model opt-13b`, [there](there.md)), of which `cleave plan --json` has more.

```sh
cleave simulate paper  # 2 minutes
```

## Printed

```text
$ cleave plan --batch 64
a step   58 s
```

## Held

At most 2 % (`tests/planner/test_it.py`).
"""  # noqa: E501


def ended(name: str, code: int | None) -> Ended:
    """Return how a benchmark ended."""
    date, where = "2026-01-02T00:00:00+00:00", "a machine"
    return Ended(name, f"python -m benchmarks.{name}", code, 60.0, "fine", "abc", date, where)


def test_sections_with_figures_are_claims_and_code_is_not() -> None:
    assert [*sections_of("a.md", PAGE)] == [
        Section("a.md", "Measured", 2, frozenset({"one"})),
        Section("a.md", "Told", 2, frozenset({"two"})),
        Section(
            "a.md", "Predicted", 1, frozenset(),
            commands=("cleave plan --model opt-13b", "cleave simulate paper"),
        ),
        Section("a.md", "Printed", 1, frozenset(), tests=frozenset({"tests/test_docs.py"})),
        Section("a.md", "Held", 1, frozenset(), tests=frozenset({"tests/planner/test_it.py"})),
    ]  # fmt: skip


def test_what_no_benchmark_reaches_is_told_with_the_reason() -> None:
    claims = [
        *sections_of("a.md", PAGE),
        Section("b.md", "Alone", 3, frozenset()),
        Section("docs/protocol.md", "Limits", 3, frozenset()),
    ]
    told = [
        (claim.title, gap, why) for claim, gap, why in unreached(claims, {"one"}, {"two": "failed"})
    ]
    assert told == [
        ("Told", Gap.BENCHMARK, "`benchmarks.two` failed"),
        ("Predicted", Gap.COMMAND, "`cleave plan --model opt-13b`, `cleave simulate paper`"),
        ("Printed", Gap.TEST, "`tests/test_docs.py`"),
        ("Held", Gap.TEST, "`tests/planner/test_it.py`"),
        ("Alone", Gap.NOTHING, ""),
        ("Limits", Gap.SETTING, ""),
    ]


def test_the_page_tells_how_each_benchmark_ended() -> None:
    text = page(
        [ended("one", 0), ended("two", 1), ended("three", None)], [*sections_of("a.md", PAGE)]
    )
    assert "| `python -m benchmarks.one` | whole | 1.0 |" in text
    assert "| `python -m benchmarks.two` | ended with 1 | 1.0 |" in text
    assert "took longer than its limit" in text
    assert "Measured on a machine, commit `abc`, 2026-01-02" in text
    assert f"### {Gap.BENCHMARK.value}\n\n- a.md, *Told* (2 figures): `benchmarks.two`" in text
    assert f"### {Gap.TEST.value}\n\n- a.md, *Printed* (1 figures): `tests/test" in text
    assert "*Measured*" not in text


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


def test_the_documentation_has_claims() -> None:
    pages = {claim.page for claim in claims_of(ROOT, PAGES)}
    assert {"docs/verification.md", "docs/planner.md", "docs/when-not.md"} <= pages


def test_what_is_declared_to_be_settings_is_there_and_names_nothing_that_prints_it() -> None:
    declared = {(page, title) for page, titles in SETTINGS.items() for title in titles}
    found = {(claim.page, claim.title): claim for claim in claims_of(ROOT, PAGES)}
    assert declared <= found.keys()
    settings = [claim for claim in found.values() if claim.is_setting]
    assert {claim.page for claim in settings} == SETTINGS.keys() | SPECIFICATIONS
    assert not [claim for claim in settings if claim.named or claim.tests]
