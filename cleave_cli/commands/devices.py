"""`cleave devices` and `cleave pair`: devices that a server knows, and codes for new devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from cleave.errors import UsageError
from cleave.transport.addresses import app_link
from cleave_cli.operator_link import Data, Server, ask, say_decided, when
from cleave_cli.options import Json, browsers_warn, human_bytes, only_here
from cleave_cli.render.text import (
    Csv,
    Form,
    form_of,
    printable,
    qr_code,
    say,
    write_csv,
    write_qr_png,
)

_SIDELOADING: Final = """\
The app connects once its owner's conditions hold (plugged in, on Wi-Fi, cool, at its hours). The
code must be valid until then. For a phone that works at night, add --minutes 1440.

To install the app, build it from a copy of Cleave (android_client/build_apk.sh), then either
  adb install -r android_client/build/cleave.apk    (phone on a cable, USB debugging on)
or copy that file to the phone and open it there; Android asks to allow this source of apps.
If the phone's camera does not open the link, paste the link into the app, or open this page in the
phone's browser and tap "Open in the app":

  {page_url}"""

_HAS_APP: Final = "&app=1"  # tells the join page to offer the app


def pair(
    uses: Annotated[int, Option(help="Number of devices that may use the code.")] = 1,
    minutes: Annotated[float, Option(help="Minutes for which the code is valid.")] = 10,
    own: Annotated[
        bool, Option("--own", help="For your own devices, which may train whole layers.")
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
        raise UsageError(f"--list cannot be combined with --void {void}; use one of the two")
    if list_codes:
        _list(ask("codes", {}, server, data), as_json=as_json)
        return
    if void is not None:
        answer = ask("void", {"code": void}, server, data)
        code = answer["code"]
        stay = (
            f"; devices that used it stay: {', '.join(code['devices'])}" if code["devices"] else ""
        )
        text = f"join code {code['id']} is void: no more devices can use it{stay}"
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
    how = "open the address in its browser, or run on it"
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


app = typer.Typer(
    name="devices",
    help="List the devices of a server; revoke and release them, mark your own.",
    rich_markup_mode=None,
)

_COLUMNS: Final = (
    "id", "name", "own", "state", "last seen", "sessions", "lost", "wrong", "blocks", "failed",
    "TFLOP", "down", "up", "compute", "energy", "measured",
)  # fmt: skip
_TEXTS: Final = ("name", "own", "state", "last seen", "measured")
_NARROW: Final = ("id", "name", "own", "state", "last seen", "wrong", "blocks")
_RECORDED: Final = (
    "id", "name", "own", "state", "reason", "session", "paired_s", "seen_s", "sessions", "losses",
    "wrong_results", "failures", "failure", "blocks", "flops", "downlink_bytes", "uplink_bytes",
    "compute_s", "energy_j",
)  # fmt: skip
_WIDE: Final = 120  # terminal width, in characters, for all columns of the table

Name = Annotated[str, Argument(help="Name or ID of the device (see `cleave devices`).")]


@app.callback(invoke_without_command=True)
def devices(
    context: typer.Context,
    server: Server = "",
    data: Data = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """List the devices that a server knows, with their state, reputation and contribution.

    Plans use the speed and the link in the last column, measured when a device joined. A device of
    which too little was measured gets no work; to measure it again, let it join again.

    A terminal narrower than 120 columns shows only the most important columns.

    Examples:

      cleave devices

      cleave devices --server @operator.url --json
    """
    if context.invoked_subcommand is not None:
        return
    form = form_of(as_json=as_json, as_csv=as_csv)
    answer = ask("devices", {}, server, data)
    if form is Form.JSON:
        typer.echo(json.dumps(answer))
        return
    if form is Form.CSV:
        write_csv(answer["devices"], _RECORDED)
        return
    if not answer["devices"]:
        typer.echo("no devices yet; create a join code with: cleave pair", err=True)
        return
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 200
    shown = _COLUMNS if console.width >= _WIDE else _NARROW
    table = Table(box=None, pad_edge=False)
    for heading in shown:
        table.add_column(heading, justify="left" if heading in _TEXTS else "right")
    for device in answer["devices"]:
        cells = _cells(device)
        table.add_row(*(printable(cells.get(heading, "")) for heading in shown))
    console.print(table, markup=False)


def _failed(device: dict[str, Any]) -> str:
    """Format a device's number of failed runs, and the last failure unless `reason` contains it."""
    if not device["failures"]:
        return "0"
    told = not device["failure"] or device["failure"] in device["reason"]
    return f"{device['failures']:,}" + ("" if told else f" (last: {device['failure']})")


