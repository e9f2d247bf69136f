"""Which sections of the documentation claim figures, and which benchmarks they name for them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_FIGURE: Final = re.compile(
    r"(?<![\w.])\d[\d,.]*(?:e-?\d+)?\s?"
    r"(?:ns|µs|ms|s|h|min|minutes|hours|kB|MB|GB|TB|J|kJ|Wh|kWh|W|g|kg|%|times|FLOP|GFLOP/s|GB/s|MB/s)"
    r"(?![\w/])"
)
_CELL: Final = re.compile(r"\s*\**(from |about |up to )?[\d.,]*\d")
_NUMBER: Final = re.compile(r"(?<![\w./-])\d[\d,.]*\b")
_NAMED: Final = re.compile(r"benchmarks\.([a-z_0-9]+)")
_HEADING: Final = re.compile(r"#{1,6} (.+)")
_FENCE: Final = "```"


@dataclass(frozen=True)
class Section:
    """A section of a page that has figures.

    Attributes:
        page: the file, as people are told it.
        title: of the section.
        figures: how many it has.
        named: the benchmarks that it names.
    """

    page: str
    title: str
    figures: int
    named: frozenset[str]


def sections_of(page: str, text: str) -> Iterator[Section]:
    """Yield the sections of a Markdown page that have figures: in prose, tables, printed text.

    Figures inside of other code are settings; the benchmarks that it names count.
    """
    title, figures, named, code = page, 0, set[str](), ""
    for line in [*text.splitlines(), "# end"]:
        if line.lstrip().startswith(_FENCE):
            code = "" if code else line.strip().removeprefix(_FENCE) or "code"
            continue
        heading = None if code else _HEADING.match(line)
        if heading:
            if figures:
                yield Section(page, title, figures, frozenset(named))
            title, figures, named = heading[1], 0, set()
        named |= {*_NAMED.findall(line)}
        if code == "text":
            figures += len(_NUMBER.findall(line))
        elif not code and not heading:
            figures += _figures_in(re.sub(r"`[^`]*`", "", line))


def _figures_in(line: str) -> int:
    """Return the figures in a line: numbers with units, or a table's cells that are numbers."""
    if line.lstrip().startswith("|"):
        return sum(bool(_CELL.match(cell)) for cell in line.split("|"))
    return len(_FIGURE.findall(line))


def claims_of(root: Path, pages: Sequence[str]) -> list[Section]:
    """Return the sections with figures of all pages, given as patterns of paths below a folder."""
    found: list[Section] = []
    for path in sorted({path for pattern in pages for path in root.glob(pattern)}):
        found += sections_of(str(path.relative_to(root)), path.read_text())
    return found


def unreached(
    claims: Sequence[Section], done: Collection[str], reasons: Mapping[str, str]
) -> Iterator[tuple[Section, str]]:
    """Yield the sections whose figures no benchmark has checked, with the reason.

    Args:
        claims: all sections with figures.
        done: the benchmarks that ran to their end and found their limits kept.
        reasons: of others, why they did not.
    """
    for claim in claims:
        if not claim.named:
            yield claim, "names no benchmark"
        missing = sorted(claim.named - {*done})
        for name in missing:
            yield claim, f"`benchmarks.{name}` {reasons.get(name, 'is not among those that ran')}"
