"""The methods of training on a fleet, side by side: stages, tiles, the PS alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final


class Method(Enum):
    """How devices take part.

    TILES sends out multiplications. STAGES has devices train whole layers for a step. LOCAL trains
    on the PS alone. AUTO takes what is predicted to be fastest, and looks again when the fleet
    changes.
    """

    AUTO = "auto"
    TILES = "tiles"
    STAGES = "stages"
    LOCAL = "local"


_BY_TRAFFIC: Final = (Method.LOCAL, Method.STAGES, Method.TILES)
"""Of methods that are equally fast the one with the least traffic is taken."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """How long a step takes by each method, in seconds; infinite where it cannot be done."""

    stages_s: float
    tiles_s: float
    local_s: float

    @property
    def best(self) -> Method:
        """Return the method with the shortest step; of equal ones the one with least traffic."""
        return min(_BY_TRAFFIC, key=self.step_s)

    def step_s(self, method: Method) -> float:
        """Return the seconds of a step by one of the three methods."""
        return {
            Method.STAGES: self.stages_s,
            Method.TILES: self.tiles_s,
            Method.LOCAL: self.local_s,
        }[method]

    def __str__(self) -> str:
        ways = [
            f"{seconds:.3g} s {how}"
            for seconds, how in (
                (self.stages_s, "by stages"),
                (self.tiles_s, "by tiles"),
                (self.local_s, "on the parameter server alone"),
            )
            if seconds < float("inf")
        ]
        text = " and ".join([", ".join(ways[:-1]), ways[-1]] if len(ways) > 1 else ways)
        return f"a step is predicted to take {text}"


@dataclass(frozen=True, slots=True)
class CountedTimes:
    """How long one multiplication takes on the fleet and on the PS, and how often it occurs."""

    fleet_s: float
    ps_s: float
    count: int


def tiles_step_s(local_s: float, times: Iterable[CountedTimes]) -> float:
    """Return the seconds of a step by tiles, as `--offload auto` sends them out.

    The PS does the step, but for the multiplications that the fleet does sooner. Predictions of
    small multiplications here may exceed that of the whole step; it takes what they do at least.

    Args:
        local_s: of the step on the PS alone.
        times: of all multiplications.
    """
    times = list(times)
    saved_s = sum(each.count * max(0.0, each.ps_s - each.fleet_s) for each in times)
    least_s = sum(each.count * min(each.ps_s, each.fleet_s) for each in times)
    return max(local_s - saved_s, least_s)
