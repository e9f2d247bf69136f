"""An in-memory link between a device and a server, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from cleave.protocol.codec import Buffer
from cleave.transport.connection import ConnectionLostError
from cleave.transport.frame_limits import AwaitedSizes


class MemoryConnection:
    """One end of an in-memory link, which transfers the same bytes as a WebSocket."""

    def __init__(
        self, inbox: asyncio.Queue[bytes | None], outbox: asyncio.Queue[bytes | None]
    ) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._closed = False
        self.data_bytes = 0

    async def send(self, parts: Sequence[Buffer]) -> int:
        if self._closed:
            raise ConnectionLostError("the connection was closed")
        data = b"".join(parts)
        await self._outbox.put(data)
        return len(data)

    async def receive(self) -> bytes:
        data = None if self._closed else await self._inbox.get()
        if data is None:
            self._closed = True
            raise ConnectionLostError("the connection was closed")
        self.data_bytes += len(data)
        return data

    async def answers(self, within_s: float) -> bool:
        """Return True, because the other end of an open in-memory link always responds."""
        if self._closed:
            raise ConnectionLostError("the connection was closed")
        return True

    def await_results(self, awaited: Callable[[], AwaitedSizes]) -> None:
        """Do nothing: an in-memory link does not limit message sizes."""

    def dismiss(self) -> None:
        """Do nothing: an in-memory link keeps delivering messages until it is closed."""

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await self._outbox.put(None)
            await self._inbox.put(None)


def memory_link() -> tuple[MemoryConnection, MemoryConnection]:
    """Create an in-memory link and return both ends."""
    there: asyncio.Queue[bytes | None] = asyncio.Queue()
    back: asyncio.Queue[bytes | None] = asyncio.Queue()
    return MemoryConnection(back, there), MemoryConnection(there, back)
