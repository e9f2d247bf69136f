"""Attack a server as a stranger during a job: measure slowdown and growth of memory.

    python -m benchmarks.knocking [--rounds N] [--steps N] [--connections N] [--quick]

Trains opt-tiny on two `cleave join` processes, in three kinds of blocks of steps that take turns.
In one, a separate process attacks the server: `--connections` connections, opened as fast as
possible and held as long as the server allows, slow handshakes, wrong credentials, wrong origins,
and messages that announce or send a gigabyte. In another, the same attack goes to an unrelated
listener, which shows the attacker's own load on the machine, although it runs at the lowest
priority. The third is quiet.

Bounds: blocks under attack take at most 1.10 times as long as quiet ones; the server's memory
grows by at most 64 MiB.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `cleave serve` does, before torch is there

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from urllib.parse import urlsplit

from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException
from websockets.typing import Origin

import cleave
from benchmarks.common import joined, make_trainer, resident_bytes, spread
from cleave.device.session import device_hello
from cleave.protocol.codec import encode
from cleave.training.loop.job import JobSpec
from cleave.transport.join_url import parse_join_url
from tests.log_lines import LogLines, logged

MOST_SLOWER = 1.10
MOST_GROWTH_BYTES = 64 * 2**20
GIGABYTE = 10**9
NO_MASK = bytes(4)
UPGRADE = (
    b"GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
AT_ONCE = 500  # connections that the attacker holds


class Kind(Enum):
    """The kind of a block of steps."""

    QUIET = "quiet"
    ELSEWHERE = "the same attack elsewhere"
    ATTACK = "attack"


# --- the attacker, in a process of its own ---


class Attacker:
    """Attacks a server in every known way.

    Args:
        host, port: address of the server.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._address = f"ws://{host}:{port}/ws"
        self.done: Counter[str] = Counter()

    async def volley(self, connections: int) -> None:
        """Open `connections` connections as fast as possible, then attack in every other way."""
        limit = asyncio.Semaphore(AT_ONCE)
        few = max(2, connections // 200)
        for ways in (
            [self._flood(limit) for _ in range(connections)],
            [self._slow() for _ in range(few)]
            + [self._gigabyte(announced=a) for a in (True, False)],
            [self._wrong_credential() for _ in range(few)],
            [self._wrong_origin() for _ in range(few)],
        ):
            await asyncio.gather(*(asyncio.create_task(way) for way in ways))

    async def _flood(self, limit: asyncio.Semaphore) -> None:
        async with limit:
            await self._held("connections", b"")

    async def _slow(self) -> None:
        await self._held("slow handshakes", b"GET /ws HTTP/1.1\r\nHost: x\r\nX-Slow: ")

    async def _held(self, what: str, said: bytes) -> None:
        """Open a connection, send a few bytes, and hold it for a second unless it is closed."""
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(self._host, self._port)
            self.done[what] += 1
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    writer.write(said)
                    await reader.read()
            writer.close()

    async def _wrong_credential(self) -> None:
        hello = device_hello(credential="guess", name="stranger", memory_bytes=10**9)
        with suppress(OSError, WebSocketException):
            async with connect(self._address, open_timeout=5, close_timeout=1) as socket:
                await socket.send(b"".join(encode(hello)))
                self.done["wrong credentials"] += 1
                await socket.recv()

    async def _wrong_origin(self) -> None:
        self.done["wrong origins"] += 1
        with suppress(OSError, WebSocketException):
            async with connect(self._address, origin=Origin("http://evil.example")):
                self.done["wrong origins let in"] += 1

    async def _gigabyte(self, *, announced: bool) -> None:
        """Send a gigabyte as one announced frame, or as fragments without announcement."""
        self.done["gigabytes"] += 1
        piece, sent = bytes(2**20), 0
        whole = b"\x82\xff" + GIGABYTE.to_bytes(8, "big") + NO_MASK
        with suppress(OSError):
            _, writer = await asyncio.open_connection(self._host, self._port)
            writer.write(UPGRADE + (whole if announced else b""))
            while sent < GIGABYTE:
                if not announced:  # the first fragment or a further one, never the last
                    kind = b"\x00" if sent else b"\x02"
                    writer.write(kind + b"\xff" + len(piece).to_bytes(8, "big") + NO_MASK)
                writer.write(piece)
                await writer.drain()
                sent += len(piece)
            self.done["gigabytes taken"] += 1


async def listen_elsewhere() -> int:
    """Start a listener that closes every connection; return its port."""

    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(close, "127.0.0.1", 0, backlog=512)
    asyncio.get_running_loop().create_task(server.serve_forever())
    return int(server.sockets[0].getsockname()[1])


async def attack(address: str) -> None:
    """Run attacks on commands from standard input.

    Each line is `attack N` or `elsewhere N`; an answer is printed when the attack is done.
    """
    os.nice(19)  # real attackers have their own computers, so leave the CPU to the job
    parts = urlsplit(address)
    assert parts.hostname is not None
    assert parts.port is not None
    targets = {
        "attack": Attacker(parts.hostname, parts.port),
        "elsewhere": Attacker("127.0.0.1", await listen_elsewhere()),
    }
    while line := await asyncio.to_thread(sys.stdin.readline):
        where, count = line.split()
        began_s = time.perf_counter()
        await targets[where].volley(int(count))
        took_s = time.perf_counter() - began_s
        print(json.dumps({"took_s": took_s, **targets[where].done}), flush=True)


@contextmanager
def attacker(address: str) -> Iterator[subprocess.Popen[str]]:
    """Run the attacker's process."""
    command = [sys.executable, "-m", "benchmarks.knocking", "--attack", address]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


# --- the job ---


def measure(rounds: int, steps: int, connections: int) -> None:
    """Run the blocks, and print the results."""
    steps_in_all = 3 * rounds * steps + 2
    job = JobSpec(model="opt-tiny", steps=steps_in_all, batch=4, seq=128, method="tiles")
    log = LogLines()
    blocks: dict[Kind, list[float]] = {kind: [] for kind in Kind}
    longest = dict.fromkeys(Kind, 0.0)
    heard: dict[str, float] = {}
    with (
        logged(log),
        cleave.serve(verify=False) as server,  # only the listener is measured
        joined(server.url, 2, "--threads", "1"),
        attacker(parse_join_url(server.url).address) as strangers,
    ):
        assert strangers.stdin is not None
        assert strangers.stdout is not None
        server.fleet.wait_for(2)
        trainer = make_trainer(job, server.fleet)
        for _ in range(2):  # warm-up: the first step plans and sends more
            trainer.train_step()
        before = most = resident_bytes(os.getpid())
        for number in range(rounds):
            order = list(Kind)
            for kind in order[number % 3 :] + order[: number % 3]:
                if kind is not Kind.QUIET:
                    where = "attack" if kind is Kind.ATTACK else "elsewhere"
                    strangers.stdin.write(f"{where} {connections}\n")
                    strangers.stdin.flush()
                times = []
                for _ in range(steps):
                    began_s = time.perf_counter()
                    trainer.train_step()
                    times.append(time.perf_counter() - began_s)
                    most = max(most, resident_bytes(os.getpid()))
                blocks[kind].append(sum(times))
                longest[kind] = max(longest[kind], *times)
                if kind is not Kind.QUIET:
                    answer = json.loads(strangers.stdout.readline())
                    if kind is Kind.ATTACK:
                        heard = answer
                        print(f"a volley took {answer['took_s']:.2f} s", flush=True)
        assert server.fleet.device_count == 2
    report(blocks, longest, heard, most - before, steps, log.lines)


def report(
    blocks: dict[Kind, list[float]],
    longest: dict[Kind, float],
    heard: dict[str, float],
    growth: int,
    steps: int,
    notes: list[str],
) -> None:
    """Print the figures, and whether they are within their bounds."""
    print("the strangers: " + ", ".join(f"{n:.0f} {k}" for k, n in heard.items() if k != "took_s"))
    print(f"the server's log: {sum('refused' in note for note in notes)} lines of refusals, as")
    for note in [note for note in notes if " more (" in note][:3]:
        print(f"  {note}")
    for kind, times in blocks.items():
        each = statistics.median(times) / steps
        print(f"{kind.value}: {each:.3f} s a step, the longest {longest[kind]:.3f} s")
    quiet, attacked = blocks[Kind.QUIET], blocks[Kind.ATTACK]
    ratios = [a / b for a, b in zip(attacked, quiet, strict=True)]
    others = [a / b for a, b in zip(attacked, blocks[Kind.ELSEWHERE], strict=True)]
    met = "met" if statistics.median(ratios) <= MOST_SLOWER else "NOT met"
    print(f"under attack over quiet: {spread(ratios)}, at most {MOST_SLOWER:.2f}: {met}")
    print(f"under attack over the same attack elsewhere: {spread(others)}")
    met = "met" if growth <= MOST_GROWTH_BYTES else "NOT met"
    print(f"memory grew by {growth / 2**20:.1f} MiB, at most {MOST_GROWTH_BYTES >> 20}: {met}")


def main() -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20, help="in a block")
    parser.add_argument("--connections", type=int, default=10_000, help="in a volley")
    parser.add_argument("--quick", action="store_true", help="few rounds, for a look")
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        asyncio.run(attack(options.attack))
    elif options.quick:
        measure(2, 6, 3000)
    else:
        measure(options.rounds, options.steps, options.connections)


if __name__ == "__main__":
    main()
