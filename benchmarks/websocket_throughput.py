"""Compare the PS's bytes per second over loopback WebSockets with bare `websockets` connections.

    python -m benchmarks.websocket_throughput

The PS runs OPT-125M's weight GEMMs on device processes with a null backend, which answers with
ready-made bytes, so that only data transfer is measured. The bare connection replays the PS's
recorded traffic, with the same sizes, order and direction, using only `websockets` on both sides.
Both take turns in one run; the figure is the median of seven.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve

import cleave
from benchmarks.common import spread
from cleave.arrays import Buffer, DType
from cleave.device.compute_thread import Outcome
from cleave.device.core import Order
from cleave.device.session import DeviceSession, device_hello
from cleave.fleet.product import GemmFuture, Side
from cleave.machine.backends import Compute
from cleave.machine.sensors import hold_strips_well
from cleave.protocol import limits
from cleave.server.fleet_server import Server
from cleave.transport.connection import open_connection
from cleave.transport.join_url import parse_join_url

SHAPES = [(64, 768, 768)] * 4 + [(64, 3072, 768), (64, 768, 3072)]
LAYERS = 12


class NullComputer:
    """A computer that answers at once with ready-made zeros."""

    def __init__(self) -> None:
        self._ready: dict[tuple[int, int], memoryview] = {}

    def start(self, order: Order, done: Callable[[Order, Outcome], None]) -> None:
        """See `Computer.start`."""
        assert isinstance(order, Compute)
        shape = (order.rows, order.columns)
        if shape not in self._ready:
            self._ready[shape] = Buffer(np.zeros(shape, np.float32), DType.FP32).pack()
        done(order, (self._ready[shape], 0.0))

    def close(self) -> None:
        """See `Computer.close`."""


def null_device(url: str) -> None:
    """Run a device with ready-made results."""
    hold_strips_well()  # as `cleave join` does

    async def run() -> None:
        target = parse_join_url(url)
        connection = await open_connection(target)
        hello = device_hello(
            credential=target.credential, name="null", memory_bytes=10**9, flops_per_s=1e12
        )
        await DeviceSession(connection, NullComputer(), hello).run()

    asyncio.run(run())


@dataclass(frozen=True)
class Layer:
    """The matrices of one linear layer: x, y's gradient, the weight, and buffers for products."""

    x: Buffer
    dy: Buffer
    weight: Buffer
    y: Buffer
    dx: Buffer
    dw: Buffer

    @classmethod
    def make(cls, m: int, n: int, k: int) -> Layer:
        """Return a layer of zeros, all touched to avoid page faults during the measurement."""
        shapes = ((m, k), (m, n), (n, k), (m, n), (m, k), (n, k))
        return cls(*(Buffer(np.full(shape, 0, np.float32), DType.FP32) for shape in shapes))


def one_pass(server: Server, layers: Sequence[Layer], in_flight: int) -> float:
    """Run the GEMMs of all layers, `in_flight` layers at a time, and return the seconds."""
    began_s = time.perf_counter()
    waiting: deque[GemmFuture] = deque()
    for layer in layers:
        x, dy, weight = (server.fleet.operand(b) for b in (layer.x, layer.dy, layer.weight))
        waiting.append(server.fleet.submit(Side(x), Side(weight, True), layer.y))
        waiting.append(server.fleet.submit(Side(dy), Side(weight), layer.dx))
        waiting.append(server.fleet.submit(Side(dy, True), Side(x), layer.dw))
        while len(waiting) > 3 * (in_flight - 1):
            waiting.popleft().result()
    while waiting:
        waiting.popleft().result()
    return time.perf_counter() - began_s


# --- the bare connection: the recorded sizes, replayed ---

Script = list[list[tuple[str, int]]]  # by device: ("down" or "up", bytes), in order


def bare_client(port: int, script: list[tuple[str, int]], rounds: int) -> None:
    """Receive and send messages as in the script, `rounds` times."""

    async def run() -> None:
        buffer = memoryview(bytearray(max(size for _, size in script)))
        options: dict[str, Any] = {"compression": None, "max_size": limits.MAX_MESSAGE_BYTES}
        async with connect(f"ws://127.0.0.1:{port}", ping_interval=None, **options) as socket:
            for _ in range(rounds):
                for direction, size in script:
                    if direction == "down":
                        await socket.recv()
                    else:
                        await socket.send(buffer[:size])

    asyncio.run(run())


