"""The time of a step over resident sub-layers while devices leave at random, in closed form.

A lost device costs its share of the gradients that were not flushed yet, not the step. Its group is
*away* until the loss is noticed and a spare has fetched the weights and computed that share again;
meanwhile the other G - 1 groups of the stage take the samples. A group has gradients in the
backward half of a step, and then half of them on average. So with B / G samples for a group and a
seconds for the backward pass of one,

    away = detection + weights / D + a B / (4 G)

Samples pass all stages, so a stage with a group away holds up the others; but stages that have a
group away at the same time hold them up only once. With n devices, each lost at a rate lambda, no
group is away in the share exp(-n lambda away) of the time (a queue that serves all at once), so

    T = step / (1 - (1 - exp(-n lambda away)) / G)        for G = 1:  step exp(n lambda away)

Ignored are two groups of one stage that are away together, and a stage that is idle when it loses a
group. While losses make a step up to 40 % longer, this is within 15 % of the events
(`resident_events.Losses`); with more losses it may be far off, either way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ResidentLosses:
    """The times of a step, or of its part over resident sub-layers, that losses change.

    Attributes:
        step_s: seconds without losses.
        devices, groups: n, and G: groups of each stage.
        weights_s: seconds in which a spare fetches the weights.
        again_s: a B / G, seconds of the backward pass of all samples of a group.
    """

    step_s: float
    devices: int
    groups: float
    weights_s: float
    again_s: float

    def away_s(self, detection_s: float) -> float:
        """Return the mean seconds from a loss until a spare has caught up."""
        return detection_s + self.weights_s + self.again_s / 4

    def with_losses_s(self, losses_per_s: float, detection_s: float) -> float:
        """See `UnderLosses.with_losses_s`."""
        away = self.devices * losses_per_s * self.away_s(detection_s)
        if away > 100:  # nobody would wait for that
            return math.inf
        return self.step_s / (1 + math.expm1(-away) / self.groups)
