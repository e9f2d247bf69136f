"""Listening sockets that turn strangers away."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable
from datetime import datetime
from typing import Any, cast

import pytest

from cleave.transport.connection_limits import ConnectionLimits, RejectionLog
from cleave.transport.listener import ConnectionGate, Listener

PATIENCE_S = 60.0


class Loop:
    """What a listener needs of an event loop; what is to be called later waits in a list."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []

    def time(self) -> float:
        return 0.0

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Any:
        self.due.append(callback)


@pytest.mark.skipif(not hasattr(select, "epoll"), reason="needs epoll")
def test_after_a_refusal_connections_are_kept_until_there_are_some() -> None:
    loop = Loop()
    allowed = ConnectionLimits(waiting_per_address=0)
    log = RejectionLog(datetime.now, lambda s, f: None)
    gate = ConnectionGate(allowed, log, cast(asyncio.AbstractEventLoop, loop))

    def ready(timeout_s: float = 0.0) -> bool:
        return bool(select.select([listener], [], [], timeout_s)[0])

    with Listener(socket.AF_INET, gate) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.setblocking(False)
        listener.listen()

        def come() -> socket.socket:
            return socket.create_connection(listener.getsockname(), PATIENCE_S)

        with come() as first:
            assert ready(PATIENCE_S)
            with pytest.raises(BlockingIOError):
                listener.accept()
            assert first.recv(1) == b""  # it was closed
        with come(), come():
            assert not ready()
            for callback in loop.due:
                callback()
            assert ready(PATIENCE_S)
            with pytest.raises(BlockingIOError):
                listener.accept()
        for callback in loop.due:
            callback()
        assert not ready()  # both were taken at once
    assert listener.fileno() == -1
