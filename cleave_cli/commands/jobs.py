"""`cleave jobs`: a server's training jobs, now and before."""

from __future__ import annotations

import json

import typer
from rich.console import Console
from rich.table import Table

from cleave_cli.operator_link import Data, Json, Server, ask, when
from cleave_cli.render.say import printable


def jobs(server: Server = "", data: Data = None, as_json: Json = False) -> None:
    """List a server's jobs, also those from before it was started.

    Examples:

      cleave jobs

      cleave jobs --json
    """
    answer = ask("history", {}, server, data)
    if as_json:
        typer.echo(json.dumps(answer))
        return
    if not answer["jobs"]:
        typer.echo("no jobs yet; submit one with: cleave train --server", err=True)
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("job", "model", "state", "started", "ended", "steps", "loss", "run folder"):
        table.add_column(heading, justify="right" if heading in ("steps", "loss") else "left")
    for job in answer["jobs"]:
        reason = f" ({job['reason']})" if job["reason"] else ""
        loss = "" if job["loss"] is None else f"{job['loss']:.4f}"
        started, ended = when(job["started_s"]), when(job["ended_s"])
        state = f"{job['state']}{reason}"
        cells = (
            job["job"], job["model"], state, started, ended, str(job["steps"]), loss,
            job["run_folder"],
        )  # fmt: skip
        table.add_row(*map(printable, cells))
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 200
    console.print(table, markup=False)
