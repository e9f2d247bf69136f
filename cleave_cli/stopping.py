"""Signal handlers that let a command finish cleanly."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stops_in_order(tell: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Handle Ctrl-C and SIGTERM until the `with` block ends.

    Yields a function that returns True after the first signal. The caller must then stop after its
    current step. A second signal raises KeyboardInterrupt. `tell` is called at the first signal,
    with a message for the user.
    """
    stopping = False

    def interrupted(*_: object) -> None:
        nonlocal stopping
        if stopping:
            raise KeyboardInterrupt
        stopping = True
        tell("stopping after this step, with a checkpoint; press Ctrl-C again to stop now")

    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(number, interrupted) for number in numbers]
    try:
        yield lambda: stopping
    finally:
        for number, before in zip(numbers, previous, strict=True):
            signal.signal(number, before)


def ending_signals() -> list[signal.Signals]:
    """Return the signals that shut a server down cleanly: SIGINT, SIGTERM and usually SIGHUP.

    SIGHUP means that the terminal was closed. Under `nohup`, SIGHUP is ignored and not returned, so
    the server keeps running after its terminal closes.
    """
    found = [signal.SIGINT, signal.SIGTERM]
    hangup = getattr(signal, "SIGHUP", None)  # Windows has no SIGHUP
    if hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN:
        found.append(hangup)
    return found
