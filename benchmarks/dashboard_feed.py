"""A server that answers a dashboard with made-up overviews, to measure only the page.

The pages and their headers are the server's own (`cleave.server.http.pages`). Messages go through
the protocol's codec and a real WebSocket. Every reply changes every figure of every device and all
tiles of a plan, which is more than in a real fleet.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import numpy as np
from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from cleave.protocol import messages
from cleave.protocol.codec import decode, encode
from cleave.server.api.overview import DEVICE_COLUMNS, MAX_STREAMS, STREAM_S
from cleave.server.http.pages import Pages
from cleave.transport.http import read_request

KINDS = ("phone", "laptop", "tablet", "browser")
STATES = ("busy", "busy", "busy", "ready", "overdue", "draining", "quarantined")
EVENTS = ("join", "leave", "overdue", "reissue", "quarantine")
STEPS_AT_START = 500
SLABS = 4


@dataclass(slots=True)
class Feed:
    """Overviews of a made-up fleet, each one second after the previous.

    Args:
        devices: number of devices; 0 also means no job.
        start_s: Unix time of the first overview.
        seed: seed of all made-up values.
        by_stages: whether the job runs by stages rather than tiles.
        compared: whether the job is compared with another run.
    """

    devices: int
    start_s: float
    seed: int = 0
    by_stages: bool = False
    compared: bool = False
    replies: int = 0

    def overview(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the data of the next reply."""
        self.replies += 1
        now_s = self.start_s + self.replies
        random = np.random.default_rng((self.seed, self.replies))
        running = self.devices > 0
        return {
            "server": {
                "version": "0.1.0",
                "started_s": self.start_s - 8000,
                "now_s": now_s,
                "verify": "auto",
                "name": "made-up",
            },
            "card": {"egress_bytes_per_s": 1.25e9, "ingress_bytes_per_s": 1.25e9},
            "totals": {
                "blocks": 1000 * self.replies,
                "flops": 3e12 * self.replies,
                "down_bytes": 400_000_000 * self.replies,
                "up_bytes": 90_000_000 * self.replies,
                "reissued": self.replies,
                "wrong": 2,
                "joined": self.devices + 4,
                "left": 4,
            },
            "traffic": {
                "down": {"weights": 250_000_000, "activations": 140_000_000 * self.replies},
                "up": {"gradients": 60_000_000, "activations": 80_000_000 * self.replies},
            },
            "rates": {
                "window_s": 10.0,
                "blocks_per_s": 1000.0,
                "flops_per_s": float(random.normal(3e12, 1e11)),
                "egress_bytes_per_s": float(random.normal(4e8, 2e7)),
                "ingress_bytes_per_s": float(random.normal(9e7, 5e6)),
            },
            "job": self._job(int(arguments.get("after_record", 0))) if running else None,
            "devices": self._devices(random),
            "plan": self._plan(random) if running and not self.by_stages else None,
            "stages": self._stages() if running and self.by_stages else None,
            "gemms": [
                [i, "fc1", 1.0, float(random.uniform(0.9, 1.4))]
                for i in range(self.replies, self.replies + 8)
            ],
            "timeline": self._timeline(int(arguments.get("device", 0)), now_s),
            "stream": self._stream(random),
            "events": self._events(int(arguments.get("after_event", 0)), now_s),
            "energy": {
                "devices_j": 5000.0 * self.replies,
                "ps_j": 90.0 * self.replies,
                "gco2e": 0.6 * self.replies,
                "devices_known": self.devices,
                "devices_unknown": 3,
                "assumed": ["The grid emits 381 g of CO2 equivalent a kWh.", "The PS draws 90 W."],
            },
        }

    def _devices(self, random: np.random.Generator) -> dict[str, Any]:
        rows = self._rows(random)
        by = Counter((row[3], row[4]) for row in rows)
        return {
            "columns": list(DEVICE_COLUMNS),
            "rows": rows,
            "total": len(rows),
            "by": [[kind, state, count] for (kind, state), count in by.items()],
        }

    def _rows(self, random: np.random.Generator) -> list[list[Any]]:
        measured = random.uniform(0.3, 1.05, (self.devices, 3)).tolist()
        return [
            [
                i + 1,
                f"{i:08x}",
                f"{KINDS[i % 4]}-{i + 1}",
                KINDS[i % 4],
                STATES[(i * i + self.replies // 5) % len(STATES)],
                "",
                "known" if i % 9 else "new",
                self.replies * 3 + i,
                self.replies * 0.8,
                self.replies * 400_000 + i,
                self.replies * 90_000 + i,
                measured[i][0] * 50e6,
                measured[i][1] * 8e6,
                measured[i][2] * 6e12,
                50e6,
                8e6,
                6e12,
                0.02,
                self.replies * 5.0,
                "measured" if i % 5 == 0 else "modelled",
                0,
                i % 4 == 1,
            ]
            for i in range(self.devices)
        ]

    def _job(self, after: int) -> dict[str, Any]:
        last = STEPS_AT_START + self.replies
        first = min(after, last)
        records = [self._record(i) for i in range(first, min(last, first + 500))]
        return {
            "job": "20261121-1",
            "state": "running",
            "model": "opt-1.3b",
            "steps": 2000,
            "started_s": self.start_s - 4000,
            "first_record": first,
            "records": records,
            "next_record": first + len(records),
            "last_step": self._record(last - 1),
        }

    def _record(self, index: int) -> dict[str, Any]:
        random = np.random.default_rng((self.seed, 7, index))
        fleet_s, ps_s = float(random.normal(6, 0.3)), float(random.normal(1.5, 0.1))
        loss = 3 + 7 * float(np.exp(-index / 150)) + float(random.normal(0, 0.08))
        return {
            "event": "step",
            "step": index + 1,
            "loss": loss,
            **({"against_loss": loss * (1 + 1e-6)} if self.compared else {}),
            "tokens": 16384,
            "learning_rate": 2e-4,
            "clock": "wall",
            "method": "tiles",
            "wall_s": fleet_s + ps_s,
            "fleet_s": fleet_s,
            "ps_s": ps_s,
            "verify_s": 0.1,
            "downlink_bytes": 3_000_000_000,
            "uplink_bytes": 800_000_000,
            "floor_bytes": 3_300_000_000,
            "tiles": 5000,
            "blocks": 80000,
            "reissued": 1,
        }

    def _plan(self, random: np.random.Generator) -> dict[str, Any]:
        across = max(1, round((self.devices / SLABS) ** 0.5))
        down = max(1, self.devices // (SLABS * across))
        side, blocks = 8192, 16
        done = random.integers(0, blocks + 1, (SLABS, across, down)).tolist()
        column, row, depth = side // across, side // down, side // SLABS
        tiles = [
            [
                1 + (s * across + c) * down + r,
                r * row,
                (r + 1) * row,
                c * column,
                (c + 1) * column,
                s * depth,
                (s + 1) * depth,
                blocks,
                done[s][c][r],
            ]
            for s in range(SLABS)
            for c in range(across)
            for r in range(down)
        ]
        return {
            "name": "decoder.7.fc1 weight gradient",
            "m": down * row,
            "n": across * column,
            "k": side,
            "predicted_s": 4.2,
            "elapsed_s": 0.6 * (self.replies % 7),
            "generation": self.replies // 7,
            "tiles": tiles,
        }

    def _stages(self) -> dict[str, Any]:
        """Return a step in which each device holds its own layers."""
        batches, count = 16, min(self.devices, 24)
        done = self.replies % (3 * batches)
        passed = [min(batches, max(0, done - batches * part)) for part in range(3)]
        forward, backward, landed = passed
        stages = [
            {
                "first": i,
                "stop": i + 1,
                "loss": i == count - 1,
                "forward": forward,
                "backward": backward,
                "landed": landed,
                "devices": len(range(i, self.devices, count)),
                "holders": [
                    [device + 1, int(forward < batches), int(forward == batches), backward, 0]
                    for device in range(i, self.devices, count)
                ],
            }
            for i in range(count)
        ]
        return {
            "batches": batches,
            "ended": done == 0,
            "repeated": 2,
            "logged": None,
            "stages": stages,
        }

    def _timeline(self, device: int, now_s: float) -> dict[str, Any] | None:
        if not device:
            return None
        spans = []
        for i in range(64):
            at_s = now_s - 20 + i * 0.3
            spans.append(["receive", at_s, at_s + 0.28])
            spans.append(["compute", at_s + 0.28, at_s + 0.48])
            spans.append(["send", at_s + 0.48, at_s + 0.6])
        return {"device": device, "spans": spans}

    def _stream(self, random: np.random.Generator) -> dict[str, Any]:
        shown = min(self.devices, MAX_STREAMS)
        rows = []
        for device in range(1, shown + 1):
            spans, ago_ms = [], int(1000 * STREAM_S)
            while ago_ms > 0:  # devices that never rest
                long_ms = min(ago_ms, int(random.integers(200, 1500)))
                for lane, share in enumerate((0.3, 1.0, 0.2)):
                    spans.append([lane, ago_ms, int(share * long_ms)])
                ago_ms -= long_ms
            rows.append([device, spans])
        return {"window_s": STREAM_S, "devices": rows, "hidden": self.devices - shown}

    def _events(self, after: int, now_s: float) -> dict[str, Any]:
        last = 200 + 3 * self.replies if self.devices else 0
        rows = []
        for i in range(max(after, last - 500), last):
            kind, device = EVENTS[i % len(EVENTS)], 1 + i * 31 % max(1, self.devices)
            name = KINDS[device % 4]
            rows.append([i + 1, now_s - (last - i) / 3, kind, device, f"{name}-{device}: {kind}"])
        columns = ["id", "time_s", "kind", "device", "text"]
        return {"columns": columns, "rows": rows, "last": last}


@contextmanager
def serving(feed: Feed, token: str = "viewer", port: int = 0) -> Iterator[str]:
    """Serve the feed and the built pages on a port (0: any free one); yield the dashboard's URL.

    Raises:
        SystemExit: when the pages are not built.
    """
    pages = Pages.of_package()
    if not pages.complete:
        raise SystemExit("the pages are not built; run `npm ci && npm run build` in web_client")
    started: list[tuple[str, Callable[[], object]]] = []
    ready = threading.Event()

    async def run() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()

        def plain(connection: ServerConnection, request: Request) -> Response | None:
            return _page(pages, request)

        async def session(connection: ServerConnection) -> None:
            await _serve(connection, feed, token)

        async with serve(
            session, "127.0.0.1", port, process_request=plain, compression=None
        ) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/#c={token}"
            started.append((url, lambda: loop.call_soon_threadsafe(stop.set)))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    ready.wait()
    url, stop = started[0]
    try:
        yield url
    finally:
        stop()
        thread.join()


def _page(pages: Pages, request: Request) -> Response | None:
    asked = read_request(request.path, request.headers, "", secure=False)
    if asked.path == "/ws":
        return None
    answer = pages.answer(asked)
    if answer is None:
        return Response(HTTPStatus.NOT_FOUND, "Not Found", Headers(), b"")
    length = str(len(answer.body))
    headers = Headers([*answer.headers, ("Content-Length", length), ("Connection", "close")])
    return Response(answer.status, HTTPStatus(answer.status).phrase, headers, answer.body)


async def _serve(connection: ServerConnection, feed: Feed, token: str) -> None:
    try:
        hello = decode(await connection.recv(decode=False))
        assert isinstance(hello, messages.Hello)
        if hello.credential != token:
            error = messages.Error(messages.ErrorCode.CREDENTIAL, "this token is not valid")
            await connection.send(b"".join(encode(error)))
            return
        await connection.send(b"".join(encode(messages.Welcome(device=0))))
        while True:
            request = decode(await connection.recv(decode=False))
            assert isinstance(request, messages.Request)
            data = feed.overview(request.arguments)
            await connection.send(b"".join(encode(messages.Reply(request.id, ok=True, data=data))))
    except ConnectionClosed:
        return


def made_up(devices: int, *, by_stages: bool = False, compared: bool = False) -> Feed:
    """Return a feed that starts now."""
    start_s = float(int(time.time()))
    return Feed(devices, start_s, by_stages=by_stages, compared=compared)
