"""`cleave dashboard`: print the address of a running server's dashboard."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from cleave_cli.operator_link import Data, Json, Server, ask
from cleave_cli.render.qr import qr_code
from cleave_cli.render.text import say


def dashboard(
    qr: Annotated[bool, typer.Option(help="Show it as a QR code, too.")] = True,
    server: Server = "",
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Print the address of a running server's dashboard.

    Whoever has it may look at jobs, devices and events, and change nothing. `cleave status` shows
    the same in a terminal.

    Examples:

      cleave dashboard

      cleave dashboard --server @operator.url --no-qr
    """
    answer = ask("dashboard", {}, server, data)
    if as_json:
        typer.echo(json.dumps(answer))
        return
    say(answer["url"], err=False)
    if qr:
        typer.echo(qr_code(answer["url"]), err=True)
