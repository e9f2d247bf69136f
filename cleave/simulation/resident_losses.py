"""What a step over resident sub-layers takes while devices leave at random, in closed form.

What is lost with a device is its share of the gradients since the last flush, not the step: its
group of r is away while the loss is noticed, a spare fetches the weights and computes that share
again, and the other G - 1 groups of the stage take the samples meanwhile. With K flushes of f
seconds, B / G samples for a group and a seconds for the backward pass of one,

    away(K) = detection + weights / D + a B / (2 G K)        half of what lies between two flushes
    T(K)    = step + (K - 1) f + E[N] away(K) / G,           N = most losses of any of P stages

A stage of r G devices, each lost at a rate lambda, has a Poisson number of losses with mean
mu = lambda r G T, and all stages together wait for the one that has most,

    E[N] = sum over k >= 0 of  1 - F(k)^P                     F the distribution of Poisson(mu)

T is on both sides; K is the number of flushes with the least T. Losses of a stage one after another
are exact while its groups are seldom away together; in the last flush they cost a little more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

_ROUNDS: Final = 60
_NEVER: Final = 100.0  # times as long as without losses


@dataclass(frozen=True, slots=True)
class ResidentLosses:
    """What a step, or its part over resident sub-layers, is made of when devices leave.

    Attributes:
        step_s: without losses.
        stages, groups, r: P, G and devices in a group.
        weights_s: for a spare.
        again_s: the backward pass of a sample.
        samples: of a group.
        flush_s: of a group.
    """

    step_s: float
    stages: int
    groups: float
    r: int
    weights_s: float
    again_s: float
    samples: float
    flush_s: float

    def with_losses_s(self, losses_per_s: float, detection_s: float) -> float:
        """Seconds for a step with as many flushes as are best; infinite where it never ends."""
        return min(
            self.flushing_s(flushes, losses_per_s, detection_s) for flushes in self._numbers()
        )

    def flushes(self, losses_per_s: float, detection_s: float) -> int:
        """K, as many as are best."""
        return min(self._numbers(), key=lambda k: self.flushing_s(k, losses_per_s, detection_s))

    def flushing_s(self, flushes: int, losses_per_s: float, detection_s: float) -> float:
        """T(K)."""
        away_s = detection_s + self.weights_s + self.again_s * self.samples / (2 * flushes)
        bare_s = self.step_s + (flushes - 1) * self.flush_s
        time_s = bare_s
        for _ in range(_ROUNDS):
            mean = losses_per_s * self.r * self.groups * time_s
            longer_s = bare_s + _most(mean, self.stages) * away_s / self.groups
            if longer_s > _NEVER * bare_s:
                return math.inf
            if longer_s <= time_s * (1 + 1e-9):
                break
            time_s = longer_s
        return time_s

    def _numbers(self) -> list[int]:
        return [1 << i for i in range(max(1, int(self.samples)).bit_length())]


def _most(mean: float, stages: int) -> float:
    """E[N]: the expected maximum of so many Poisson numbers of this mean."""
    if mean <= 0:
        return 0.0
    expected, k = 0.0, 0
    probability = math.exp(-mean)
    below = probability
    if not probability:  # so many that the maximum of normal numbers is as good
        return mean + math.sqrt(2 * mean * math.log(max(2, stages)))
    while True:
        missing = 1 - below**stages
        expected += missing
        if missing < 1e-12 and k > mean:
            return expected
        k += 1
        probability *= mean / k
        below = min(1.0, below + probability)
