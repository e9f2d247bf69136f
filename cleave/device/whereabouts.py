"""Which server a device connects to: its home server, or one to which that redirected it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Protocol, TypeVar

from cleave.errors import CleaveError, UsageError
from cleave.transport.join_url import JoinUrl, parse_join_url

_Opened = TypeVar("_Opened")


class _Moving(Protocol):
    @property
    def moves_to(self) -> str: ...
    @property
    def welcomed(self) -> bool: ...


class Whereabouts:
    """Remembers the last session, and whether its server redirected the device.

    A device stays with that other server as long as it is welcome there. If that server does not
    answer or has no room, the device returns to its home server, which knows the other servers. A
    permanent refusal by either server ends the device.
    """

    def __init__(self) -> None:
        self._session: _Moving | None = None
        self._elsewhere: JoinUrl | None = None

    async def open(
        self, home: JoinUrl, connect: Callable[[JoinUrl], Awaitable[_Opened]]
    ) -> _Opened:
        """Open a connection to the current server.

        Args:
            home: the home server, with the device's credential.
            connect: opens a connection.

        Raises:
            CleaveError: when the server cannot be reached.
        """
        last, self._session = self._session, None
        if last is not None and not last.welcomed:
            self._elsewhere = None
        if last is not None and last.moves_to:
            with suppress(UsageError):  # ignore an invalid address
                # The home server has this credential already, so it may redirect it.
                moved = parse_join_url(last.moves_to)
                if moved.address.startswith("wss:") or home.address.startswith("ws:"):
                    self._elsewhere = replace(moved, credential=home.credential)
        try:
            return await connect(self._elsewhere or home)
        except CleaveError:
            self._elsewhere = None
            raise

    def at(self, session: _Moving) -> None:
        """Record the session that begins."""
        self._session = session
