"""What a step over resident sub-layers takes while devices leave at random, in closed form.

What is lost with a device is its share of the gradients that were not flushed yet, not the step:
its group is *away* while the loss is noticed, a spare fetches the weights and computes that share
again, and the other G - 1 groups of the stage take the samples meanwhile. A group has gradients in
the backward half of a step, and half of them on average, so with B / G samples for a group and a
seconds for the backward pass of one,

    away = detection + weights / D + a B / (4 G)

Samples pass all stages, so a stage with a group away holds up the others; but stages that have one
away at the same time hold them up only once. Of n devices, each lost at a rate lambda, none is away
in the share exp(-n lambda away) of the time (a queue that serves all at once), so

    T = step / (1 - (1 - exp(-n lambda away)) / G)        for G = 1:  step exp(n lambda away)

Two groups of one stage that are away together are not counted, nor is that a stage may be idle when
it loses one. While losses make a step up to 40 % longer, this is within 15 % of the events
(`resident_events.Losses`); with more of them it may be far off, either way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ResidentLosses:
    """What a step, or its part over resident sub-layers, is made of when devices leave.

    Attributes:
        step_s: without losses.
        devices, groups: n, and G of each stage.
        weights_s: for a spare.
        again_s: a B / G, the backward pass of all samples of a group.
    """

    step_s: float
    devices: int
    groups: float
    weights_s: float
    again_s: float

    def away_s(self, detection_s: float) -> float:
        """From when a device is lost until a spare has done what it did, on average."""
        return detection_s + self.weights_s + self.again_s / 4

    def with_losses_s(self, losses_per_s: float, detection_s: float) -> float:
        """Seconds for a step."""
        away = self.devices * losses_per_s * self.away_s(detection_s)
        if away > 100:  # nobody would wait for that
            return math.inf
        return self.step_s / (1 + math.expm1(-away) / self.groups)
