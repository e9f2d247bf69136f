"""How resident sub-layers send gradients to the PS: when, how often, and how long it takes.

A group sums the weight gradients of its samples, W parameters in fp32; each of its r devices sums
1 / r of them. Sending the sums is a *flush*; one is due after the group's last sample. All groups
of all stages end at about the same time, so behind a card of I bytes/s the last flushes take

    C = sum over stages of 4 W G / I   seconds, where each device alone would need  4 W / (r U)

An earlier flush does not replace the last one, as every sample changes every sum. But groups need
not end together: if the G groups of a stage stop taking samples one after another, the first ones
flush while the others still compute (*staggered*). That hides all but the last group's flush; the
price is the time in which stopped groups are idle:

    tail = max(4 W / (r U),  C (1 / G + (G - 1)^2 / (2 G^2)))          between C / 2 and C

Flushing more often helps after losses: only what a lost device had summed since its last flush is
computed again. But a flush holds up the group, as its sums may not change while they are sent, and
with it all stages. One flush in a step was the best at every rate of losses that was tried (the
events take any number, `resident_events.Step`). So the plan is one flush, staggered.
"""

from __future__ import annotations

import numpy as np

from cleave.planner.shape import Floats


def tail_s(own_s: float, card_s: float, groups: int) -> float:
    """Return how many seconds longer a step takes because of its last flushes.

    Args:
        own_s: seconds that a device's flush takes if the card has no limit.
        card_s: C, seconds of all flushes through the card.
        groups: G, groups of a stage.
    """
    return max(own_s, card_s * (1 / groups + (groups - 1) ** 2 / (2 * groups**2)))


def flushed_s(ready_s: Floats, own_s: Floats, nbytes: Floats, ingress_bytes_per_s: float) -> float:
    """Return when all last flushes are at the PS, if its card is never idle while one is ready.

    ``max over d of (ready + own)`` and ``max over times t of (t + bytes ready from t on / I)``.

    Args:
        ready_s: by device or group, when its flush may begin.
        own_s: by device or group, seconds that its own link needs.
        nbytes: by device or group, bytes that it sends.
        ingress_bytes_per_s: I, the card's rate.
    """
    order = np.argsort(ready_s, kind="stable")
    from_then_on = np.cumsum(nbytes[order][::-1])[::-1]
    by_card = ready_s[order] + from_then_on / ingress_bytes_per_s
    return float(max((ready_s + own_s).max(), by_card.max()))


def staggered_s(end_s: float, window_s: float, groups: int) -> Floats:
    """Return when each group of a stage takes its last sample; infinite for the last group.

    Args:
        end_s: when the last sample is through.
        window_s: seconds before `end_s` in which groups stop one after another.
    """
    stops: Floats = end_s - window_s * np.arange(groups - 1, -1, -1) / groups
    stops[-1] = np.inf
    return stops
