"""`cleave dashboard`: print the address of a running server's dashboard."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from typer import Option

from cleave_cli.operator_link import Data, Server, ask
from cleave_cli.options import Json
from cleave_cli.render.qr import qr_code
from cleave_cli.render.text import say


def dashboard(
    qr: Annotated[bool, Option(help="Also show a QR code.")] = True,
    server: Server = "",
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Print the address of a running server's dashboard.

    The address lets its holder view jobs, devices and events, but change nothing. `cleave status`
    shows the same information in a terminal.

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
