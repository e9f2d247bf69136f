"""Claims: their trials under one condition each, their verdicts, and when they hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

TILES: Final[tuple[str, ...]] = ("cleave", "cleave-2d")
"""Multiplications on devices: Cleave's own tiles, and those that were published."""

STAGES: Final[tuple[str, ...]] = ("cleave-stages",)
"""Whole layers on devices."""

OURS: Final[tuple[str, ...]] = TILES + STAGES


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
    """

    method: str
    devices: int
    against: str
    card: str
    model: str
    held: bool


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim, what was found, and how to read it.

    Attributes:
        trials: the trials that decide the verdicts.
        columns, rows: the table that shows the results.
    """

    title: str
    reading: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    trials: tuple[ClaimTrial, ...]

    def verdict(self, methods: Sequence[str]) -> Verdict:
        """Return the verdict over trials with these methods."""
        return _verdict(self._of(methods))

    def only_if(self, methods: Sequence[str]) -> str:
        """Say what only the trials that hold have in common; empty if all hold or none does."""
        trials = self._of(methods)
        if _verdict(trials) is not Verdict.SOMETIMES:
            return ""
        held = [trial for trial in trials if trial.held]
        words = [
            _some("by", [t.method for t in trials], [t.method for t in held]),
            _some("with", [t.model for t in trials], [t.model for t in held]),
            _some("against", [t.against for t in trials], [t.against for t in held]),
            _some("PS card", [t.card for t in trials], [t.card for t in held]),
        ]
        least, most = min(t.devices for t in held), max(t.devices for t in held)
        if least > min(t.devices for t in trials):
            words.append(f"on {least} devices or more")
        elif most < max(t.devices for t in trials):
            words.append(f"on {most} devices or fewer")
        share = f"{len(held)} of {len(trials)} trials"
        return "; ".join([share, *filter(None, words)])

    def _of(self, methods: Sequence[str]) -> list[ClaimTrial]:
        return [trial for trial in self.trials if trial.method in methods]


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
