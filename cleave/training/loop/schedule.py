"""Learning rate schedules: warm-up, then one of the usual decays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum


class Decay(Enum):
    """How the learning rate falls after the warm-up; the values are those of `--schedule`."""

    COSINE = "cosine"
    """Half a cosine, until the last step."""

    LINEAR = "linear"
    """Linear, until the last step."""

    CONSTANT = "constant"
    """No decay."""

    WSD = "wsd"
    """Warm-up, stable, decay: linear, in the last steps only."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A learning rate schedule with linear warm-up.

    Attributes:
        peak: the largest learning rate.
        warmup_steps: steps until the peak is reached.
        steps: steps in total.
        decay: how the rate falls after the warm-up.
        floor: final rate as a share of the peak.
        decay_steps: number of decay steps in the WSD schedule.
    """

    peak: float
    warmup_steps: int
    steps: int
    decay: Decay = Decay.COSINE
    floor: float = 0.1
    decay_steps: int = 0

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        first = self.warmup_steps
        if self.decay is Decay.WSD:
            first = max(first, self.steps - self.decay_steps)
        share = min(1.0, max(0.0, (step - first) / max(1, self.steps - first)))
        match self.decay:
            case Decay.CONSTANT:
                left = 1.0
            case Decay.COSINE:
                left = 0.5 * (1 + math.cos(math.pi * share))
            case _:
                left = 1 - share
        return self.peak * (self.floor + (1 - self.floor) * left)
