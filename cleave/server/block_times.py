"""Estimate the times at which devices received, computed and sent blocks."""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Final, NamedTuple

KEPT: Final = 64  # number of recent blocks whose time spans are kept for each session


class Lane(Enum):
    """The activity of a device during a time span. Users see the enum values."""

    RECEIVE = "receive"
    COMPUTE = "compute"
    SEND = "send"


MOST_SPANS: Final = len(Lane) * KEPT  # maximum number of time spans kept for each session


class TimeSpan(NamedTuple):
    """One activity of a device, with start and end in seconds on the runtime's clock."""

    lane: Lane
    start_s: float
    end_s: float


class BlockTimes:
    """The timeline of one session's latest blocks, graph runs and fetched arrays.

    The times are estimated from the PS's send and receive times and the device's compute times. The
    estimate assumes that devices process messages in order and send each result immediately. Time
    that data spends in system buffers counts as compute time or send time.
    """

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._asked: dict[int, tuple[float, float]] = {}
        self._fetched: dict[int, float] = {}
        self._spans: deque[TimeSpan] = deque(maxlen=MOST_SPANS)
        self._computed_s = self._sent_s = 0.0

    def sending(self, now_s: float) -> None:
        """Record that the PS starts to send a run's inputs."""
        if self._began_s is None:
            self._began_s = now_s

    def asked(self, run: int, now_s: float) -> None:
        """Record that the PS has sent the request for a run, after the run's inputs."""
        began_s = now_s if self._began_s is None else self._began_s
        self._asked[run] = (began_s, now_s)
        self._began_s = None

    def fetching(self, run: int, now_s: float) -> None:
        """Record that the PS asked the device to send an output array of a run."""
        self._fetched[run] = now_s

    def computed(self, run: int, compute_s: float, now_s: float) -> None:
        """Record that a run finished, with its outputs still on the device."""
        asked = self._asked.pop(run, None)
        if asked is None:
            return
        began_s, asked_s = asked
        start_s = min(max(asked_s, self._computed_s), now_s)
        self._computed_s = min(start_s + compute_s, now_s)
        self._spans.append(TimeSpan(Lane.RECEIVE, began_s, asked_s))
        self._spans.append(TimeSpan(Lane.COMPUTE, start_s, self._computed_s))

    def answered(self, run: int, compute_s: float, now_s: float) -> None:
        """Record that a run's result or a fetched array has arrived at the PS."""
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
        """Discard the recorded times of failed or cancelled runs."""
        for run in runs:
            self._asked.pop(run, None)
            self._fetched.pop(run, None)

    def spans(self) -> list[TimeSpan]:
        """Return the latest time spans, in the order in which they were recorded."""
        return list(self._spans)
