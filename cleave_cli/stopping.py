"""Signals that end a command in order."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stops_in_order(tell: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Stop after the current step at the first Ctrl-C or SIGTERM; end at once at the second.

    Args:
        tell: called with a message for the user at the first signal.

    Returns:
        A context manager that yields a function, which returns whether to stop.
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
    """Return the signals that end a server in order, including SIGHUP when its terminal closes.

    Under `nohup`, SIGHUP is ignored, so the server outlives its terminal.
    """
    found = [signal.SIGINT, signal.SIGTERM]
    hangup = getattr(signal, "SIGHUP", None)  # not on Windows
    if hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN:
        found.append(hangup)
    return found
