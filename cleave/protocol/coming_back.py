"""Whether a client comes back by itself after its session, and when: `docs/protocol.md`'s table."""

from __future__ import annotations

from typing import Final

from cleave.protocol import limits
from cleave.protocol.messages import Bye, ByeCode, Error, ErrorCode

_DONE: Final = (ByeCode.DRAINED, ByeCode.MEASURED, ByeCode.LEAVING)
"""The client got what it wanted."""

_PASSING: Final = (ErrorCode.LIMIT, ErrorCode.PROTOCOL)
"""Refusals after which the same client may be welcome: it was silent, or a message was garbled."""


def least_wait_s(message: Bye | Error) -> float | None:
    """Return the least seconds to wait before coming back; None for never.

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
