"""Which sections of the documentation have figures, and what they name that prints them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
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
_TEST: Final = re.compile(r"\btests/[a-z_0-9/]+\.py")
_COMMAND: Final = re.compile(r"cleave (?:plan|simulate|emulate|footprint|profile|train) [^#]+")
_CODE: Final = re.compile(r"`[^`]*`")
_CLAUSE: Final = re.compile(r"\(`([^`]*)`")
_HEADING: Final = re.compile(r"#{1,6} (.+)")
_FENCE: Final = "```"
_PROMPT: Final = "$ cleave "
_PROMPTS_TEST: Final = "tests/test_docs.py"
"""Runs commands that printed text begins with, and compares what they print with that text."""

SPECIFICATIONS: Final = frozenset({"docs/protocol.md"})
"""Pages of which every figure says what must be."""

SETTINGS: Final[Mapping[str, Collection[str]]] = {
    "docs/architecture.md": ("A multiplication",),
    "docs/dashboard.md": ("Energy and carbon",),
    "docs/devices.md": ("Joining",),
    "docs/emulation.md": ("Watching", "What is not modelled"),
    "docs/footprint.md": ("How energy is reckoned", "How carbon is reckoned"),
    "docs/how-to/laptops-overnight.md": ("3. Join each laptop",),
    "docs/idle.md": ("Lending an idle machine", "With the machine, as a service"),
    "docs/library.md": ("What went, and what stayed",),
    "docs/profiles.md": ("Slowing down",),
    "docs/scale.md": ("What each link carries",),
    "docs/serving.md": ("Limits",),
    "docs/simulation.md": ("Simulation",),
    "docs/training.md": ("Models", "Adapters", "When no device is left"),
    "docs/verification.md": ("What happens then", "Devices that fail"),
    "docs/what-limits-a-fleet.md": ("How to read it", "The formulas"),
}
"""Sections by page, of which a person has read that no figure was measured or predicted: they are
settings, limits, sizes, terms of formulas, examples, or published with their source. No pattern
tells these from claims."""


class Gap(Enum):
    """Why benchmarks do not reach figures of a section; the values say it to people."""

    BENCHMARK = "A benchmark is named that has not run to a good end"
    COMMAND = "Printed by a command of `cleave` that the section names, and by no benchmark"
    TEST = "Held by tests, which `make test` runs"
    SETTING = "Settings, limits, sizes, examples, published: nothing is measured or predicted here"
    NOTHING = "The section names nothing that prints them"


@dataclass(frozen=True)
class Section:
    """A section of a page that has figures.

    Attributes:
        page: the file, as people are told it.
        title: of the section.
        figures: how many it has.
        named: the benchmarks that it names.
        commands: of `cleave` that it names, those that print figures.
        tests: the files of tests that it names.
    """

    page: str
    title: str
    figures: int
    named: frozenset[str]
    commands: tuple[str, ...] = ()
    tests: frozenset[str] = frozenset()

    @property
    def is_setting(self) -> bool:
        """Say whether its figures are said to be neither measured nor predicted."""
        return self.page in SPECIFICATIONS or self.title in SETTINGS.get(self.page, ())


@dataclass(frozen=True)
class _Line:
    """A line of a page.

    Attributes:
        text: of the line.
        code: the language of the code that it is part of; empty for prose.
    """

    text: str
    code: str

    @property
    def figures(self) -> int:
        """Return how many figures it has."""
        if self.code:
            printed = self.code == "text" and not self.text.startswith(_PROMPT)
            return len(_NUMBER.findall(self.text)) if printed else 0
        return _figures_in(_CODE.sub("", self.text))

    @property
    def commands(self) -> list[str]:
        """Return the commands that print figures: in code for the shell, or in parentheses."""
        spans = _CLAUSE.findall(self.text) if not self.code else [self.text]
        return [found[0].strip() for span in spans if (found := _COMMAND.match(span))]


def _section(page: str, title: str, figures: int, lines: Sequence[_Line]) -> Section:
    text = "\n".join(line.text for line in lines)
    prompts = any(line.code == "text" and line.text.startswith(_PROMPT) for line in lines)
    return Section(
        page,
        title,
        figures,
        frozenset(_NAMED.findall(text)),
        tuple(dict.fromkeys(command for line in lines for command in line.commands)),
        frozenset([*_TEST.findall(text), *([_PROMPTS_TEST] if prompts else [])]),
    )


def sections_of(page: str, text: str) -> Iterator[Section]:
    """Yield the sections of a Markdown page that have figures: in prose, tables, printed text.

    Figures inside of other code are settings; what it names counts.
    """
    code, lines = "", list[_Line]()
    title = ""
    for line in [*text.splitlines(), "# end"]:
        if line.lstrip().startswith(_FENCE):
            code = "" if code else line.strip().removeprefix(_FENCE) or "code"
        elif not code and (heading := _HEADING.match(line)):
            if figures := sum(each.figures for each in lines):
                yield _section(page, title, figures, lines)
            title, lines = heading[1], []
        else:
            lines.append(_Line(line, code))


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
) -> Iterator[tuple[Section, Gap, str]]:
    """Yield the sections with figures that no benchmark has checked: each reason, in words.

    Args:
        claims: all sections with figures.
        done: the benchmarks that ran to their end and found their limits kept.
        reasons: of others, why they did not.
    """
    for claim in claims:
        if claim.is_setting:
            yield claim, Gap.SETTING, ""
            continue
        for name in sorted(claim.named - {*done}):
            why = reasons.get(name, "is not among those that ran")
            yield claim, Gap.BENCHMARK, f"`benchmarks.{name}` {why}"
        if claim.commands:
            yield claim, Gap.COMMAND, ", ".join(f"`{command}`" for command in claim.commands)
        if claim.tests:
            yield claim, Gap.TEST, ", ".join(f"`{test}`" for test in sorted(claim.tests))
        if not (claim.named or claim.commands or claim.tests):
            yield claim, Gap.NOTHING, ""
