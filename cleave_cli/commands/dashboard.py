"""`cleave dashboard`: print the address of a running server's dashboard."""

from __future__ import annotations

import json
from typing import Annotated
from urllib.parse import quote

import typer
from typer import Option

from cleave_cli.operator_link import Data, Server, ask, running_server
from cleave_cli.options import Json, only_here
from cleave_cli.render.qr import qr_code
from cleave_cli.render.text import say


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
