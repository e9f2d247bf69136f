"""When devices have received their bytes: through their own links, or through the PS's shared card.

The card gives an equal share to each device that it still sends to. Bandwidth that a device's own
link cannot use goes to the others, as does the share of a device that is done.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from cleave.planner.tiles.shape import Floats

_MOST_TIMES: Final = 256
"""In a larger fleet, several devices count as done when the last of them is (slightly too late)."""

Places = npt.NDArray[np.intp]


class Arrivals(Protocol):
    """Tells when devices have been sent a number of bytes."""

    def sent_s(self, places: Places, nbytes: Floats) -> Floats:
        """Return the seconds until the devices at `places` have been sent `nbytes` each."""
        ...


class OwnLinks:
    """Arrivals when every device receives at its own link's rate."""

    def __init__(self, bytes_per_s: Floats) -> None:
        self._bytes_per_s = bytes_per_s

    def sent_s(self, places: Places, nbytes: Floats) -> Floats:
        return nbytes / self._bytes_per_s[places]


class SharedCard:
    """Arrivals when devices share one card.

    Args:
        nbytes: total bytes sent to each device.
        bytes_per_s: rates of the devices' links.
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
