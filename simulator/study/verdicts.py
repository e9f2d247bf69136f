"""Tests whether a row of the study reaches a claimed ratio under all combinations of conditions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from simulator.claims import Verdict
from simulator.study.conditions import Axis

Settings = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Found:
    """The result of testing a claimed ratio under all combinations of conditions.

    Attributes:
        central: ratio in the central case of `conditions`.
        least, most: lowest and highest ratio of all combinations.
        held: number of combinations with at least the claimed ratio.
        tried: number of all combinations.
        only_if: maps a condition to text on the settings with which the claim can hold. Conditions
            that allow all settings are left out.
    """

    central: float
    least: float
    most: float
    held: int
    tried: int
    only_if: Settings

    @property
    def verdict(self) -> Verdict:
        """Return whether the claim holds in all, some or no combinations of conditions."""
        if self.held == self.tried:
            return Verdict.HOLDS
        return Verdict.SOMETIMES if self.held else Verdict.FAILS


def held_against(
    axes: Sequence[Axis], tried: Sequence[tuple[Settings, float]], claimed: float
) -> Found:
    """Test a claimed ratio under given combinations of conditions.

    Args:
        axes: conditions with their settings.
        tried: settings and ratio of each combination. The first combination is the central case.
        claimed: lower end of the claimed range of ratios.
    """
    ratios = [found for _, found in tried]
    holding = [settings for settings, found in tried if found >= claimed]
    return Found(
        ratios[0], min(ratios), max(ratios), len(holding), len(tried), _needed(axes, holding)
    )


def _needed(axes: Sequence[Axis], holding: Sequence[Settings]) -> Settings:
    """Map the name of each condition to text on the settings with which a claim can hold.

    Conditions are left out if the claim can hold with all their settings. The text lists the
    settings with which the claim can hold, or those with which it cannot hold if they are fewer.

    Args:
        axes: conditions with their settings.
        holding: settings of all combinations with at least the claimed ratio.
    """
    needed = {}
    for axis in axes:
        titles = [setting.title for setting in axis.settings]
        seen = {settings[axis.name] for settings in holding}
        left = [title for title in titles if title in seen]
        gone = [title for title in titles if title not in seen]
        if left and gone:
            few = len(left) <= len(gone)
            needed[axis.name] = " or ".join(left) if few else "not " + " nor ".join(gone)
    return needed


def together(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict that all verdicts agree on, or `Verdict.SOMETIMES` if they differ."""
    found = set(verdicts)
    return found.pop() if len(found) == 1 else Verdict.SOMETIMES
