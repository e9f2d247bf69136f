"""Decides whether and when a client reconnects after the PS ended its session.

The rules are the table in `docs/protocol.md`.
"""

from __future__ import annotations

from typing import Final

from cleave.protocol import limits
from cleave.protocol.messages import Bye, ByeCode, Error, ErrorCode

_DONE: Final = (ByeCode.DRAINED, ByeCode.MEASURED, ByeCode.LEAVING)
"""Codes of a `bye` after which the client does not reconnect."""

_PASSING: Final = (ErrorCode.LIMIT, ErrorCode.PROTOCOL)
"""Codes of an `error` with a temporary cause, such as a silent client or a garbled message."""


def least_wait_s(message: Bye | Error) -> float | None:
    """Return the minimum time to wait before reconnecting, in seconds; None for never.

    Args:
        message: the message with which the PS ended the session.
    """
    stated_s = min(message.retry_after_s, limits.MAX_RETRY_AFTER_S)
    if isinstance(message, Bye):
        return None if message.code in _DONE else stated_s
    if message.code in _PASSING:
        return stated_s
    known = message.code in ErrorCode.__members__.values()
    return stated_s if stated_s > 0 and not known else None
