"""Measures the link to a parameter server: joins, is probed, gets the rates, leaves; several times.

The PS times ordinary `put` and `run` messages: a row times a column is all download, a column
times a row all upload, so no byte of one direction is counted in the other
(`cleave.scheduler.probe`). It sends the rates in a `measured` message. The device's `hello` asks
for nothing else, so it gets no tasks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from cleave.device.core import DeviceCore
from cleave.device.session import device_hello
from cleave.errors import CleaveError, UsageError
from cleave.machine.backends import MatmulBackend, NumpyBackend, execute
from cleave.machine.multiplication import Compute
from cleave.protocol import limits, messages
from cleave.protocol.codec import decode, encode
from cleave.scheduler.probe import FIRST_ID, LinkRates
from cleave.transport.connect import open_connection
from cleave.transport.connection import Connection, ConnectionLostError
from cleave.transport.join_url import JoinUrl, parse_join_url
from profiles.device_profile import LinkProfile, Quantiles

MEMORY_BYTES: Final = 64 * 2**20
"""What is offered to the PS: enough for its largest probes."""

PATIENCE_S: Final = 300.0
"""A link that needs longer for one probe is given up."""


async def measure_connection(connection: Connection, hello: messages.Hello) -> LinkRates:
    """Let the PS probe this device once on a connection, and close it.

    Args:
        connection: to the PS.
        hello: what the device says of itself; `measure` is set in it.

    Raises:
        CleaveError: when the PS refuses, goes, or does not measure links.
    """
    core, executor = DeviceCore(hello.memory_bytes), NumpyBackend()
    beats = asyncio.create_task(_heartbeats(connection))
    try:
        async with asyncio.timeout(PATIENCE_S):
            await connection.send(encode(replace(hello, measure=True)))
            while True:
                message = decode(await connection.receive())
                match message:
                    case messages.Measured():
                        return LinkRates(
                            message.downlink_bytes_per_s,
                            message.uplink_bytes_per_s,
                            message.latency_s,
                        )
                    case messages.Error():
                        raise CleaveError(f"the server refused this device: {message.message}")
                    case messages.Bye():
                        raise CleaveError(f"the server ended the session: {message.reason}")
                    case messages.Put() | messages.Run() if message.id < FIRST_ID:
                        raise CleaveError(
                            "the server sends work instead of measuring the link; "
                            "install the same version of cleave on both"
                        )
                    case _:
                        await _obey(core, executor, connection, message)
    except TimeoutError:
        raise CleaveError(f"the link was not measured within {PATIENCE_S:.0f} s") from None
    except ConnectionLostError as error:
        raise CleaveError(f"the connection was lost while it was measured: {error}") from None
    finally:
        beats.cancel()
        await connection.close()


async def _obey(
    core: DeviceCore, executor: MatmulBackend, connection: Connection, message: messages.Message
) -> None:
    for action in core.received(message):
        if isinstance(action, Compute):  # a product of vectors: over before a thread would start
            began_s = time.perf_counter()
            block = execute(executor, action).pack()
            for answer in core.computed(action.run, block, time.perf_counter() - began_s):
                assert not isinstance(answer, Compute)
                await connection.send(encode(answer))
        else:
            await connection.send(encode(action))


async def _heartbeats(connection: Connection) -> None:
    """A slow link takes a while for one probe; the PS must not take that for silence."""
    with suppress(ConnectionLostError):
        while True:
            await asyncio.sleep(limits.HEARTBEAT_S / 2)
            await connection.send(encode(messages.Heartbeat()))


async def measure_link(
    url: str,
    repeats: int = 7,
    progress: Callable[[int, LinkRates], None] | None = None,
    keys: Callable[[JoinUrl], tuple[str, str]] | None = None,
) -> list[LinkRates]:
    """Measure the link to a server `repeats` times, each time on a new connection.

    Args:
        url: the join URL for devices.
        repeats: how often.
        progress: called after each measurement with the count so far and the rates.
        keys: returns `credential` and `code` for `hello`; by default those of the URL.

    Raises:
        UsageError: for a malformed URL, or fewer than one repeat.
        CleaveError: when the server is unreachable, refuses, or does not measure links.
    """
    if repeats < 1:
        raise UsageError(f"the link cannot be measured {repeats} times; give 1 or more")
    target = parse_join_url(url)
    credential, code = keys(target) if keys is not None else (target.credential, "")
    hello = device_hello(
        credential=credential, join_code=code, name="link measurement", memory_bytes=MEMORY_BYTES
    )
    found = []
    for done in range(1, repeats + 1):
        found.append(await measure_connection(await open_connection(target), hello))
        if progress is not None:
            progress(done, found[-1])
    return found


def summarise(measured: Sequence[LinkRates], source: str = "") -> LinkProfile:
    """Return the spread of several measurements, as a profile states it."""
    return LinkProfile(
        downlink_bytes_per_s=_spread([m.downlink_bytes_per_s for m in measured]),
        uplink_bytes_per_s=_spread([m.uplink_bytes_per_s for m in measured]),
        round_trip_s=_spread([2 * m.latency_s for m in measured]),
        source=source,
    )


def _spread(values: Sequence[float]) -> Quantiles:
    import numpy as np

    p10, p50, p90 = (float(q) for q in np.quantile(values, (0.1, 0.5, 0.9)))
    return Quantiles(p10, p50, p90)
