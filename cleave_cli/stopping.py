"""Signals at which commands end in order."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stops_in_order(tell: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Take the first Ctrl-C, or SIGTERM, as the wish to stop after a step; the second ends at once.

    Args:
        tell: called with what to tell the user then.

    Returns:
        A context, whose value says whether to stop.
    """
    stopping = False

    def interrupted(*_: object) -> None:
        nonlocal stopping
        if stopping:
            raise KeyboardInterrupt
        stopping = True
        tell("stopping after this step, with a checkpoint; once more to stop now")

    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(number, interrupted) for number in numbers]
    try:
        yield lambda: stopping
    finally:
        for number, before in zip(numbers, previous, strict=True):
            signal.signal(number, before)


def ending_signals() -> list[signal.Signals]:
    """Return the signals at which a server ends in order: also that its terminal was closed.

    Under `nohup`, which has that signal ignored, a server outlives its terminal.
    """
    found = [signal.SIGINT, signal.SIGTERM]
    hangup = getattr(signal, "SIGHUP", None)  # not on Windows
    if hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN:
        found.append(hangup)
    return found
