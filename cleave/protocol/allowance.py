"""What a device may send unasked: heartbeats, telemetry, and answers that nobody waits for.

Honest devices send little of it, but it may come all at once after the network was stuck. So it is
counted in token buckets that hold as much as a device normally sends in an hour, and refill faster
than a device normally empties them. Answers to runs that were sent are not counted, however late
they come.
"""

from __future__ import annotations

from collections.abc import Container

from cleave.protocol import limits


class Bucket:
    """Tokens that are taken one by one and come back with time.

    Args:
        per_s: tokens that come back per second.
        most: tokens in a full bucket.
        now_s: the time; the bucket is full then.
    """

    def __init__(self, per_s: float, most: float, now_s: float) -> None:
        self._per_s = per_s
        self._most = most
        self._tokens = most
        self._at_s = now_s

    def take(self, count: float, now_s: float) -> bool:
        """Take `count` tokens, unless there are fewer; return whether they were taken."""
        back = max(0.0, now_s - self._at_s) * self._per_s
        self._tokens = min(self._most, self._tokens + back)
        self._at_s = now_s
        if self._tokens < count:
            return False
        self._tokens -= count
        return True


class Allowance:
    """What one session may send unasked.

    Args:
        now_s: the time at which the session begins.
    """

    def __init__(self, now_s: float) -> None:
        self._messages = Bucket(limits.UNASKED_PER_S, limits.MAX_UNASKED, now_s)
        self._bytes = Bucket(limits.UNASKED_BYTES_PER_S, limits.MAX_UNASKED_BYTES, now_s)

    def said(self, nbytes: int, now_s: float) -> str:
        """Count a message that was not asked for; return why it is too much, empty if it is not."""
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

    A device that has read a `cancel` does not answer the runs in it. So when it answers a run that
    was sent after the `cancel`, no more answers to the cancelled runs will come. If no answers come
    at all, the oldest runs are forgotten. Ids of runs grow in the order in which they are made.
    """

    def __init__(self) -> None:
        self._runs: dict[int, tuple[int, int]] = {}  # size of the result, the last run sent by then
        self._sent = 0

    def sent(self, run: int) -> None:
        """Note that a run was sent."""
        self._sent = max(self._sent, run)  # one that is asked for again may be sent before others

    def cancelled(self, run: int, result_bytes: int) -> None:
        """Note that a run was cancelled, whose result would have had this size."""
        self._runs[run] = result_bytes, self._sent
        if len(self._runs) > limits.MAX_RUNS_IN_FLIGHT:
            del self._runs[next(iter(self._runs))]

    def overtaken(self, run: int) -> None:
        """Note an answer to a run that was not cancelled; runs cancelled before it are over."""
        while self._runs:
            first = next(iter(self._runs))
            if self._runs[first][1] >= run:
                return
            del self._runs[first]

    def __contains__(self, run: object) -> bool:
        """Say whether an answer to a run may still come."""
        return run in self._runs

    def answered(self, run: int) -> bool:
        """Say whether an answer belongs to one of these runs; at most once for each."""
        return self._runs.pop(run, None) is not None

    @property
    def largest_bytes(self) -> int:
        """Return the size of the largest result that may still come."""
        return max((result_bytes for result_bytes, _ in self._runs.values()), default=0)


def is_answer(run: int, awaited: Container[int], cancelled_runs: CancelledRuns) -> bool:
    """Say whether an answer belongs to a run that was sent and not answered before."""
    if run in awaited:
        cancelled_runs.overtaken(run)
        return True
    return cancelled_runs.answered(run)
