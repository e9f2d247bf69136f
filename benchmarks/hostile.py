"""Flood a real server during a real job: measure its speed, its memory and newcomers' waits.

    python -m benchmarks.hostile [--rounds N] [--window-s S] [--only FLOOD] [--quick]

A `cleave serve` process trains opt-tiny on two `cleave join` processes. It checks no results,
because compiled checks take more memory. In every other time window, a separate process at the
lowest priority floods it in one way, at the rates of attacks that once stopped it, and at ten times
these rates:

- strangers with hellos of nested lists of 5 kB, 12 per second, each on its own connection;
- devices with one unused join code, whose links are measured; they announce messages of 256 MiB and
  send as much of them as the server takes, 1.1 connections per second;
- one admitted device that floods heartbeats, telemetry, pings and unexpected answers (each as large
  as the requested results), 66,667 per second, and reconnects whenever it is disconnected;
- one admitted device, the same in all windows, that leaves when it gets work, and reconnects, 8
  times per second;
- slow handshakes from 127.0.0.2 to 127.0.0.5, as many as each address may have: 12.8 new ones per
  second and address replace those that timed out.

First, without a job, the server's CPU time for each flood is measured: a flood takes this much from
a job, independent of other load. Windows without a flood, between other such windows, show the
effect of other load on the machine.

Throughout, newcomers from 127.0.0.6 with their own join code connect to have their link measured,
and leave once they are welcomed.

Bounds: steps per second in a flood at least 0.9 of those in adjacent windows; the server's memory
at most 100 MB above that before the first flood; every newcomer welcomed within a second. Each is
printed with whether it was met.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `cleave serve` does, before torch is there

import argparse
import asyncio
import itertools
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException
from websockets.frames import Frame, Opcode

from benchmarks.common import joined, resident_bytes, spread
from cleave.device.core import DeviceCore
from cleave.device.session import device_hello
from cleave.machine.backends import Compute, NumpyBackend, execute
from cleave.protocol import messages
from cleave.protocol.codec import decode, encode
from cleave.protocol.messages import Message
from cleave.scheduler.sessions.probe import FIRST_ID
from cleave.transport.join_url import parse_join_url
from cleave.transport.listener import allow_many_connections
from cleave_cli.operator_client import OperatorClient

LEAST_SPEED: Final = 0.9
MOST_GROWTH_BYTES: Final = 100 * 10**6
MOST_WAIT_S: Final = 1.0

NESTED: Final = b"\x92\xa5hello\x81\xa1a" + b"\xdd\x00\x10\x00\x00" * 1000
LARGE_BYTES: Final = 2**28 - 1
PIECE_BYTES: Final = 2**18
NESTED_PER_S: Final = 12.0
MEASURES_PER_S: Final = 1.1
FLOOD_PER_S: Final = 800_000 / 12
COMINGS_PER_S: Final = 8.0
SLOW_PER_S: Final = 128 / 10  # each slot is reused after its timeout of 10 s
BEAT_S: Final = 0.05
NEWCOMER_EVERY_S: Final = 0.25
WORK_WITHIN_S: Final = 1.0  # a member without work after this time floods anyway
IDLE_S: Final = 4.0
LIFE_S: Final = 86400.0  # lifetime of join codes
HOLD_S: Final = 8.0  # seconds for which a stranger keeps a connection
SLOW_TICK_S: Final = 0.005
SLOW_FROM: Final = tuple(f"127.0.0.{n}" for n in (2, 3, 4, 5))
NEWCOMER_FROM: Final = "127.0.0.6"

NOTHING: Final = "nothing"
COMING: Final = "coming and going"
FLOODS: Final = (
    NOTHING,
    "nested hellos",
    "one code",
    "heartbeats",
    "telemetry",
    "pings",
    "late answers",
    COMING,
    "slow handshakes",
)
MEASURED: Final = device_hello(credential="", name="measured", memory_bytes=64 * 2**20)


# --- the attacker, in a process of its own ---


class Attacker:
    """Floods a server in every known way.

    Args:
        host, port: address of the server.
        code: an unused join code.
        members: a join code for many devices, or the credential of one device.

    Attributes:
        credential: the device's own credential, once it got one.
    """

    def __init__(self, host: str, port: int, code: str, members: str) -> None:
        self._host, self._port = host, port
        self._address = f"ws://{host}:{port}/ws"
        self._code, self.credential = code, members
        self.done: Counter[str] = Counter()

    async def flood(self, kind: str, times: int) -> None:
        """Flood until cancelled."""
        match kind:
            case "nested hellos":
                await self._again_and_again(self._nested, NESTED_PER_S * times)
            case "one code":
                await self._again_and_again(self._measure, MEASURES_PER_S * times)
            case "nothing":
                await asyncio.Event().wait()
            case "slow handshakes":
                await self._slow_handshakes(SLOW_PER_S * times)
            case _:
                pause_s = 1 / (COMINGS_PER_S * times) if kind == COMING else 2 * BEAT_S
                await self._member(kind, FLOOD_PER_S * times, pause_s)

    async def _again_and_again(self, way: Callable[[], Awaitable[None]], per_s: float) -> None:
        async with asyncio.TaskGroup() as group:
            began_s, count = time.monotonic(), 0
            while True:
                count += 1
                group.create_task(self._tried(way))
                await asyncio.sleep(began_s + count / per_s - time.monotonic())

    async def _tried(self, way: Callable[[], Awaitable[None]]) -> None:
        self.done["connections"] += 1
        with suppress(Exception):  # the server may cut the connection at any point
            async with asyncio.timeout(HOLD_S):
                await way()
        self.done["ended"] += 1

    async def _nested(self) -> None:
        async with connect(self._address, close_timeout=1) as socket:
            await socket.send(NESTED)
            while True:
                await socket.recv()

    async def _measure(self) -> None:
        hello = replace(MEASURED, credential=self._code, measure=True)
        async with connect(self._address, close_timeout=1, max_size=None) as socket:
            await socket.send(b"".join(encode(hello)))
            await socket.recv()
            piece = bytes(PIECE_BYTES)
            socket.transport.write(b"\x82\xff" + LARGE_BYTES.to_bytes(8, "big") + bytes(4))
            for _ in range(LARGE_BYTES // PIECE_BYTES):
                socket.transport.write(piece)
                await socket.drain()
                if socket.transport.is_closing():
                    return
                self.done["bytes of unfinished messages"] += PIECE_BYTES
            await asyncio.sleep(HOLD_S)

    async def _slow_handshakes(self, per_s: float) -> None:
        """Hold open connections with incomplete handshakes, `per_s` new ones from each address.

        Uses bare sockets, because asyncio would take a fifth of a core from the server's machine.
        """
        held: deque[tuple[float, socket.socket]] = deque()
        addresses, began_s, count = itertools.cycle(SLOW_FROM), time.monotonic(), 0
        try:
            while True:
                now_s = time.monotonic()
                while held and held[0][0] <= now_s:
                    held.popleft()[1].close()
                    self.done["ended"] += 1
                due = round((now_s - began_s) * per_s * len(SLOW_FROM))
                for _ in range(count, due):
                    self.done["connections"] += 1
                    held.append((now_s + HOLD_S, self._slow(next(addresses))))
                count = due
                await asyncio.sleep(SLOW_TICK_S)
        finally:
            for _, slow in held:
                slow.close()

    def _slow(self, address: str) -> socket.socket:
        slow = socket.socket()
        slow.setblocking(False)
        slow.bind((address, 0))
        with suppress(OSError):  # not connected yet, or already cut; hold it anyway
            slow.connect_ex((self._host, self._port))
            slow.send(b"GET /ws HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        return slow

    async def _member(self, kind: str, per_s: float, pause_s: float) -> None:
        """Join, work until no work is left, then flood; reconnect when disconnected."""
        while True:
            hello = device_hello(
                credential=self.credential, name="flood", memory_bytes=10**9, flops_per_s=1e9,
                downlink_bytes_per_s=1e7, uplink_bytes_per_s=1e7,
            )  # fmt: skip
            hello = replace(hello, features=())
            with suppress(Exception):
                async with connect(self._address, close_timeout=1, max_size=None) as socket:
                    self.done["joins"] += 1
                    await socket.send(b"".join(encode(hello)))
                    await self._flood_inside(socket, kind, per_s)
            await asyncio.sleep(pause_s)

    async def _flood_inside(self, socket: ClientConnection, kind: str, per_s: float) -> None:
        core, backend = DeviceCore(10**9), NumpyBackend()
        result_bytes = 4
        while True:  # pass the server's arithmetic test
            try:
                message = decode(await asyncio.wait_for(socket.recv(decode=False), WORK_WITHIN_S))
            except TimeoutError:
                break
            if isinstance(message, messages.Error):
                self.done["not let in"] += 1
                return
            if isinstance(message, messages.Welcome) and message.credential:
                self.credential = message.credential
            for action in core.received(message):
                if isinstance(action, Compute) and action.run >= FIRST_ID:
                    block = execute(backend, action).pack()
                    for answer in core.computed(action.run, block, 1e-4):
                        assert isinstance(answer, messages.Result)
                        await socket.send(b"".join(encode(answer)))
                elif isinstance(action, Compute):
                    result_bytes = max(result_bytes, action.result_bytes)
            if isinstance(message, messages.Run) and message.id < FIRST_ID:
                break
        if kind == COMING:
            return
        frame = _frame(kind, result_bytes)
        count = max(1, round(per_s * BEAT_S * min(1.0, 1000 / len(frame))))
        many = frame * count
        while not socket.transport.is_closing():
            socket.transport.write(many)
            self.done["messages"] += count
            await socket.drain()
            await asyncio.sleep(BEAT_S)
        self.done["sent away"] += 1


def _frame(kind: str, result_bytes: int) -> bytes:
    """Return a message of a flood as a WebSocket frame."""
    if kind == "pings":
        return Frame(Opcode.PING, b"").serialize(mask=True)
    floods: dict[str, Message] = {
        "heartbeats": messages.Heartbeat(),
        "telemetry": messages.Telemetry({"power_w": 4.0, "temperature_c": 30.0}),
        "late answers": messages.Result(
            2**40, 1, result_bytes // 4, "fp32", 0.0, bytes(result_bytes // 4 * 4)
        ),
    }
    return Frame(Opcode.BINARY, b"".join(encode(floods[kind]))).serialize(mask=True)


async def attack(host: str, port: int, code: str, members: str) -> None:
    """Run floods on commands from standard input.

    A line `TIMES KIND` starts a flood, an empty line ends it and prints an answer.
    """
    os.nice(19)  # real attackers have their own computers, so leave the CPU to the job
    allow_many_connections()
    comer = members  # credential of the device that leaves and reconnects
    while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
        times, _, kind = line.partition(" ")
        attacker = Attacker(host, port, code, comer if kind == COMING else members)
        flooding = asyncio.create_task(attacker.flood(kind, int(times)))
        await asyncio.to_thread(sys.stdin.readline)
        failed = flooding.exception() if flooding.done() else None
        if failed is not None:
            traceback.print_exception(failed)
        while not flooding.done():  # closing a connection may swallow a cancellation
            flooding.cancel()
            await asyncio.wait({flooding}, timeout=0.5)
        if kind == COMING:
            comer = attacker.credential
        print(json.dumps({"failed": failed is not None, **attacker.done}), flush=True)


@contextmanager
def attacking(host: str, port: int, code: str, members: str) -> Iterator[subprocess.Popen[str]]:
    """Run the attacker's process."""
    command = [
        sys.executable, "-m", "benchmarks.hostile", "--attack", host, str(port), code, members,
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


# --- the server, its job, and newcomers ---


@dataclass
class Watched:
    """Measurements of the server.

    Attributes:
        steps_s: end times of the job's steps.
        cpu_s: pairs of a time and the server's CPU time until then.
        waits: pairs of a newcomer's arrival time and wait in seconds; None if it was refused.
        most_bytes: peak resident memory since the last reset.
    """

    steps_s: list[float] = field(default_factory=list)
    cpu_s: list[tuple[float, float]] = field(default_factory=list)
    waits: list[tuple[float, float | None]] = field(default_factory=list)
    most_bytes: int = 0

    def speed(self, since_s: float, until_s: float) -> float:
        """Return steps per second, over whole steps."""
        ends = [at_s for at_s in self.steps_s if since_s <= at_s <= until_s]
        return (len(ends) - 1) / (ends[-1] - ends[0]) if len(ends) > 2 else 0.0

    def busy(self, since_s: float, until_s: float) -> float:
        """Return the server's CPU usage as a share of one core."""
        spent = [(at_s, cpu_s) for at_s, cpu_s in self.cpu_s if since_s <= at_s <= until_s]
        return (spent[-1][1] - spent[0][1]) / (spent[-1][0] - spent[0][0])

    def cpu_a_step_s(self, since_s: float, until_s: float) -> float:
        """Return the server's CPU time per step in seconds."""
        spent = [cpu_s for at_s, cpu_s in self.cpu_s if since_s <= at_s <= until_s]
        steps = sum(since_s <= at_s <= until_s for at_s in self.steps_s)
        return (spent[-1] - spent[0]) / max(1, steps)


@contextmanager
def serving(folder: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Run `cleave serve` with output to `log`; yield the process and its first record."""
    command = [
        sys.executable, "-m", "cleave_cli", "serve", "--port", "0", "--data", str(folder / "data"),
        "--json", "--verify", "off",
    ]  # fmt: skip
    path = folder / "log"
    with (
        path.open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log, text=True, cwd=folder) as process,
    ):
        try:
            while "\n" not in (said := path.read_text()) and process.poll() is None:
                time.sleep(0.05)
            yield process, json.loads(said.splitlines()[0])
        finally:
            process.kill()


@asynccontextmanager
async def beside(*jobs: Awaitable[None]) -> AsyncIterator[None]:
    """Run these jobs while the block runs."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result


async def follow(client: OperatorClient, watched: Watched) -> None:
    """Record the end times of steps."""
    async for record in client.records():
        if record.get("event") == "step":
            watched.steps_s.append(time.monotonic())
        elif record.get("event") in ("end", "failed", "stopped"):
            raise RuntimeError(f"the job ended: {record}")


async def weigh(pid: int, watched: Watched) -> None:
    """Record the server's memory and CPU time."""
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    while True:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        watched.cpu_s.append((time.monotonic(), (int(stat[11]) + int(stat[12])) / ticks_per_s))
        watched.most_bytes = max(watched.most_bytes, resident_bytes(pid))
        await asyncio.sleep(0.05)


async def keep_coming(address: str, code: str, watched: Watched) -> None:
    """Start newcomers at fixed intervals, independent of earlier ones."""
    async with asyncio.TaskGroup() as group:
        while True:
            group.create_task(newcomer(address, code, watched))
            await asyncio.sleep(NEWCOMER_EVERY_S)


async def newcomer(address: str, code: str, watched: Watched) -> None:
    """Connect, be welcomed, and leave."""
    hello = replace(MEASURED, credential=code, measure=True)
    began_s, took_s = time.monotonic(), None
    with suppress(OSError, WebSocketException, TimeoutError):
        async with (
            asyncio.timeout(10 * MOST_WAIT_S),
            connect(address, local_addr=(NEWCOMER_FROM, 0), close_timeout=1) as socket,
        ):
            await socket.send(b"".join(encode(hello)))
            if isinstance(decode(await socket.recv(decode=False)), messages.Welcome):
                took_s = time.monotonic() - began_s
    watched.waits.append((began_s, took_s))


@dataclass
class Seen:
    """The figures of one flood by window, such as steps per second, also relative to neighbours."""

    speeds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    waits: list[float | None] = field(default_factory=list)
    growth_bytes: int = 0
    busy: float = 0.0  # share of a core that the flood takes from an otherwise idle server
    done: Counter[str] = field(default_factory=Counter)


async def measure(rounds: int, window_s: float, floods: Sequence[str] = FLOODS) -> None:
    """Run all windows, and print the results."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cleave-hostile-")))
        os.environ["CLEAVE_STATE"] = str(folder / "state")  # of the devices
        process, said = stack.enter_context(serving(folder))
        target = parse_join_url(said["url"])
        host, port = target.address.removeprefix("ws://").removesuffix("/ws").split(":")
        connected = OperatorClient.connect(said["operator_url"])
        client = await stack.enter_async_context(connected)
        codes = [
            await client.request("pair", {"uses": n, "life_s": LIFE_S}) for n in (2, 1, 999, 100)
        ]
        for number in range(2):
            stack.enter_context(
                joined(codes[0]["url"], 1, "--threads", "1", "--name", f"device {number}")
            )
        job = {
            "model": "opt-tiny", "steps": 10**6, "batch": 1, "seq": 64, "checkpoint_every": 0,
            "method": "tiles",
        }  # fmt: skip
        watched = Watched()
        strangers = stack.enter_context(
            attacking(host, int(port), codes[1]["code"], codes[2]["code"])
        )
        idle: dict[tuple[str, int], float] = {}
        async with beside(
            weigh(process.pid, watched),
            keep_coming(target.address, codes[3]["code"], watched),
        ):
            for kind in floods:
                for times in (1,) if kind == NOTHING else (1, 10):
                    span, _ = await flood(kind, times, IDLE_S, strangers)
                    idle[kind, times] = watched.busy(*span)
        await client.request("submit", {"job": job})
        async with beside(
            follow(client, watched),
            weigh(process.pid, watched),
            keep_coming(target.address, codes[3]["code"], watched),
        ):
            while len(watched.steps_s) < 20:  # the first steps plan, and send more
                await asyncio.sleep(0.1)
            before = watched.most_bytes
            found = {}
            for kind in floods:
                for times in (1,) if kind == NOTHING else (1, 10):
                    seen = await flooded(kind, times, rounds, window_s, watched, strangers, before)
                    seen.busy = idle[kind, times] - idle.get((NOTHING, 1), 0.0)
                    found[kind, times] = seen
                    report(kind, times, seen)
        summarise(found, folder / "log")


async def window(window_s: float) -> tuple[float, float]:
    """Wait for a window; return its start and end times."""
    began_s = time.monotonic()
    await asyncio.sleep(window_s)
    return began_s, time.monotonic()


async def flood(
    kind: str, times: int, window_s: float, strangers: subprocess.Popen[str]
) -> tuple[tuple[float, float], dict[str, float]]:
    """Run one window with a flood; return its start and end times and the attacker's counts."""
    assert strangers.stdin is not None
    assert strangers.stdout is not None
    strangers.stdin.write(f"{times} {kind}\n")
    strangers.stdin.flush()
    span = await window(window_s)
    strangers.stdin.write("\n")
    strangers.stdin.flush()
    answer = json.loads(await asyncio.to_thread(strangers.stdout.readline))
    if answer.pop("failed"):
        raise RuntimeError(f"the attacker failed: {answer}")
    return span, answer


async def flooded(
    kind: str,
    times: int,
    rounds: int,
    window_s: float,
    watched: Watched,
    strangers: subprocess.Popen[str],
    before: int,
) -> Seen:
    """Run windows with and without a flood in turn, starting and ending without."""
    seen = Seen()
    quiet = [await window(window_s)]
    attacked = []
    for _ in range(rounds):
        watched.most_bytes = 0
        span, done = await flood(kind, times, window_s, strangers)
        attacked.append(span)
        seen.growth_bytes = max(seen.growth_bytes, watched.most_bytes - before)
        seen.done.update(done)
        quiet.append(await window(window_s))
    for number, span in enumerate(attacked):
        around = [watched.speed(*quiet[number]), watched.speed(*quiet[number + 1])]
        seen.speeds.append(watched.speed(*span))
        seen.ratios.append(2 * watched.speed(*span) / sum(around) if sum(around) else 0.0)
        cheap = (
            watched.cpu_a_step_s(*quiet[number]) + watched.cpu_a_step_s(*quiet[number + 1])
        ) / 2
        seen.costs.append(watched.cpu_a_step_s(*span) / cheap if cheap else 0.0)
        # A newcomer at the window's end may still be waiting.
        came = [wait for at_s, wait in watched.waits if span[0] <= at_s <= span[1]]
        seen.waits += came
    return seen


def _met(bound: bool) -> str:
    return "met" if bound else "NOT met"


def report(kind: str, times: int, seen: Seen) -> None:
    """Print the figures of one flood, and whether they are within their bounds."""
    median = statistics.median(seen.ratios)
    slow = [wait for wait in seen.waits if wait is None or wait > MOST_WAIT_S]
    longest = max((wait for wait in seen.waits if wait is not None), default=0.0)
    did = ", ".join(f"{n:,.0f} {what}" for what, n in seen.done.items())
    print(f"{kind}, {times}x ({did})")
    print(
        f"  steps/s: {spread(seen.speeds)}; over those without {spread(seen.ratios)}, "
        f"at least {LEAST_SPEED}: "
        f"{_met(median >= LEAST_SPEED)}"
    )
    print(
        f"  the server's processor time a step, over that without: {spread(seen.costs)}; "
        f"of a server without a job it takes {seen.busy:.1%} of a core"
    )
    print(
        f"  memory: {seen.growth_bytes / 1e6:+.1f} MB, at most {MOST_GROWTH_BYTES / 1e6:.0f}: "
        f"{_met(seen.growth_bytes <= MOST_GROWTH_BYTES)}"
    )
    print(
        f"  newcomers: {len(seen.waits) - len(slow)} of {len(seen.waits)} let in within "
        f"{MOST_WAIT_S:g} s, the last after {longest:.3f} s: {_met(bool(seen.waits) and not slow)}",
        flush=True,
    )


def summarise(found: dict[tuple[str, int], Seen], log: Path) -> None:
    """Print the results of all floods, and excerpts of the server's log."""
    ratios = [ratio for seen in found.values() for ratio in seen.ratios]
    print(f"all floods: steps/s over those without: {spread(ratios)}")
    lines = log.read_text().splitlines()
    told = [line for line in lines if "refused" in line or "left" in line]
    print(f"the server's log: {len(told)} lines of it, as")
    shown: Counter[str] = Counter()
    for line in told:
        shown[line.split(": ", 1)[-1][:40]] += 1
        if shown[line.split(": ", 1)[-1][:40]] == 1 and len(shown) <= 12:
            print(f"  {line[:160]}")


def main() -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="windows of each flood")
    parser.add_argument("--window-s", type=float, default=6.0)
    parser.add_argument("--only", action="append", choices=FLOODS, help="this flood alone")
    parser.add_argument("--quick", action="store_true", help="one short window each, for a look")
    parser.add_argument("--attack", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        host, port, code, members = options.attack
        asyncio.run(attack(host, int(port), code, members))
    elif options.quick:
        asyncio.run(measure(1, 3.0, options.only or FLOODS))
    else:
        asyncio.run(measure(options.rounds, options.window_s, options.only or FLOODS))


if __name__ == "__main__":
    main()
