"""Gradients of resident sub-layers on their way to the PS: when, how often, and how long it takes.

A group sums the weight gradients of its samples, W parameters in fp32, each of its r devices 1 / r
of them. Sending them is a *flush*, and one is due after the group's last sample. All groups of all
stages end at about the same time, so behind a card of I bytes/s the last flushes are a burst of

    C = sum over stages of 4 W G / I   seconds, where each device alone would need  4 W / (r U)

No flush can be saved by an earlier one, as every sample changes every sum. But groups need not end
together: the G groups of a stage stop taking samples one after another, so that the first flush
while the others still work (*staggered*). That hides all but the last group's flush and takes from
the samples the time in which stopped groups are idle:

    tail = max(4 W / (r U),  C (1 / G + (G - 1)^2 / (2 G^2)))          between C / 2 and C

Flushing more often is for losses: only what a lost device had summed since its last flush is
computed again. But a flush holds up the group, as its sums may not change while they are sent, and
with it all stages; once in a step was the best at every rate of losses that was tried (the events
take any number, `resident_events.Step`). So one flush, staggered, is the plan.
"""

from __future__ import annotations

import numpy as np

from cleave.planner.shape import Floats


def tail_s(own_s: float, card_s: float, groups: int) -> float:
    """How much longer a step takes for its last flushes.

    Args:
        own_s: of a device, if the card were without limit.
        card_s: C, of all flushes through the card.
        groups: G.
    """
    return max(own_s, card_s * (1 / groups + (groups - 1) ** 2 / (2 * groups**2)))


def flushed_s(ready_s: Floats, own_s: Floats, nbytes: Floats, ingress_bytes_per_s: float) -> float:
    """When everybody's last flush is at the PS, if its card is never idle while one is ready.

    ``max over d of (ready + own)`` and ``max over times t of (t + bytes ready from t on / I)``.

    Args:
        ready_s: by flusher, when it may begin.
        own_s: what its own link needs.
        nbytes: that it sends.
        ingress_bytes_per_s: I.
    """
    order = np.argsort(ready_s, kind="stable")
    from_then_on = np.cumsum(nbytes[order][::-1])[::-1]
    by_card = ready_s[order] + from_then_on / ingress_bytes_per_s
    return float(max((ready_s + own_s).max(), by_card.max()))


def staggered_s(end_s: float, window_s: float, groups: int) -> Floats:
    """When each group of a stage takes its last sample; the last one never stops.

    Args:
        end_s: of the samples.
        window_s: before that, in which groups stop one after another.
    """
    stops: Floats = end_s - window_s * np.arange(groups - 1, -1, -1) / groups
    stops[-1] = np.inf
    return stops
