"""What Cleave logs, for tests and benchmarks that look at it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class LogLines(logging.Handler):
    """A handler that keeps what is logged as lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def logged(handler: logging.Handler) -> Iterator[None]:
    """Give a handler what Cleave logs, from INFO on, until the block is left."""
    logger = logging.getLogger("cleave")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
