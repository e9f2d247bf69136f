"""What a claim is held against: trials under one condition each, a verdict, when it holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

TILES: Final[tuple[str, ...]] = ("cleave", "cleave-2d")
"""What is built and what was published."""

NOT_BUILT: Final[tuple[str, ...]] = ("cleave-resident", "cleave-mixed")
"""What the simulator alone can do yet."""

OURS: Final[tuple[str, ...]] = TILES + NOT_BUILT


class Verdict(Enum):
    """Over all conditions that were tried."""

    HOLDS = "holds"
    SOMETIMES = "holds only under some conditions"
    FAILS = "does not hold"
    UNTRIED = "not tried"


@dataclass(frozen=True, slots=True)
class ClaimTrial:
    """A claim under one condition.

    Attributes:
        method: ours.
        devices: that were offered.
        against: a baseline, or a way to count; empty where there is only one.
        card: the PS's, in words.
        model: that is trained.
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
        trials: that the verdicts rest on.
        columns, rows: of the table that shows them.
    """

    title: str
    reading: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    trials: tuple[ClaimTrial, ...]

    @property
    def verdict(self) -> Verdict:
        """By tiles."""
        return _verdict(self._of(TILES))

    @property
    def not_built(self) -> Verdict:
        """By what is not built yet."""
        return _verdict(self._of(NOT_BUILT))

    def only_if(self, methods: Sequence[str]) -> str:
        """What trials that hold have in common and others do not; empty where all hold or none."""
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
