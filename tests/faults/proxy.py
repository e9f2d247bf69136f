"""A WebSocket proxy that does to messages what `plan` decides, in a thread of its own.

Devices connect to ``url(slot)`` as to a server; every connection of theirs gets one of its own to
the server. Nothing here depends on time but delays, rates, and how long a held message waits.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit

import msgpack
from websockets.asyncio.client import connect
from websockets.asyncio.connection import Connection as WebSocket
from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as serve_websockets
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.http11 import Request, Response

from cleave.protocol import limits
from tests.faults.plan import (
    Direction,
    Fault,
    Faults,
    Happening,
    Loss,
    NoFaults,
    Seen,
    spoiled_header,
    spoiled_payload,
    truncated,
)

SLOW_SHARE: Final = 0.1
_HELD_S: Final = 0.05  # a message that is to be overtaken waits no longer for another
_FULL_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True)
class Setting:
    """How the proxy's links are.

    Attributes:
        seed: of damage and delays.
        bytes_per_s: each way of each connection; a slow one has `SLOW_SHARE` of it.
        longest_delay_s: of a delayed message, and of those behind it.
    """

    seed: int = 0
    bytes_per_s: float = 100e6
    longest_delay_s: float = 0.2


@dataclass(slots=True)
class _Link:
    """One direction of a connection."""

    direction: Direction
    source: WebSocket
    target: WebSocket
    rng: random.Random
    passed: int = 0
    held: bytes | None = None
    free_s: float = 0.0  # when the link has sent what it was given


@dataclass(slots=True, eq=False)
class _Pair:
    """A device's connection and the one to the server."""

    slot: int
    number: int
    device: WebSocket
    server: WebSocket
    faults: Faults
    silent: bool = False
    slow: bool = False


