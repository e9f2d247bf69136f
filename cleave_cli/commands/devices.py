"""`cleave devices`: list, revoke, release and mark the devices that a server knows."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from cleave_cli.operator_link import Data, Server, ask, say_decided, when
from cleave_cli.options import Json, human_bytes
from cleave_cli.render.text import Csv, Form, form_of, printable, write_csv

app = typer.Typer(
    name="devices",
    help="List the devices of a server; revoke and release them, mark your own.",
    rich_markup_mode=None,
)

_COLUMNS: Final = (
    "id", "name", "own", "state", "last seen", "sessions", "lost", "wrong", "blocks", "failed",
    "TFLOP", "down", "up", "compute", "energy",
)  # fmt: skip
_TEXTS: Final = ("name", "own", "state", "last seen")
_NARROW: Final = ("id", *_TEXTS, "wrong", "blocks")
_RECORDED: Final = (
    "id", "name", "own", "state", "reason", "session", "paired_s", "seen_s", "sessions", "losses",
    "wrong_results", "failures", "failure", "blocks", "flops", "downlink_bytes", "uplink_bytes",
    "compute_s", "energy_j",
)  # fmt: skip
_WIDE: Final = 120  # terminal width, in characters, for all columns of the table

Name = Annotated[str, Argument(help="The device's name or id, as `cleave devices` lists it.")]


@app.callback(invoke_without_command=True)
def devices(
    context: typer.Context,
    server: Server = "",
    data: Data = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """List the devices that a server knows, with their state, reputation and contribution.

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
        typer.echo("no devices yet; give one a join code with: cleave pair", err=True)
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


def _cells(device: dict[str, Any]) -> dict[str, str]:
    reason = f" ({device['reason']})" if device["reason"] else ""
    cells = {
        "name": device["name"],
        "own": "yes" if device["own"] else "",
        "state": f"{device['state']}{reason}",
        "blocks": f"{device['blocks']:,}",
        "failed": _failed(device),
        "compute": f"{device['compute_s']:,.0f} s",
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
    reason: Annotated[str, Option(help="Reason, which the device also gets.")] = "",
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
            f"; the join code it came by ({code['id']}) is void as well: where {left:,} more "
            f"{'device was' if left == 1 else 'devices were'} to use it, give them another with: "
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
        "is not your own any more: it trains no whole layers unless the server lets any device "
        "do so (--stages-on any)"
        if no
        else "is your own: it may train whole layers"
    )
    say_decided(answer, f"{answer['device']['name']} {marked}", as_json=as_json)
