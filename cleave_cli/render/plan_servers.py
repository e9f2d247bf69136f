"""Output of `cleave plan --servers`, which compares forecasts for several server counts."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import typer

from cleave.planner.servers import ServersPlan, why
from cleave.planner.stages.prediction import in_seconds
from cleave_cli.options import human_bytes
from cleave_cli.render.narrow import WIDTH


def servers_json(plans: Sequence[ServersPlan]) -> list[dict[str, Any]]:
    """Return the forecasts as JSON, with one object for each number of servers."""
    return [
        {
            "servers": plan.servers,
            "devices_each": plan.devices,
            "rows_each": plan.rows,
            "method": plan.slowest.method.value,
            "refused": plan.refused,
            "step_s": None if plan.refused else plan.step_s,
            "exchange_s": plan.exchange_s,
            "exchanged_bytes_each_way": plan.exchanged_bytes,
            "downlink_bytes_each": plan.slowest.downlink_bytes,
            "uplink_bytes_each": plan.slowest.uplink_bytes,
            "server_memory_bytes": plan.server_bytes,
            "bound_by": plan.slowest.bottleneck,
        }
        for plan in plans
    ]


def show_servers(title: str, plans: Sequence[ServersPlan]) -> None:
    """Print one row for each number of servers, and whether more servers make a step faster."""
    typer.echo(textwrap.fill(title, WIDTH))
    typer.echo(
        f"\n{'servers':>7}{'devices':>9}{'rows':>6}  {'method':<7}{'a step':>8}{'exchange':>10}"
        f"{'sent':>9}{'down':>9}{'up':>9}"
    )
    for plan in plans:
        fleet = plan.slowest
        if plan.refused:
            typer.echo(f"{plan.servers:>7}{plan.devices:>9}{plan.rows:>6}  {'refused':<7}")
            typer.echo(textwrap.indent(textwrap.fill(plan.refused, WIDTH - 2), "  "))
            continue
        typer.echo(
            f"{plan.servers:>7}{plan.devices:>9}{plan.rows:>6}  {fleet.method.value:<7}"
            f"{in_seconds(plan.step_s):>8}{in_seconds(plan.exchange_s):>10}"
            f"{human_bytes(plan.exchanged_bytes):>9}{human_bytes(fleet.downlink_bytes):>9}"
            f"{human_bytes(fleet.uplink_bytes):>9}"
        )
    typer.echo(
        textwrap.fill(
            "devices, rows: of each server. exchange, sent: what a server sends to the others, and "
            "receives from them. down, up: what it sends to its devices and gets.",
            WIDTH,
        )
    )
    typer.echo("\n" + textwrap.fill(why(plans), WIDTH))
