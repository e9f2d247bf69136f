"""Selects the server of a device: the home server, or the target of a redirect."""

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


class ServerSelection:
    """Selects the server for the next session, and follows redirects.

    After a redirect, the device keeps connecting to the new server as long as that server welcomes
    the device. If the new server does not answer or is full, the device returns to its home server,
    which may redirect the device again. A permanent refusal by either server stops the device.
    """

    def __init__(self) -> None:
        self._session: _Moving | None = None
        self._elsewhere: JoinUrl | None = None

    async def open(
        self, home: JoinUrl, connect: Callable[[JoinUrl], Awaitable[_Opened]]
    ) -> _Opened:
        """Open a connection to the selected server.

        Args:
            home: join URL of the home server, with the device's credential.
            connect: opens a connection to the server of a join URL.

        Raises:
            CleaveError: when the server cannot be reached.
        """
        last, self._session = self._session, None
        if last is not None and not last.welcomed:
            self._elsewhere = None
        if last is not None and last.moves_to:
            with suppress(UsageError):  # ignore an invalid address
                # The home server knows the credential, so a server that it trusts may see it too.
                moved = parse_join_url(last.moves_to)
                if moved.address.startswith("wss:") or home.address.startswith("ws:"):
                    self._elsewhere = replace(moved, credential=home.credential)
        try:
            return await connect(self._elsewhere or home)
        except CleaveError:
            self._elsewhere = None
            raise

    def at(self, session: _Moving) -> None:
        """Record a new session, whose outcome determines the next server."""
        self._session = session
