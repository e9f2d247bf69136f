"""Learning rate schedules: a linear warm-up, followed by cosine, linear, WSD or no decay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum


class Decay(Enum):
    """The shape of the learning rate after the warm-up. Values are the names in `--schedule`."""

    COSINE = "cosine"
    """The rate follows half a cosine period until the last step."""

    LINEAR = "linear"
    """The rate falls linearly until the last step."""

    CONSTANT = "constant"
    """The rate stays at its peak."""

    WSD = "wsd"
    """Warm-up, stable, decay: the rate falls linearly during the last `decay_steps` steps only."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A learning rate schedule with linear warm-up.

    Attributes:
        peak: the maximum learning rate, reached at the end of the warm-up.
        warmup_steps: number of warm-up steps.
        steps: number of steps of the run.
        decay: shape of the learning rate after the warm-up.
        floor: learning rate at the end of the decay, as a fraction of the peak.
        decay_steps: number of decay steps in the WSD schedule.
    """

    peak: float
    warmup_steps: int
    steps: int
    decay: Decay = Decay.COSINE
    floor: float = 0.1
    decay_steps: int = 0

    def rate(self, step: int) -> float:
        """Return the learning rate of a step.

        Args:
            step: index of the step, counted from 0.
        """
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
