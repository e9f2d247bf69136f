"""Where a device connects: to the server it was told, or to one that this sent it to."""

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
    """Remembers where the last session was, and whether that sent the device elsewhere.

    A device stays with the server that it was sent to as long as that welcomes it. Where that does
    not answer, or has no room, it goes back to the one that it was told, which knows what servers
    there are. One that refuses it for good ends it, as the first one would.
    """

    def __init__(self) -> None:
        self._session: _Moving | None = None
        self._elsewhere: JoinUrl | None = None

    async def open(
        self, home: JoinUrl, connect: Callable[[JoinUrl], Awaitable[_Opened]]
    ) -> _Opened:
        """Open a connection to the server that is due.

        Args:
            home: the server that the device was told, with its credential.
            connect: opens a connection.

        Raises:
            CleaveError: when the server cannot be reached.
        """
        last, self._session = self._session, None
        if last is not None and not last.welcomed:
            self._elsewhere = None
        if last is not None and last.moves_to:
            with suppress(UsageError):  # what is no address moves nobody
                # The server has this credential already, so that it may say who else takes it.
                moved = parse_join_url(last.moves_to)
                if moved.address.startswith("wss:") or home.address.startswith("ws:"):
                    self._elsewhere = replace(moved, credential=home.credential)
        try:
            return await connect(self._elsewhere or home)
        except CleaveError:
            self._elsewhere = None
            raise

    def at(self, session: _Moving) -> None:
        """Note the session that begins."""
        self._session = session
