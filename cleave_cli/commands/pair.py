"""`cleave pair`: create, list and void join codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from typer import Option

from cleave.errors import UsageError
from cleave.transport.addresses import app_link
from cleave_cli.operator_link import Data, Server, ask, say_decided, when
from cleave_cli.options import Json, browsers_warn, only_here
from cleave_cli.render.qr import qr_code, write_qr_png
from cleave_cli.render.text import printable, say

_SIDELOADING: Final = """\
The app connects once its owner's conditions hold (plugged in, on Wi-Fi, cool, at its hours): the
code has to be valid until then. For a phone that works at night, add --minutes 1440.

The app is not there yet? Build it from a copy of Cleave (android_client/build_apk.sh), then either
  adb install -r android_client/build/cleave.apk    (phone on a cable, USB debugging on)
or copy that file to the phone and open it there; Android asks to allow this source of apps.
If the phone's camera does not open the link: paste the link into the app, or open this page in the
phone's browser and take "Open in the app":

  {page_url}"""

_HAS_APP: Final = "&app=1"  # tells the join page to offer the app


def pair(
    uses: Annotated[int, Option(help="Number of devices that may use the code.")] = 1,
    minutes: Annotated[float, Option(help="Minutes for which the code is valid.")] = 10,
    own: Annotated[
        bool, Option("--own", help="For devices of your own, which may train whole layers.")
    ] = False,
    qr: Annotated[bool, Option(help="Also show a QR code.")] = True,
    png: Annotated[Path | None, Option(help="Write the QR code to this PNG file.")] = None,
    android: Annotated[bool, Option("--android", help="Print a link for the Android app.")] = False,
    list_codes: Annotated[
        bool, Option("--list", help="List join codes and their devices.")
    ] = False,
    void: Annotated[
        int | None, Option(help="Invalidate the code with this ID; its devices stay.")
    ] = None,
    server: Server = "",
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Make a join code for a running server. The server recognizes a device that has used a code.

    To turn a phone's browser into a device, scan the QR code with the phone and open the page. The
    page's address also works with `cleave join`.

    Examples:

      cleave pair

      cleave pair --uses 1000 --minutes 60

      cleave pair --own

      cleave pair --png code.png

      cleave pair --android

      cleave pair --server @operator.url --json

      cleave pair --list

      cleave pair --void 7
    """
    if list_codes and void is not None:
        raise UsageError(f"--list shows join codes and --void {void} ends one; give one of the two")
    if list_codes:
        _list(ask("codes", {}, server, data), as_json=as_json)
        return
    if void is not None:
        answer = ask("void", {"code": void}, server, data)
        code = answer["code"]
        stay = f"; who came by it stays: {', '.join(code['devices'])}" if code["devices"] else ""
        text = f"join code {code['id']} is void: nobody joins with it any more{stay}"
        say_decided(answer, text, as_json=as_json)
        return
    answer = ask("pair", {"uses": uses, "life_s": 60.0 * minutes, "own": own}, server, data)
    answer["app_url"] = app_link(answer["page_url"])
    url = answer["app_url" if android else "page_url"]
    here = only_here(answer["page_url"])
    if png is not None:
        if here:
            raise UsageError(f"--png {png} was not written: {here}")
        write_qr_png(url, png)
    if as_json:
        typer.echo(json.dumps(answer))
        return
    yours = " of your own" if own else ""
    many = f"{uses} devices{yours} can join" if uses > 1 else f"one device{yours} can join"
    until = when(answer["expires_s"])
    how = "open the address in its browser, or run there"
    if android:
        how = "open the link, or scan the code, on the phone"
    typer.echo(f"until {until}, {many}: {how}\n", err=True)
    say(f"  {url}\n" if android else f"  cleave join '{url}'\n", err=False)
    if here:
        say(f"{here}\n")
    elif qr:
        typer.echo(qr_code(url), err=True)
    if android:
        page_url = answer["page_url"] + _HAS_APP
        typer.echo(_SIDELOADING.format(page_url=page_url), err=True)
    elif warning := browsers_warn(url):
        typer.echo(warning, err=True)


def _list(answer: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(answer))
        return
    if not answer["codes"]:
        typer.echo("no join codes yet; make one with: cleave pair", err=True)
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("id", "used", "own", "state", "made", "expires", "devices"):
        table.add_column(heading, justify="right" if heading in ("id", "used") else "left")
    for code in answer["codes"]:
        reason = f" ({code['reason']})" if code["reason"] else ""
        table.add_row(
            str(code["id"]), f"{code['used']} of {code['uses']}", "yes" if code["own"] else "",
            printable(code["state"] + reason), when(code["made_s"]), when(code["expires_s"]),
            printable(", ".join(code["devices"])),
        )  # fmt: skip
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200
    console.print(table, markup=False)
