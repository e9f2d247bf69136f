"""Times at which a device received, computed and sent its last blocks, as seen by the PS. Pure."""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Final, NamedTuple

KEPT: Final = 64
"""Number of blocks remembered per device."""


class Lane(Enum):
    """A device's activity during a time span; users read the values."""

    RECEIVE = "receive"
    COMPUTE = "compute"
    SEND = "send"


class TimeSpan(NamedTuple):
    """A span in a device's timeline, in seconds on the runtime's clock."""

    lane: Lane
    start_s: float
    end_s: float


class BlockTimes:
    """The times of the last blocks (or graph runs and fetched arrays) of one session.

    The class reconstructs a device's timeline from the PS's send and receive times and the device's
    compute times. By the protocol, a device processes messages in order and sends each result at
    once. Time that bytes spend in system buffers counts as compute or send time.
    """

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._asked: dict[int, tuple[float, float]] = {}
        self._fetched: dict[int, float] = {}
        self._spans: deque[TimeSpan] = deque(maxlen=len(Lane) * KEPT)
        self._computed_s = self._sent_s = 0.0

    def sending(self, now_s: float) -> None:
        """Record that the PS starts to write inputs to the device."""
        if self._began_s is None:
            self._began_s = now_s

    def asked(self, run: int, now_s: float) -> None:
        """Record that a run request was written; its inputs were written before it."""
        began_s = now_s if self._began_s is None else self._began_s
        self._asked[run] = (began_s, now_s)
        self._began_s = None

    def fetching(self, run: int, now_s: float) -> None:
        """Record that the PS asked for an array that the device computes."""
        self._fetched[run] = now_s

    def computed(self, run: int, compute_s: float, now_s: float) -> None:
        """Record that a run finished and its outputs stay on the device."""
        asked = self._asked.pop(run, None)
        if asked is None:
            return
        began_s, asked_s = asked
        start_s = min(max(asked_s, self._computed_s), now_s)
        self._computed_s = min(start_s + compute_s, now_s)
        self._spans.append(TimeSpan(Lane.RECEIVE, began_s, asked_s))
        self._spans.append(TimeSpan(Lane.COMPUTE, start_s, self._computed_s))

    def answered(self, run: int, compute_s: float, now_s: float) -> None:
        """Record that the result of a run, or a fetched array, has arrived."""
        fetched_s = self._fetched.pop(run, None)
        if fetched_s is None:
            if run not in self._asked:
                return
            self.computed(run, compute_s, now_s)
            fetched_s = self._computed_s
        start_s = min(max(fetched_s, self._computed_s, self._sent_s), now_s)
        self._sent_s = now_s
        self._spans.append(TimeSpan(Lane.SEND, start_s, now_s))

    def given_up(self, runs: tuple[int, ...]) -> None:
        """Discard runs and arrays that are no longer expected."""
        for run in runs:
            self._asked.pop(run, None)
            self._fetched.pop(run, None)

    def spans(self) -> list[TimeSpan]:
        """Return the latest time spans, in the order in which the PS learned of them."""
        return list(self._spans)
