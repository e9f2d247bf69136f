"""Measure the link between this machine and a parameter server (PS).

For each measurement, this machine joins the PS as a device, lets the PS probe each direction
(`cleave.scheduler.sessions.probe`), and leaves. The `hello` message requests only a measurement, so
the PS sends no training tasks.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from cleave.device.compute_thread import ComputeThread
from cleave.device.session import DeviceSession, device_hello
from cleave.errors import CleaveError, UsageError
from cleave.machine.backends import NumpyBackend
from cleave.protocol import messages
from cleave.scheduler.sessions.probe import FIRST_ID
from cleave.transport.connection import Connection, ConnectionLostError, open_connection
from cleave.transport.join_url import JoinUrl, parse_join_url
from profiles.device_profile import LinkProfile, Quantiles

MEMORY_BYTES: Final = 64 * 2**20  # memory offered to the PS; enough for its largest probe
PATIENCE_S: Final = 300.0  # timeout of one link measurement


async def measure_connection(connection: Connection, hello: messages.Hello) -> messages.Measured:
    """Let the PS measure the link once, close the connection, and return the link rates."""
    # Probes multiply vectors, which takes less time than passing the work to a thread.
    computer = ComputeThread(NumpyBackend(), inline_flops=math.inf)
    session = DeviceSession(connection, computer, replace(hello, measure=True), check=_refuse_work)
    lost = "the connection was lost during the measurement"
    try:
        async with asyncio.timeout(PATIENCE_S):
            reason = await session.run()
    except TimeoutError:
        raise CleaveError(f"measuring the link took more than {PATIENCE_S:.0f} s") from None
    except CleaveError as error:
        if isinstance(error.__cause__, ConnectionLostError):
            raise CleaveError(f"{lost}: {error.__cause__}") from None
        raise
    found = session.measured
    if found is None:
        raise CleaveError(f"{'the server ended the session' if session.bye else lost}: {reason}")
    return found


def _refuse_work(message: messages.Message) -> None:
    if isinstance(message, messages.Put | messages.Run) and message.id < FIRST_ID:
        raise CleaveError(
            "the server sent work instead of measuring the link; "
            "install the same version of cleave on both machines"
        )


async def measure_link(
    url: str,
    repeats: int = 7,
    progress: Callable[[int, messages.Measured], None] | None = None,
    keys: Callable[[JoinUrl], tuple[str, str]] | None = None,
) -> list[messages.Measured]:
    """Measure the link to a parameter server `repeats` times, each time on a new connection.

    Args:
        url: join URL that the server prints for devices.
        progress: called after each measurement with the number of measurements so far and the
            latest rates.
        keys: returns a device credential and a join code for a parsed URL. None means the
            credential in the URL, and no join code.
    """
    if repeats < 1:
        raise UsageError(f"the number of link measurements must be 1 or more, not {repeats}")
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


def summarise(measured: Sequence[messages.Measured], source: str = "") -> LinkProfile:
    """Return a link profile with the quantiles of one or more measurements of the same link."""
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
