"""`cleave join`: make this machine a device."""

from __future__ import annotations

import json
import os
import socket
from typing import Annotated

import typer

EXAMPLES = """
Examples:

  cleave join 'ws://192.168.1.20:8765/ws#c=...'

  cleave join URL --threads 2 --memory 2000
"""


def join(
    url: Annotated[str, typer.Argument(help="The join URL that `cleave serve` prints.")],
    name: Annotated[str, typer.Option(help="What to call this device.")] = "",
    executor: Annotated[str, typer.Option(help="What multiplies: auto, numpy or torch.")] = "auto",
    memory: Annotated[int, typer.Option(help="Memory to offer for arrays, in MB.")] = 1000,
    threads: Annotated[int, typer.Option(help="Threads to multiply with; 0 for all.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines on stdout.")] = False,
) -> None:
    """Make this machine a device: multiply for a parameter server until it ends or Ctrl-C."""
    if threads:  # read by the math libraries when they are imported, so before they are
        for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ[variable] = str(threads)

    import asyncio
    import signal

    from cleave.device.executors import choose
    from cleave.device.memory import hold_strips_well
    from cleave.errors import UsageError
    from cleave.transport import join as device

    if memory < 1:
        raise UsageError(f"--memory {memory} offers nothing; give at least 1 (MB)")
    if threads < 0:
        raise UsageError(f"--threads {threads} is below zero; give 0 for all cores, or a count")
    target = device.parse_join_url(url)
    give_back = hold_strips_well()
    speed = choose(executor)
    label = name or socket.gethostname()

    def say(event: str, human: str, **fields: object) -> None:
        if as_json:
            typer.echo(json.dumps({"event": event, **fields}))
        else:
            typer.echo(human, err=True)

    def ready(number: int) -> None:
        rate = speed.flops_per_s / 1e9
        say(
            "ready",
            f"joined as device {number} ({speed.executor.name}, {rate:.0f} GFLOP/s); "
            f"Ctrl-C to leave",
            device=number,
            executor=speed.executor.name,
            flops_per_s=speed.flops_per_s,
        )

    async def run() -> None:
        connection = await device.open_connection(target.address)
        hello = device.device_hello(
            credential=target.credential,
            name=label,
            memory_bytes=memory * 10**6,
            flops_per_s=speed.flops_per_s,
        )
        session = device.DeviceSession(connection, speed.executor, hello, ready, give_back)
        loop = asyncio.get_running_loop()
        running = asyncio.ensure_future(session.run())

        def interrupted() -> None:
            # The first time: answer what is there and go. The second time: go.
            if session.core.welcome is None or session.core.draining:
                running.cancel()
            else:
                say("draining", "finishing what this device was given; Ctrl-C again to leave now")
                session.drain()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupted)
        try:
            reason = await running
        except asyncio.CancelledError:
            reason = "interrupted"
        status = session.status
        say(
            "left",
            f"left ({reason}): {status.blocks} blocks, {status.flops / 1e9:.1f} GFLOP, "
            f"{status.received_bytes / 1e6:.1f} MB down, {status.sent_bytes / 1e6:.1f} MB up",
            reason=reason,
            blocks=status.blocks,
            flops=status.flops,
            downlink_bytes=status.received_bytes,
            uplink_bytes=status.sent_bytes,
        )

    asyncio.run(run())


join.__doc__ = (join.__doc__ or "") + "\n" + EXAMPLES
