"""Limits on unrequested messages of a device: heartbeats, telemetry, and late answers.

Honest devices send few of them, but many may arrive at once after the network was stuck. So token
buckets count them. A bucket holds what a device normally sends in an hour, and refills faster than
a device normally empties it. Answers to runs that were sent do not count, however late they arrive.
"""

from __future__ import annotations

from collections.abc import Container

from cleave.protocol import limits


class Bucket:
    """A token bucket.

    Args:
        per_s: tokens refilled per second.
        most: capacity in tokens.
        now_s: current time; the bucket starts full.
    """

    def __init__(self, per_s: float, most: float, now_s: float) -> None:
        self._per_s = per_s
        self._most = most
        self._tokens = most
        self._at_s = now_s

    def take(self, count: float, now_s: float) -> bool:
        """Take `count` tokens if available; return whether they were taken."""
        back = max(0.0, now_s - self._at_s) * self._per_s
        self._tokens = min(self._most, self._tokens + back)
        self._at_s = now_s
        if self._tokens < count:
            return False
        self._tokens -= count
        return True


class Allowance:
    """Counts the unrequested messages of one session.

    Args:
        now_s: time at which the session begins.
    """

    def __init__(self, now_s: float) -> None:
        self._messages = Bucket(limits.UNASKED_PER_S, limits.MAX_UNASKED, now_s)
        self._bytes = Bucket(limits.UNASKED_BYTES_PER_S, limits.MAX_UNASKED_BYTES, now_s)

    def said(self, nbytes: int, now_s: float) -> str:
        """Count an unrequested message; return why it is too much, or an empty text."""
        if not self._messages.take(1, now_s):
            return (
                f"it sent more than {limits.MAX_UNASKED} messages that nothing asked for, and "
                f"{limits.UNASKED_PER_S} a second after them"
            )
        if not self._bytes.take(nbytes, now_s):
            return (
                f"it sent more than {limits.MAX_UNASKED_BYTES} bytes that nothing asked for, and "
                f"{limits.UNASKED_BYTES_PER_S} a second after them"
            )
        return ""


class CancelledRuns:
    """Cancelled runs whose answers may still arrive.

    A device that has read a `cancel` does not answer the runs in it. So once it answers a run that
    was sent after the `cancel`, no answers to the cancelled runs will follow. If no answers arrive
    at all, the oldest runs are removed. Ids of runs increase in the order of creation.
    """

    def __init__(self) -> None:
        self._runs: dict[int, tuple[int, int]] = {}  # result size, last run sent before the cancel
        self._sent = 0

    def sent(self, run: int) -> None:
        """Record that a run was sent."""
        self._sent = max(self._sent, run)  # a repeated run may be sent out of order

    def cancelled(self, run: int, result_bytes: int) -> None:
        """Record that a run was cancelled, and its expected result size."""
        self._runs[run] = result_bytes, self._sent
        if len(self._runs) > limits.MAX_RUNS_IN_FLIGHT:
            del self._runs[next(iter(self._runs))]

    def overtaken(self, run: int) -> None:
        """Record an answer to a run that was not cancelled; forget runs cancelled before it."""
        while self._runs:
            first = next(iter(self._runs))
            if self._runs[first][1] >= run:
                return
            del self._runs[first]

    def __contains__(self, run: object) -> bool:
        """Return whether an answer to a run may still arrive."""
        return run in self._runs

    def answered(self, run: int) -> bool:
        """Return whether an answer belongs to a cancelled run; at most once for each run."""
        return self._runs.pop(run, None) is not None

    @property
    def largest_bytes(self) -> int:
        """Return the size of the largest result that may still arrive."""
        return max((result_bytes for result_bytes, _ in self._runs.values()), default=0)


def is_answer(run: int, awaited: Container[int], cancelled_runs: CancelledRuns) -> bool:
    """Return whether an answer belongs to a run that was sent and not answered before."""
    if run in awaited:
        cancelled_runs.overtaken(run)
        return True
    return cancelled_runs.answered(run)
