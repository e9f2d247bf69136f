"""`cleave devices`: which devices a server knows, and their states."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from cleave_cli.operator_link import Data, Json, Server, ask, when
from cleave_cli.options import human_bytes
from cleave_cli.render.say import printable, say

app = typer.Typer(
    name="devices",
    help="List the devices of a server; revoke and release them.",
    rich_markup_mode=None,
)

Name = Annotated[str, typer.Argument(help="The device's name or id, as `cleave devices` lists it.")]


@app.callback(invoke_without_command=True)
def devices(
    context: typer.Context, server: Server = "", data: Data = None, as_json: Json = False
) -> None:
    """List the devices that a server knows: states with reasons, reputation, contribution.

    Examples:

      cleave devices

      cleave devices --server @operator.url --json
    """
    if context.invoked_subcommand is not None:
        return
    answer = ask("devices", {}, server, data)
    if as_json:
        typer.echo(json.dumps(answer))
        return
    if not answer["devices"]:
        typer.echo("no devices yet; give one a join code with: cleave pair", err=True)
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("id", "name", "state", "last seen"):
        table.add_column(heading, justify="right" if heading == "id" else "left")
    for heading in ("sessions", "lost", "wrong", "blocks", "failed"):
        table.add_column(heading, justify="right")
    for heading in ("TFLOP", "down", "up", "compute", "energy"):
        table.add_column(heading, justify="right")
    for device in answer["devices"]:
        table.add_row(*map(printable, _cells(device)))
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 200
    console.print(table, markup=False)


def _failed(device: dict[str, Any]) -> str:
    """Return how many runs it failed, and the last reason unless its state already names that."""
    if not device["failures"]:
        return "0"
    told = not device["failure"] or device["failure"] in device["reason"]
    return f"{device['failures']:,}" + ("" if told else f" (last: {device['failure']})")


def _cells(device: dict[str, Any]) -> list[str]:
    reason = f" ({device['reason']})" if device["reason"] else ""
    if device["id"] is None:  # it joined with a credential that many share
        blocks, compute = f"{device['blocks']:,}", f"{device['compute_s']:,.0f} s"
        state = f"{device['state']}{reason}"
        failed = _failed(device)
        return ["", device["name"], state, *[""] * 4, blocks, failed, *[""] * 3, compute, ""]
    energy_j = device["energy_j"]
    return [
        str(device["id"]),
        device["name"],
        f"{device['state']}{reason}",
        when(device["seen_s"]),
        str(device["sessions"]),
        str(device["losses"]),
        str(device["wrong_results"]),
        f"{device['blocks']:,}",
        _failed(device),
        f"{device['flops'] / 1e12:,.3f}",
        human_bytes(device["downlink_bytes"]),
        human_bytes(device["uplink_bytes"]),
        f"{device['compute_s']:,.0f} s",
        f"{energy_j / 3600:,.2f} Wh" if energy_j else "",
    ]


@app.command("revoke")
def revoke(
    name: Name,
    reason: Annotated[str, typer.Option(help="Why; the device is told.")] = "",
    server: Server = "",
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Make a device's credential invalid, for good; its session ends at once.

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
            f"cleave pair --uses {left}"
        )
    _say(answer, text, as_json=as_json)


@app.command("release")
def release(name: Name, server: Server = "", data: Data = None, as_json: Json = False) -> None:
    """Let a device out of quarantine; what it did wrong counts no more.

    Examples:

      cleave devices release annas-laptop
    """
    answer = ask("release", {"device": name}, server, data)
    _say(answer, f"{answer['device']['name']} may join again", as_json=as_json)


def _say(answer: dict[str, Any], text: str, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(answer))
    else:
        say(text)
        if answer["unwritten"]:
            say(f"this holds, but it is not on disk yet: {answer['unwritten']}")