def _measured(rates: dict[str, float]) -> str:
    """Format the speed and the link of a connected device; empty if unknown."""
    if not rates:
        return ""
    down, up = (human_bytes(rates[f"{way}_bytes_per_s"]) for way in ("downlink", "uplink"))
    return f"{rates['flops_per_s'] / 1e9:,.3g} GFLOP/s, {down}/s down, {up}/s up"


def _cells(device: dict[str, Any]) -> dict[str, str]:
    reason = f" ({device['reason']})" if device["reason"] else ""
    cells = {
        "name": device["name"],
        "own": "yes" if device["own"] else "",
        "state": f"{device['state']}{reason}",
        "blocks": f"{device['blocks']:,}",
        "failed": _failed(device),
        "compute": f"{device['compute_s']:,.0f} s",
        "measured": _measured(device.get("rates", {})),  # older servers omit them
    }
    if device["id"] is None:  # the device joined with the shared credential
        return cells
    energy_j = device["energy_j"]
    return cells | {
        "id": str(device["id"]),
        "last seen": when(device["seen_s"]),
        "sessions": str(device["sessions"]),
        "lost": str(device["losses"]),
        "wrong": str(device["wrong_results"]),
        "TFLOP": f"{device['flops'] / 1e12:,.3f}",
        "down": human_bytes(device["downlink_bytes"]),
        "up": human_bytes(device["uplink_bytes"]),
        "energy": f"{energy_j / 3600:,.2f} Wh" if energy_j else "",
    }


@app.command("revoke")
def revoke(
    name: Name,
    reason: Annotated[str, Option(help="Reason, which is also shown on the device.")] = "",
    server: Server = "",
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Invalidate a device's credential permanently, and end its session at once.

    Examples:

      cleave devices revoke annas-laptop --reason 'sold'
    """
    answer = ask("revoke", {"device": name, "reason": reason}, server, data)
    text = f"{answer['device']['name']} is revoked"
    for code in answer["codes"]:
        left = code["uses"] - code["used"]
        text += (
            f"; its join code ({code['id']}) is now void, too; {left:,} more "
            f"{'device' if left == 1 else 'devices'} could have used it; for a new code: "
            f"cleave pair --uses {left}{' --own' if code.get('own') else ''}"
        )
    say_decided(answer, text, as_json=as_json)


@app.command("release")
def release(name: Name, server: Server = "", data: Data = None, as_json: Json = False) -> None:
    """Release a device from quarantine, and reset its count of wrong results.

    Examples:

      cleave devices release annas-laptop
    """
    answer = ask("release", {"device": name}, server, data)
    say_decided(answer, f"{answer['device']['name']} may join again", as_json=as_json)


@app.command("own")
def own(
    name: Name,
    no: Annotated[bool, Option("--no", help="Remove the mark.")] = False,
    server: Server = "",
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Mark a device as your own, so that it may train whole layers.

    The device sees the parameters and activations of these layers, and only some of its results are
    checked. Mark only devices that you trust. `cleave pair --own` marks future devices.

    Examples:

      cleave devices own annas-laptop

      cleave devices own annas-laptop --no
    """
    answer = ask("own", {"device": name, "own": not no}, server, data)
    marked = (
        "is no longer your own: it trains whole layers only if the server allows this for any "
        "device (--stages-on any)"
        if no
        else "is your own: it may train whole layers"
    )
    say_decided(answer, f"{answer['device']['name']} {marked}", as_json=as_json)
