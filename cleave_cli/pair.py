"""`cleave pair`: a new join code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cleave_cli.operator_link import Data, Json, Server, ask, when
from cleave_cli.qr import qr_code, write_qr_png


def pair(
    uses: Annotated[int, typer.Option(help="For how many devices.")] = 1,
    minutes: Annotated[float, typer.Option(help="How long it is valid.")] = 10,
    qr: Annotated[bool, typer.Option(help="Show it as a QR code, too.")] = True,
    png: Annotated[Path | None, typer.Option(help="Write the QR code to this PNG file.")] = None,
    server: Server = "",
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Get a join code from a running server: a device that joins with it is known from then on.

    A phone's camera opens the QR code's page, which makes the browser a device; `cleave join` takes
    the same address.

    Examples:

      cleave pair

      cleave pair --uses 1000 --minutes 60

      cleave pair --png code.png

      cleave pair --server @operator.url --json
    """
    answer = ask("pair", {"uses": uses, "life_s": 60.0 * minutes}, server, data)
    if png is not None:
        write_qr_png(answer["page_url"], png)
    if as_json:
        typer.echo(json.dumps(answer))
        return
    many = f"{uses} devices can join" if uses > 1 else "one device can join"
    until = when(answer["expires_s"])
    typer.echo(f"until {until}, {many}: open the address in its browser, or run there\n", err=True)
    typer.echo(f"  cleave join '{answer['page_url']}'\n")
    if qr:
        typer.echo(qr_code(answer["page_url"]), err=True)
