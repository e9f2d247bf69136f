"""When devices have been sent what: each by its own link, or all through the PS's network card.

The card gives each device that it still sends to an equal share, as connections of one card share
it; what a device's own link cannot take is shared by the others, and so is the share of a device
that has been sent all it gets.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from cleave.planner.tiles.shape import Floats

_MOST_TIMES: Final = 256
"""Of a larger fleet several devices are taken to have been sent all they get at one time: the last
one's, so that a prediction is rather too long."""

Places = npt.NDArray[np.intp]


class Arrivals(Protocol):
    """Tells when devices have been sent how much."""

    def sent_s(self, places: Places, nbytes: Floats) -> Floats:
        """Return when the devices at these places have been sent so many bytes, in seconds."""
        ...


class OwnLinks:
    """Every device is sent as much as its link takes.

    Args:
        bytes_per_s: of the devices' links.
    """

    def __init__(self, bytes_per_s: Floats) -> None:
        self._bytes_per_s = bytes_per_s

    def sent_s(self, places: Places, nbytes: Floats) -> Floats:
        """See `Arrivals.sent_s`."""
        return nbytes / self._bytes_per_s[places]


class SharedCard:
    """Devices are sent their bytes through one card.

    Args:
        nbytes: what each device is sent in all.
        bytes_per_s: of the devices' links.
        card_bytes_per_s: of the card.
    """

    def __init__(self, nbytes: Floats, bytes_per_s: Floats, card_bytes_per_s: float) -> None:
        # Times at which a device has been sent everything, and what each has been sent by then.
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
        """See `Arrivals.sent_s`."""
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
    """Share a total equally, where none takes more than its most and others take what it leaves."""
    order = np.sort(most)
    count = len(order)
    # If all but the first n take the same, that is what those n leave, divided among the others.
    taken = np.concatenate(([0.0], np.cumsum(order)[:-1]))
    levels = (total - taken) / np.arange(count, 0, -1)
    level = levels[np.argmax(levels <= order)] if (levels <= order).any() else np.inf
    shares: Floats = np.minimum(most, level)
    return shares
