"""Formats the log messages that `cleave serve` prints."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from cleave_cli.render.say import printable


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(record.getMessage())


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps({"event": "note", "text": record.getMessage()})


@contextmanager
def printed_log(*, as_json: bool) -> Iterator[None]:
    """Print Cleave's log until the `with` block ends, as JSON on stdout or text on stderr."""
    handler = logging.StreamHandler(sys.stdout if as_json else sys.stderr)
    handler.setFormatter(_JsonFormatter() if as_json else _TextFormatter())
    loggers = [logging.getLogger(name) for name in ("cleave", "cleave_cli")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False  # a library's root handler would print each message again
    try:
        yield
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate
