"""Rate limits on a device's unrequested messages, such as heartbeats and telemetry.

A correct device sends few such messages, but many may arrive at once after a network stall.
Therefore token buckets limit messages and bytes. A bucket allows more than ten minutes of normal
messages at once, and refills faster than normal messages empty it. The first response to a run
never counts.
"""

from __future__ import annotations

from collections.abc import Container

from cleave.protocol import limits


class Bucket:
    """A token bucket of capacity `most` that starts full and gains `per_s` tokens per second."""

    def __init__(self, per_s: float, most: float, now_s: float) -> None:
        self._per_s = per_s
        self._most = most
        self._tokens = most
        self._at_s = now_s

    def take(self, count: float, now_s: float) -> bool:
        """Remove `count` tokens and return True, or return False if fewer are available."""
        back = max(0.0, now_s - self._at_s) * self._per_s
        self._tokens = min(self._most, self._tokens + back)
        self._at_s = now_s
        if self._tokens < count:
            return False
        self._tokens -= count
        return True


class Allowance:
    """Counts a device's unrequested messages and their bytes in one session."""

    def __init__(self, now_s: float) -> None:
        self._messages = Bucket(limits.UNASKED_PER_S, limits.MAX_UNASKED, now_s)
        self._bytes = Bucket(limits.UNASKED_BYTES_PER_S, limits.MAX_UNASKED_BYTES, now_s)

    def said(self, nbytes: int, now_s: float) -> str:
        """Count an unrequested message. Return the exceeded limit; empty if none is exceeded."""
        if not self._messages.take(1, now_s):
            return (
                f"it sent more than {limits.MAX_UNASKED} unrequested messages at once, and "
                f"then {limits.UNASKED_PER_S} per second"
            )
        if not self._bytes.take(nbytes, now_s):
            return (
                f"it sent more than {limits.MAX_UNASKED_BYTES} unrequested bytes at once, and "
                f"then {limits.UNASKED_BYTES_PER_S} per second"
            )
        return ""


class CancelledRuns:
    """One device's cancelled runs, to which responses may still arrive.

    A device that has read a `cancel` does not respond to the cancelled runs. Once the device
    responds to a run that was sent after the `cancel`, no response to a cancelled run can follow.
    Only the latest `MAX_RUNS_IN_FLIGHT` runs are tracked. Run IDs increase in order of creation.
    """

    def __init__(self) -> None:
        self._runs: dict[int, tuple[int, int]] = {}  # result bytes, last run sent before the cancel
        self._sent = 0

    def sent(self, run: int) -> None:
        """Record that the run with ID `run` was sent to the device."""
        self._sent = max(self._sent, run)  # a repeated run may be sent out of order

    def cancelled(self, run: int, result_bytes: int) -> None:
        """Record a cancelled run and the expected size of its result in bytes."""
        self._runs[run] = result_bytes, self._sent
        if len(self._runs) > limits.MAX_RUNS_IN_FLIGHT:
            del self._runs[next(iter(self._runs))]

    def overtaken(self, run: int) -> None:
        """Record a response to `run`, and remove the runs cancelled before `run` was sent."""
        while self._runs:
            first = next(iter(self._runs))
            if self._runs[first][1] >= run:
                return
            del self._runs[first]

    def __contains__(self, run: object) -> bool:
        """Return True if a response to this cancelled run may still arrive."""
        return run in self._runs

    def answered(self, run: int) -> bool:
        """Return True for the first response to a cancelled run, and stop tracking the run."""
        return self._runs.pop(run, None) is not None

    @property
    def largest_bytes(self) -> int:
        """Return the size in bytes of the largest result that may still arrive; 0 if none may."""
        return max((result_bytes for result_bytes, _ in self._runs.values()), default=0)


def is_answer(run: int, awaited: Container[int], cancelled_runs: CancelledRuns) -> bool:
    """Return True for a response to an awaited run, or the first response to a cancelled run."""
    if run in awaited:
        cancelled_runs.overtaken(run)
        return True
    return cancelled_runs.answered(run)
