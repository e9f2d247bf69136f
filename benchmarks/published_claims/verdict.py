"""Claims, their trials under several conditions, and their verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

# the paper's tiles, tiles from Cleave's planner, and stages
OURS: Final[tuple[str, ...]] = ("cleave-2d", "cleave", "cleave-stages")


class Verdict(Enum):
    """Whether a claim holds in all, some or none of its trials."""

    HOLDS = "holds"
    SOMETIMES = "holds only under some conditions"
    FAILS = "does not hold"
    UNTRIED = "not tried"


@dataclass(frozen=True, slots=True)
class ClaimTrial:
    """The test of a claim under one set of conditions.

    Attributes:
        method: name of the tested Cleave method.
        against: baseline, or variant of the measured quantity; empty if neither applies.
        card: name of the parameter server's network card.
        held: whether the claim holds.
        reached: measured quantity in `Claim.unit`; None if the method has no plan.
    """

    method: str
    devices: int
    against: str
    card: str
    model: str
    held: bool
    reached: float | None


@dataclass(frozen=True, slots=True)
class Claim:
    """A tested claim, and its section in the report.

    Attributes:
        holds_at: text that states when the claim holds, such as "4x or more".
        columns, rows: headings and cells of the table of results.
        unit: text that follows a value of `ClaimTrial.reached`.
    """

    title: str
    holds_at: str
    reading: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    trials: Sequence[ClaimTrial]
    unit: str = "x"

    def verdict(self, method: str) -> Verdict:
        """Return whether the claim holds in all, some or none of a method's trials."""
        return _verdict(self._of(method))

    def reached(self, method: str) -> str:
        """Return the range of a method's results as text; empty if no trial exists.

        For example, "2x to 5.1x, 3 of 8" means that the claim holds in 3 of 8 trials.
        """
        trials = self._of(method)
        if not trials:
            return ""
        found = sorted(trial.reached for trial in trials if trial.reached is not None)
        ends = dict.fromkeys(f"{figure(value)}{self.unit}" for value in (found[:1] + found[-1:]))
        reached, missing = " to ".join(ends) or "no plan", len(trials) - len(found)
        without = f" (no plan in {missing})" if found and missing else ""
        return f"{reached}, {sum(trial.held for trial in trials)} of {len(trials)}{without}"

    def only_if(self, method: str) -> str:
        """Return a description of the conditions under which the claim holds for a method.

        The description is empty if the claim holds in all trials or in none.
        """
        trials = self._of(method)
        if _verdict(trials) is not Verdict.SOMETIMES:
            return ""
        held = [trial for trial in trials if trial.held]
        words = [
            _some("with", [t.model for t in trials], [t.model for t in held]),
            _some("against", [t.against for t in trials], [t.against for t in held]),
            _some("PS card", [t.card for t in trials], [t.card for t in held]),
        ]
        least, most = min(t.devices for t in held), max(t.devices for t in held)
        if least == most and {t.devices for t in trials} != {least}:
            words.append(f"on {least} devices")
        elif least > min(t.devices for t in trials):
            words.append(f"on {least} devices or more")
        elif most < max(t.devices for t in trials):
            words.append(f"on {most} devices or fewer")
        share = f"{len(held)} of {len(trials)} trials"
        return "; ".join([share, *filter(None, words)])

    def _of(self, method: str) -> list[ClaimTrial]:
        return [trial for trial in self.trials if trial.method == method]


def figure(value: float) -> str:
    """Format a number for a table: two digits below 99, an integer up to 10000, else ">10000"."""
    if value > 10_000:
        return ">10000"
    return f"{value:.2g}" if value < 99 else f"{value:.0f}"


def _verdict(trials: Iterable[ClaimTrial]) -> Verdict:
    held = {trial.held for trial in trials}
    if not held:
        return Verdict.UNTRIED
    if held == {True}:
        return Verdict.HOLDS
    return Verdict.SOMETIMES if True in held else Verdict.FAILS


def _some(word: str, tried: Sequence[str], held: Sequence[str]) -> str:
    if set(tried) == set(held):
        return ""
    return f"{word} {', '.join(dict.fromkeys(held))}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table. Vertical bars in cells are escaped."""
    lines = ["| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
    return lines + [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows
    ]


def paragraphs(*parts: str | Sequence[str]) -> list[str]:
    """Return the lines of Markdown parts, each after an empty line.

    A part is a heading, a paragraph, or the lines of a table.
    """
    return [line for part in parts for line in ("", *([part] if isinstance(part, str) else part))]
