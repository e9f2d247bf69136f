"""`cleave status`: show a server's job, devices, traffic and events."""

from __future__ import annotations

import asyncio
import json
import math
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from typer import Option

from cleave.errors import UsageError
from cleave_cli.operator_link import Data, Server, running_server
from cleave_cli.render.status import Seen, shown

if TYPE_CHECKING:
    from cleave_cli.operator_client import OperatorClient

LEAST_EVERY_S = 0.2
LEAST_WINDOW_S = 1.5  # minimum time over which rates are averaged, without --watch


def status(
    watch: Annotated[bool, Option("--watch", "-w", help="Update until Ctrl-C.")] = False,
    every: Annotated[float, Option(help="With --watch: seconds between updates.")] = 2,
    server: Server = "",
    data: Data = None,
    as_json: Annotated[
        bool, Option("--json", help="The server's answer as JSON, one line per update.")
    ] = False,
) -> None:
    """Show a server's job, devices, traffic, energy and events, as the dashboard does.

    Examples:

      cleave status

      cleave status --watch

      cleave status --server @operator.url --json
    """
    if not LEAST_EVERY_S <= every < math.inf:
        raise UsageError(f"--every is {every:g}; give {LEAST_EVERY_S:g} seconds or more")
    pause_s = every if watch else None
    try:
        asyncio.run(_show(running_server(server, data), pause_s, as_json=as_json))
    except KeyboardInterrupt:  # Ctrl-C ends --watch
        return


async def _show(url: str, pause_s: float | None, *, as_json: bool) -> None:
    """Show the server's state every `pause_s` seconds until cancelled, or once if it is None."""
    from cleave_cli.operator_client import OperatorClient

    client = await OperatorClient.connect(url)
    try:
        if as_json:
            await _print(client, pause_s)
        elif pause_s is None:
            seen = Seen()
            await _learn(client, seen)
            window_s = seen.latest["rates"]["window_s"]
            if window_s is not None and window_s < LEAST_WINDOW_S:
                # Rates cover the time since an earlier request. If no other client sent a request
                # recently, the earlier request is this client's own, a few milliseconds ago.
                await asyncio.sleep(LEAST_WINDOW_S)
                await _learn(client, seen)
            Console(highlight=False).print(shown(seen))
        else:
            await _draw(client, pause_s)
    finally:
        await client.close()


async def _print(client: OperatorClient, pause_s: float | None) -> None:
    """Print each overview as one line of JSON, with only new records and events."""
    seen = Seen()
    while True:
        typer.echo(json.dumps(await _look(client, seen)))
        if pause_s is None:
            return
        await asyncio.sleep(pause_s)


async def _draw(client: OperatorClient, pause_s: float) -> None:
    seen = Seen()
    with Live(console=Console(highlight=False), auto_refresh=False, screen=True) as live:
        while True:
            await _learn(client, seen)
            live.update(shown(seen), refresh=True)
            await asyncio.sleep(pause_s)


async def _learn(client: OperatorClient, seen: Seen) -> None:
    """Request overviews until all new records and events have been received."""
    await _look(client, seen)
    while not seen.complete:
        await _look(client, seen)


async def _look(client: OperatorClient, seen: Seen) -> dict[str, Any]:
    asked = {"after_event": seen.last_event, "after_record": seen.next_record}
    overview = await client.request("overview", asked)
    seen.take(overview)
    return overview
