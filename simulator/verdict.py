"""Claims: their trials under one condition each, their verdicts, and when they hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

OURS: Final[tuple[str, ...]] = ("cleave-2d", "cleave", "cleave-stages")
"""Tiles as they were published, tiles as Cleave plans them, and whole layers on devices."""


class Verdict(Enum):
    """Whether a claim holds, over all conditions that were tried."""

    HOLDS = "holds"
    SOMETIMES = "holds only under some conditions"
    FAILS = "does not hold"
    UNTRIED = "not tried"


@dataclass(frozen=True, slots=True)
class ClaimTrial:
    """A claim under one condition.

    Attributes:
        method: the method of Cleave.
        devices: number of devices that were offered.
        against: a baseline, or a way to count; empty where there is only one.
        card: the PS's card, in words.
        model: the model that is trained.
        reached: the figure that the claim is about; None where there is no plan.
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
    """A claim, what was found, and how to read it.

    Attributes:
        holds_at: the figures with which it holds, in words, as "4x or more".
        trials: the trials that decide the verdicts.
        columns, rows: the table that shows the results.
        unit: of the figure that it is about, as it is written behind numbers.
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
        """Say what a method reaches, from the least to the most, and in how many trials it holds.

        Return an empty text if it was not tried.
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
        """Say what only the trials that hold have in common; empty if all hold or none does."""
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
    """Return a number with two digits, or more if these are before the point."""
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
