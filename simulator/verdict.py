"""Claims with their trials, one per condition, and their verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

OURS: Final[tuple[str, ...]] = ("cleave-2d", "cleave", "cleave-stages")
"""Published tiles, tiles as Cleave plans them, and whole layers on devices."""


class Verdict(Enum):
    """Whether a claim holds, over all conditions tried."""

    HOLDS = "holds"
    SOMETIMES = "holds only under some conditions"
    FAILS = "does not hold"
    UNTRIED = "not tried"


@dataclass(frozen=True, slots=True)
class ClaimTrial:
    """A claim under one condition.

    Attributes:
        method: Cleave's method.
        devices: number of devices offered.
        against: baseline or way of counting; empty if there is only one.
        card: name of the PS's network card.
        model: trained model.
        reached: the figure that the claim is about; None without a plan.
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
    """A claim, its results, and how to read them.

    Attributes:
        holds_at: threshold at which the claim holds, as text like "4x or more".
        trials: trials that decide the verdicts.
        columns, rows: table of the results.
        unit: unit of the claim's figure, as written after numbers.
    """

    title: str
    holds_at: str
    reading: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    trials: tuple[ClaimTrial, ...]
    unit: str = "x"

    def verdict(self, method: str) -> Verdict:
        """Return the verdict over trials with this method."""
        return _verdict(self._of(method))

    def reached(self, method: str) -> str:
        """Return text on a method's range of results and the number of trials in which it holds.

        The text is empty if the method was not tried.
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
        """Return the conditions of the trials that hold; empty if all trials hold or none does."""
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
    """Return a number with two significant digits, all integer digits from 99 on, or ">10000"."""
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
