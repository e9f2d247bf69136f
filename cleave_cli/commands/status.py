"""`cleave status` and `cleave dashboard`: a server's job, devices, traffic and events."""

from __future__ import annotations

import asyncio
import json
import math
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console
from rich.live import Live
from typer import Option

from cleave.errors import UsageError
from cleave_cli.operator_link import Data, Server, ask, running_server
from cleave_cli.options import Json, only_here
from cleave_cli.render.status import Seen, shown
from cleave_cli.render.text import qr_code, say

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
        raise UsageError(f"--every must be at least {LEAST_EVERY_S:g} seconds, not {every:g}")
    pause_s = every if watch else None
    try:
        asyncio.run(_show(running_server(server, data), pause_s, as_json=as_json))
    except KeyboardInterrupt:  # Ctrl-C ends --watch
        return


async def _show(url: str, pause_s: float | None, *, as_json: bool) -> None:
    """Show the server's state every `pause_s` seconds until cancelled, or once if it is None."""
    from cleave_cli.operator_client import OperatorClient

    async with OperatorClient.connect(url) as client:
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


def dashboard(
    operator: Annotated[
        bool,
        Option(help="The address for operators, who may also pause, resume and stop jobs."),
    ] = False,
    qr: Annotated[bool, Option(help="Also show a QR code.")] = True,
    server: Server = "",
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Print the address of a running server's dashboard.

    The address lets its holder view jobs, devices and events, but change nothing. Keep an address
    with --operator secret: whoever has it may do everything that an operator may. `cleave status`
    shows the same information in a terminal.

    Examples:

      cleave dashboard

      cleave dashboard --server @operator.url --no-qr

      cleave dashboard --operator
    """
    answer = ask("dashboard", {}, server, data)
    if operator:
        from cleave.transport.join_url import parse_join_url, read_url

        token = parse_join_url(read_url(running_server(server, data))).credential
        answer = {"url": f"{answer['url'].partition('#')[0]}#c={quote(token, safe='')}"}
    if as_json:
        typer.echo(json.dumps(answer))
        return
    say(answer["url"], err=False)
    if qr and not only_here(answer["url"]):
        typer.echo(qr_code(answer["url"]), err=True)
