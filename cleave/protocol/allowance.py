"""What a device may say that it was not asked for: heartbeats, telemetry, answers nobody awaits.

Honest devices say little of it, but it may come all at once after a network was stuck. So it is
counted in buckets that hold what an hour of ordinary life brings, and fill faster than a device
may empty them. Answers to runs that were really sent are not counted, however late they come.
"""

from __future__ import annotations

from collections.abc import Container

from cleave.protocol import limits


class Bucket:
    """Tokens that are taken one by one and come back with time.

    Args:
        per_s: how many come back a second.
        most: a full bucket.
        now_s: the time; it is full then.
    """

    def __init__(self, per_s: float, most: float, now_s: float) -> None:
        self._per_s = per_s
        self._most = most
        self._tokens = most
        self._at_s = now_s

    def take(self, count: float, now_s: float) -> bool:
        """Take so many tokens, unless there are fewer."""
        back = max(0.0, now_s - self._at_s) * self._per_s
        self._tokens = min(self._most, self._tokens + back)
        self._at_s = now_s
        if self._tokens < count:
            return False
        self._tokens -= count
        return True


class Allowance:
    """Of one session.

    Args:
        now_s: the time at which it begins.
    """

    def __init__(self, now_s: float) -> None:
        self._messages = Bucket(limits.UNASKED_PER_S, limits.MAX_UNASKED, now_s)
        self._bytes = Bucket(limits.UNASKED_BYTES_PER_S, limits.MAX_UNASKED_BYTES, now_s)

    def said(self, nbytes: int, now_s: float) -> str:
        """A message came that was not asked for; what is wrong with that, if anything."""
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


class Crossing:
    """Runs that were cancelled, whose answers may be on the way all the same.

    A device that has read a `cancel` does not answer what it names. So an answer to a run that was
    sent after it tells that no more will come; and where no answers come at all, the oldest are
    forgotten. Ids of runs are in the order in which they are sent.
    """

    def __init__(self) -> None:
        self._runs: dict[int, tuple[int, int]] = {}  # size of the result, the last run sent by then
        self._sent = 0

    def sent(self, run: int) -> None:
        """A run was sent."""
        self._sent = run

    def cancelled(self, run: int, result_bytes: int) -> None:
        """A run was cancelled, whose result would have been so large."""
        self._runs[run] = result_bytes, self._sent
        if len(self._runs) > limits.MAX_RUNS_IN_FLIGHT:
            del self._runs[next(iter(self._runs))]

    def overtaken(self, run: int) -> None:
        """A run was answered that was not cancelled."""
        while self._runs:
            first = next(iter(self._runs))
            if self._runs[first][1] >= run:
                return
            del self._runs[first]

    def answered(self, run: int) -> bool:
        """Whether an answer is one of these; once for each."""
        return self._runs.pop(run, None) is not None

    @property
    def largest_bytes(self) -> int:
        """Of the results that may come."""
        return max((result_bytes for result_bytes, _ in self._runs.values()), default=0)


def is_answer(run: int, awaited: Container[int], crossing: Crossing) -> bool:
    """Whether an answer belongs to a run that was sent and not answered before."""
    if run in awaited:
        crossing.overtaken(run)
        return True
    return crossing.answered(run)
