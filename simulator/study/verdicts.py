"""Whether a published ratio holds for a row of the study, over all combinations of conditions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from simulator.claims import Verdict
from simulator.study.conditions import Axis

Settings = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Found:
    """A ratio over all combinations of conditions.

    Attributes:
        central: ratio in the central case of `conditions`.
        least, most: smallest and largest ratio of all combinations.
        held, tried: number of combinations that reach the claimed ratio, and of all combinations.
        only_if: settings common to all combinations that hold, by axis.
    """

    central: float
    least: float
    most: float
    held: int
    tried: int
    only_if: Settings

    @property
    def verdict(self) -> Verdict:
        """Return the verdict over all combinations."""
        if self.held == self.tried:
            return Verdict.HOLDS
        return Verdict.SOMETIMES if self.held else Verdict.FAILS


def held_against(
    axes: Sequence[Axis], tried: Sequence[tuple[Settings, float]], claimed: float
) -> Found:
    """Test a claim on combinations of conditions.

    Args:
        axes: the conditions.
        tried: settings and ratio of each combination, the central one first.
        claimed: lower end of the claimed range.
    """
    ratios = [found for _, found in tried]
    holding = [settings for settings, found in tried if found >= claimed]
    return Found(
        ratios[0], min(ratios), max(ratios), len(holding), len(tried), _needed(axes, holding)
    )


def _needed(axes: Sequence[Axis], holding: Sequence[Settings]) -> Settings:
    """Return by axis the settings with which a claim can hold.

    Axes that do not matter are left out. The text names the settings with which the claim holds, or
    the others if those are fewer.
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
    """Return the common verdict if all agree, else `Verdict.SOMETIMES`."""
    found = set(verdicts)
    return found.pop() if len(found) == 1 else Verdict.SOMETIMES
