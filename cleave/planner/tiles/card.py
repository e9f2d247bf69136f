"""Arrival times of downloads, as limited by device links or by the PS's network card.

The card divides its rate equally among the devices to which it is still sending. If a device's own
link is slower than an equal share, the unused bandwidth is divided among the other devices.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from cleave.planner.tiles.shape import Floats

_MOST_TIMES: Final = 256
"""Maximum number of distinct times at which downloads of devices end.

In a larger fleet, devices with similar download times are treated as ending at the latest of these
times.
"""

Places = npt.NDArray[np.intp]


class Arrivals(Protocol):
    """Computes the times at which given numbers of bytes have been sent to devices."""

    def sent_s(self, places: Places, nbytes: Floats) -> Floats:
        """Return the seconds until `nbytes` bytes have been sent to each device.

        Args:
            places: indices of the devices.
            nbytes: for each device, the number of bytes.
        """
        ...


class OwnLinks:
    """Arrival times if each device receives at the rate of its own link."""

    def __init__(self, bytes_per_s: Floats) -> None:
        self._bytes_per_s = bytes_per_s

    def sent_s(self, places: Places, nbytes: Floats) -> Floats:
        return nbytes / self._bytes_per_s[places]


class SharedCard:
    """Arrival times if all devices share the PS's network card.

    Args:
        nbytes: for each device, total bytes of its download.
        bytes_per_s: for each device, rate of its link.
        card_bytes_per_s: sending rate of the card.
    """

    def __init__(self, nbytes: Floats, bytes_per_s: Floats, card_bytes_per_s: float) -> None:
        # The times at which devices are done, and the bytes sent to each device by then.
        at_once = -(-len(nbytes) // _MOST_TIMES)
        now_s, sent = 0.0, np.zeros(len(nbytes))
        times, sums = [now_s], [sent]
        left = np.flatnonzero(nbytes > 0)
        while len(left):
            rates = equal_shares(bytes_per_s[left], card_bytes_per_s)
            needs_s = (nbytes[left] - sent[left]) / rates
            few = min(at_once, len(left)) - 1
            step_s = float(np.partition(needs_s, few)[few])
            ready = needs_s <= step_s * (1 + 1e-9)
            sent = sent.copy()
            sent[left] = np.where(ready, nbytes[left], sent[left] + rates * step_s)
            now_s += step_s
            times.append(now_s)
            sums.append(sent)
            left = left[~ready]
        self._times_s, self._sent = np.array(times), np.array(sums)

    def sent_s(self, places: Places, nbytes: Floats) -> Floats:
        sent = self._sent[:, places]
        after = np.clip((sent < nbytes).sum(axis=0), 1, len(sent) - 1)
        which = np.arange(len(places))
        low, high = sent[after - 1, which], sent[after, which]
        share = np.clip((nbytes - low) / np.maximum(high - low, 1e-300), 0.0, 1.0)
        found: Floats = self._times_s[after - 1] + share * (
            self._times_s[after] - self._times_s[after - 1]
        )
        return found


def equal_shares(most: Floats, total: float) -> Floats:
    """Share a total equally, up to each one's maximum; others get what a small maximum leaves."""
    order = np.sort(most)
    count = len(order)
    # Candidate levels: the first n get their maximum, and the others share the rest equally.
    taken = np.concatenate(([0.0], np.cumsum(order)[:-1]))
    levels = (total - taken) / np.arange(count, 0, -1)
    level = levels[np.argmax(levels <= order)] if (levels <= order).any() else np.inf
    shares: Floats = np.minimum(most, level)
    return shares
