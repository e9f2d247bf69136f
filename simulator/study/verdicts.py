"""Whether a published ratio holds: by row of the study, over all combinations of conditions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from simulator.claims import Verdict
from simulator.study.conditions import Axis

Settings = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Found:
    """A ratio over all combinations.

    Attributes:
        central: in the central case of `conditions`.
        least, most: of all.
        held, tried: combinations in which it is at least what is claimed, and all of them.
        only_if: what the combinations in which it holds have in common, and others have not.
    """

    central: float
    least: float
    most: float
    held: int
    tried: int
    only_if: Settings

    @property
    def verdict(self) -> Verdict:
        """Over these combinations."""
        if self.held == self.tried:
            return Verdict.HOLDS
        return Verdict.SOMETIMES if self.held else Verdict.FAILS


def held_against(
    axes: Sequence[Axis], tried: Sequence[tuple[Settings, float]], claimed: float
) -> Found:
    """A claim against combinations of conditions.

    Args:
        axes: their conditions.
        tried: settings and ratio of each combination, the central one first.
        claimed: the least that the claim says.
    """
    ratios = [found for _, found in tried]
    holding = [settings for settings, found in tried if found >= claimed]
    return Found(
        ratios[0], min(ratios), max(ratios), len(holding), len(tried), _needed(axes, holding)
    )


def _needed(axes: Sequence[Axis], holding: Sequence[Settings]) -> Settings:
    """By axis, what the combinations in which a claim holds all have; axes that do not matter not.

    As a text: the settings that are left, or those that are not where these are fewer.
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
    """Of several: holds where all do, fails where all do."""
    found = set(verdicts)
    return found.pop() if len(found) == 1 else Verdict.SOMETIMES
