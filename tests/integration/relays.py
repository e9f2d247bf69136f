"""A TCP relay, as between homes: strangers connect to it, and it leads to a server behind a NAT."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Relay:
    """A relay in a thread of its own.

    With `context`, it terminates TLS and passes on plain bytes. Otherwise, it passes on all bytes
    unread.

    Attributes:
        port: port on loopback at which it listens.
        leads_to: port on loopback to which it passes on each new connection; 0: it closes them.
        passed: first bytes of each connection, as it read them.
    """

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.port, self.leads_to = 0, 0
        self.passed: list[bytes] = []
        self._context = context
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._main()))

    def start(self) -> None:
        self._thread.start()
        assert self._started.wait(60)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    async def _main(self) -> None:
        passing: set[asyncio.Task[None]] = set()

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            passing.add(task)
            try:
                await self._pass_on(reader, writer)
            finally:
                passing.discard(task)

        server = await asyncio.start_server(accepted, "127.0.0.1", 0, ssl=self._context)
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._stop.wait()
        server.close()
        for task in passing:
            task.cancel()
        await asyncio.gather(*passing, return_exceptions=True)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            if not self.leads_to:
                return
            there, back = await asyncio.open_connection("127.0.0.1", self.leads_to)
            writers.append(back)
            self.passed.append(b"")
            await asyncio.gather(
                self._copy(reader, back, len(self.passed)), self._copy(there, writer)
            )
        finally:
            for each in writers:
                each.close()

    async def _copy(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, number: int = 0
    ) -> None:
        """Copy bytes to their end, and remember those of the connection with this number."""
        with suppress(OSError):
            while data := await source.read(2**16):
                if number:
                    self.passed[number - 1] = (self.passed[number - 1] + data)[: 2**16]
                target.write(data)
                await target.drain()
            target.close()


@contextmanager
def relay(context: ssl.SSLContext | None = None) -> Iterator[Relay]:
    """A relay that runs until the `with` block ends."""
    running = Relay(context)
    running.start()
    try:
        yield running
    finally:
        running.close()