class BareServer:
    """Bare connections in a separate event loop, like the PS's."""

    def __init__(self, script: Script, rounds: int) -> None:
        self.script = script
        self._sockets: list[ServerConnection] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._buffer = memoryview(bytearray(max(size for part in script for _, size in part)))
        self.port = self._call(self._listen())
        context = multiprocessing.get_context("spawn")
        self.clients = [
            context.Process(target=bare_client, args=(self.port, part, rounds), daemon=True)
            for part in script
        ]
        for number, client in enumerate(self.clients):
            client.start()
            while len(self._sockets) <= number:
                time.sleep(0.01)

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _listen(self) -> int:
        async def accept(socket: ServerConnection) -> None:
            self._sockets.append(socket)
            await asyncio.Event().wait()

        server = await serve(
            accept, "127.0.0.1", 0, compression=None, max_size=limits.MAX_MESSAGE_BYTES,
            ping_interval=None,
        )  # fmt: skip
        port: int = server.sockets[0].getsockname()[1]
        return port

    def one_pass(self) -> float:
        """Return the seconds of the script on all connections at once, in both directions."""

        async def one(socket: ServerConnection, part: list[tuple[str, int]]) -> None:
            async def send() -> None:
                for direction, size in part:
                    if direction == "down":
                        await socket.send(self._buffer[:size])

            async def receive() -> None:
                for direction, _ in part:
                    if direction == "up":
                        await socket.recv(decode=False)

            await asyncio.gather(send(), receive())

        async def every() -> None:
            await asyncio.gather(
                *(one(s, p) for s, p in zip(self._sockets, self.script, strict=True))
            )

        began_s = time.perf_counter()
        self._call(every())
        return time.perf_counter() - began_s


def record_traffic(server: Server, layers: Sequence[Layer], in_flight: int) -> Script:
    """Return the messages that one pass sends and receives, by device."""
    runtime: Any = server.fleet.runtime
    script: dict[int, list[tuple[str, int]]] = {}
    for number, peer in runtime._peers.items():
        connection, log = peer.connection, script.setdefault(number, [])
        send, receive = connection.send, connection.receive

        async def noted_send(parts: Any, send: Any = send, log: Any = log) -> int:
            log.append(("down", sum(len(part) for part in parts)))
            size: int = await send(parts)
            return size

        async def noted_receive(receive: Any = receive, log: Any = log) -> bytes:
            data: bytes = await receive()
            log.append(("up", len(data)))
            return data

        connection.send, connection.receive = noted_send, noted_receive
    one_pass(server, layers, in_flight)  # a receive that is already pending is not recorded
    for log in script.values():
        log.clear()
    one_pass(server, layers, in_flight)
    for peer in runtime._peers.values():
        del peer.connection.send
        del peer.connection.receive
    return [list(log) for log in script.values()]  # copies, because a pending receive still logs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--in-flight", type=int, default=4, help="layers whose GEMMs are under way together"
    )
    options = parser.parse_args()
    layers = [Layer.make(*shape) for shape in SHAPES * LAYERS]
    context = multiprocessing.get_context("spawn")
    with cleave.serve(verify=False) as server:  # its devices do not multiply
        processes = [
            context.Process(target=null_device, args=(server.url,), daemon=True)
            for _ in range(options.devices)
        ]
        for process in processes:
            process.start()
        server.fleet.wait_for(options.devices)
        script = record_traffic(server, layers, options.in_flight)
        moved = sum(size for part in script for _, size in part)
        bare = BareServer(script, options.rounds + 1)
        one_pass(server, layers, options.in_flight)
        bare.one_pass()
        ratios, ours_rate, bare_rate = [], [], []
        for _ in range(options.rounds):
            before = server.fleet.counters()
            ours_s = one_pass(server, layers, options.in_flight)
            spent = server.fleet.counters() - before
            ours = (spent.downlink_bytes + spent.uplink_bytes) / ours_s
            theirs = moved / bare.one_pass()
            ours_rate.append(ours / 1e6)
            bare_rate.append(theirs / 1e6)
            ratios.append(ours / theirs)
        messages = sum(len(part) for part in script)
        print(
            f"{options.devices} devices, {messages} messages, {moved / 1e6:.0f} MB a pass: "
            f"the PS moves {spread(ratios)} of what bare websockets move (at least 0.70); "
            f"{statistics.median(ours_rate):.0f} against {statistics.median(bare_rate):.0f} MB/s"
        )
        for process in processes:
            process.terminate()


if __name__ == "__main__":
    main()
