"""Whether and when a client reconnects after its session, as in the table of `docs/protocol.md`."""

from __future__ import annotations

from typing import Final

from cleave.protocol import limits
from cleave.protocol.messages import Bye, ByeCode, Error, ErrorCode

_DONE: Final = (ByeCode.DRAINED, ByeCode.MEASURED, ByeCode.LEAVING)
"""Reasons of a `bye` after which the client is finished."""

_PASSING: Final = (ErrorCode.LIMIT, ErrorCode.PROTOCOL)
"""Refusals after which the same client may be welcome: it was silent, or a message was garbled."""


def least_wait_s(message: Bye | Error) -> float | None:
    """Return the minimum seconds to wait before reconnecting; None for never.

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