@dataclass
class Proxy:
    """See the module's text. A context manager: devices are cut off when it is left.

    Args:
        target: the join URL of the server.
        faults: by slot and connection number, what decides; nothing happens by default.
        setting: how links are.
        on_process: called in the proxy's thread with a slot when KILL or STOP is due.
        on_gone: called in the proxy's thread with a slot when its connection ended.

    Attributes:
        happened: every fault, in order.
        passed: messages, by slot, so far.
    """

    target: str
    faults: Callable[[int, int], Faults] = lambda slot, connection: NoFaults()
    setting: Setting = field(default_factory=Setting)
    on_process: Callable[[int, Fault], None] = lambda slot, fault: None
    on_gone: Callable[[int], None] = lambda slot: None

    def __post_init__(self) -> None:
        parts = urlsplit(self.target)
        self._address = f"{parts.scheme}://{parts.netloc}{parts.path}"
        self._fragment = parts.fragment
        self.happened: list[Happening] = []
        self.passed: Counter[int] = Counter()
        self._armed: dict[int, list[tuple[int, Fault]]] = {}  # by slot: at which count, what
        self._cut_until_s: dict[int, float] = {}  # by slot: no connection before this time
        self._connections = 0
        self._pairs: set[_Pair] = set()
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def url(self, slot: int) -> str:
        """What a device joins; its faults are those of this slot."""
        return f"ws://127.0.0.1:{self._port}/{slot}#{self._fragment}"

    def arm(self, loss: Loss) -> None:
        """Have a device lost when so many more of its messages have passed. From any thread."""
        self._loop.call_soon_threadsafe(self._arm, loss)

    def _arm(self, loss: Loss) -> None:
        due = self.passed[loss.slot] + loss.after
        self._armed.setdefault(loss.slot, []).append((due, loss.fault))

    def cut(self, slot: int, for_s: float) -> None:
        """Cut a device's connection, and accept none of its for a time. From any thread."""

        def cut() -> None:
            self._cut_until_s[slot] = time.monotonic() + for_s
            for pair in [pair for pair in self._pairs if pair.slot == slot]:
                _abort(pair)

        self._loop.call_soon_threadsafe(cut)

    def counts(self) -> Counter[Fault]:
        """How often each fault happened so far."""
        return Counter(happening.fault for happening in list(self.happened))

    # --- in the loop ---

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        async with serve_websockets(
            self._accept,
            "127.0.0.1",
            0,
            compression=None,
            max_size=limits.MAX_MESSAGE_BYTES,
            ping_interval=None,
            write_limit=_FULL_BYTES,
            process_request=_health,
        ) as server:
            self._port = server.sockets[0].getsockname()[1]
            self._started.set()
            await self._stop.wait()
            for pair in list(self._pairs):
                _abort(pair)

    async def _accept(self, device: ServerConnection) -> None:
        assert device.request is not None
        slot = int(device.request.path.strip("/"))
        if time.monotonic() < self._cut_until_s.get(slot, 0.0):
            device.transport.abort()
            return
        try:
            server = await connect(
                self._address,
                compression=None,
                max_size=limits.MAX_MESSAGE_BYTES,
                ping_interval=None,
                write_limit=_FULL_BYTES,
                proxy=None,
            )
        except (OSError, WebSocketException):  # the server is gone
            return
        self._connections += 1
        number = self._connections
        pair = _Pair(slot, number, device, server, self.faults(slot, number))
        self._pairs.add(pair)
        links = [
            _Link(direction, source, target, self._rng(number, direction))
            for direction, source, target in (
                (Direction.UP, device, server),
                (Direction.DOWN, server, device),
            )
        ]
        pumps = [asyncio.create_task(self._pump(pair, link)) for link in links]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            self._pairs.discard(pair)
            self.on_gone(slot)
            try:
                await asyncio.gather(device.close(), server.close())
            finally:  # a peer that was killed does not answer, and the proxy may end before it does
                _abort(pair)

    def _rng(self, number: int, direction: Direction) -> random.Random:
        return random.Random(f"{self.setting.seed}/{number}/{direction.value}/damage")

    async def _pump(self, pair: _Pair, link: _Link) -> None:
        """Pass on messages until either side is gone."""
        try:
            while True:
                try:
                    async with asyncio.timeout(_HELD_S if link.held is not None else None):
                        data = await link.source.recv(decode=False)
                except TimeoutError:  # nothing came to overtake it
                    await self._pass_held(pair, link)
                    continue
                await self._pass(pair, link, data)
        except ConnectionClosed:
            return

    async def _pass(self, pair: _Pair, link: _Link, data: bytes) -> None:
        kind, header_bytes = look(data)
        seen = Seen(link.direction, link.passed, kind, len(data), header_bytes)
        link.passed += 1
        self.passed[pair.slot] += 1
        self._set_off(pair, seen)
        if pair.silent:
            return
        fault = pair.faults.decide(seen)
        if fault is not None:
            self._happen(pair, seen, fault)
        match fault:
            case Fault.DROP:
                return
            case Fault.REORDER if link.held is None:
                link.held = data
                return
            case Fault.TRUNCATE:
                data = truncated(data, link.rng)
            case Fault.CORRUPT_PAYLOAD:
                data = spoiled_payload(data, header_bytes, link.rng)
            case Fault.CORRUPT_HEADER:
                data = spoiled_header(data, header_bytes, link.rng)
            case Fault.DELAY:
                await asyncio.sleep(link.rng.uniform(0, self.setting.longest_delay_s))
        if pair.silent:
            return
        await self._send(pair, link, data)
        if fault is Fault.DUPLICATE:
            await self._send(pair, link, data)
        await self._pass_held(pair, link)

    async def _pass_held(self, pair: _Pair, link: _Link) -> None:
        held, link.held = link.held, None
        if held is not None and not pair.silent:
            await self._send(pair, link, held)

    def _set_off(self, pair: _Pair, seen: Seen) -> None:
        """Faults that were waiting for this message."""
        armed = self._armed.get(pair.slot, [])
        for line in [line for line in armed if line[0] <= self.passed[pair.slot]]:
            armed.remove(line)
            self._happen(pair, seen, line[1])

    def _happen(self, pair: _Pair, seen: Seen, fault: Fault) -> None:
        self.happened.append(Happening(pair.slot, pair.number, seen, fault))
        match fault:
            case Fault.CUT:
                _abort(pair)
            case Fault.SILENCE:
                pair.silent = True
            case Fault.SLOW:
                pair.slow = True
            case Fault.KILL | Fault.STOP:
                self.on_process(pair.slot, fault)

    async def _send(self, pair: _Pair, link: _Link, data: bytes) -> None:
        rate = self.setting.bytes_per_s * (SLOW_SHARE if pair.slow else 1.0)
        now_s = time.monotonic()
        link.free_s = max(now_s, link.free_s) + len(data) / rate
        if link.free_s - now_s > 0.002:  # sleeping is no finer than that
            await asyncio.sleep(link.free_s - now_s)
        await link.target.send(data)


def _abort(pair: _Pair) -> None:
    """End both connections at once, without a farewell."""
    for socket in (pair.device, pair.server):
        socket.transport.abort()


def look(data: bytes) -> tuple[str, int]:
    """A message's type, and how long it is without its payload; an empty type where unreadable."""
    unpacker = msgpack.Unpacker(raw=False)
    unpacker.feed(data[: limits.MAX_HEADER_BYTES])
    kind = ""
    try:
        parts = unpacker.read_array_header()
        kind = str(unpacker.unpack())
        unpacker.skip()
        head = unpacker.tell()
    except (msgpack.UnpackException, ValueError):
        return kind, len(data)
    if parts == 3 and head < len(data):  # the payload has a header of its own
        head += {0xC4: 2, 0xC5: 3, 0xC6: 5}.get(data[head], 0)
    return kind, min(head, len(data))


def _health(device: ServerConnection, request: Request) -> Response | None:
    """Say that the server is there: a client asks that after a silence, as of a busy machine."""
    return device.respond(HTTPStatus.OK, "ok\n") if request.path == "/healthz" else None
