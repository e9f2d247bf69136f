"""`cleave jobs`: list the current and past jobs of a server; stop, pause and resume jobs."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final

import typer
from typer import Argument, Option

from cleave_cli.operator_link import Data, Server, ask, running_server, when
from cleave_cli.options import Json
from cleave_cli.render.text import Csv, Form, filled, form_of, printable, say, write_csv
from cleave_cli.render.training import loss_text

app = typer.Typer(
    name="jobs",
    help="List a server's jobs; stop, pause and resume them, read their logs.",
    rich_markup_mode=None,
)

Job = Annotated[str, Argument(help="ID of the job, such as job-3 (see `cleave jobs`).")]

_RECORDED: Final = (
    "job", "state", "reason", "model", "name", "steps", "steps_in_all", "loss",
    "submitted_s", "started_s", "ended_s", "run_folder",
)  # fmt: skip
_NEXT: Final = {
    "stop": "stops after a checkpoint of its last completed step",
    "pause": "pauses after the current step; continue with: cleave jobs resume {job}",
    "resume": "is queued again; {continues}",
}


@app.callback(invoke_without_command=True)
def jobs(
    context: typer.Context,
    server: Server = "",
    data: Data = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """List a server's jobs, including jobs from before its last restart.

    Examples:

      cleave jobs

      cleave jobs --json
    """
    if context.invoked_subcommand is not None:
        return
    form = form_of(as_json=as_json, as_csv=as_csv)
    answer = ask("history", {}, server, data)
    if form is Form.JSON:
        typer.echo(json.dumps(answer))
        return
    if form is Form.CSV:
        write_csv(answer["jobs"], _RECORDED)
        return
    if not answer["jobs"]:
        typer.echo("no jobs yet; submit one with: cleave train --model NAME", err=True)
        return
    for job in answer["jobs"]:
        typer.echo(printable("  ".join(_headline(job)).rstrip()))
        for detail in (_progress(job), job["reason"], job["run_folder"]):
            if detail:
                typer.echo(printable(filled(f"    {detail}")))


def _headline(job: dict[str, Any]) -> list[str]:
    """Return the columns of a job's headline. The name is empty if an older server omits it."""
    return [f"{job['job']:8}", f"{job['state']:12}", f"{job['model']:16}", job.get("name", "")]


def _progress(job: dict[str, Any]) -> str:
    steps, of = job["steps"], job.get("steps_in_all", 0)
    parts = []
    if steps:
        parts.append(f"step {steps:,} of {of:,}" if of else f"step {steps:,}")
    elif of:
        parts.append(f"{of:,} steps")
    if job["loss"] is not None:
        parts.append(f"loss {job['loss']:.4f}")
    began, ended = when(job["started_s"]), when(job["ended_s"])
    if began:
        parts.append(f"{began} to {ended}" if ended else f"since {began}")
    else:
        parts.append(f"submitted {when(job['submitted_s'])}")
    return ", ".join(parts)


@app.command("stop")
def stop(job: Job, server: Server = "", data: Data = None, as_json: Json = False) -> None:
    """Stop a job early. The job writes a checkpoint and can be resumed.

    Examples:

      cleave jobs stop job-3
    """
    _change("stop", job, server, data, as_json=as_json)


@app.command("pause")
def pause(job: Job, server: Server = "", data: Data = None, as_json: Json = False) -> None:
    """Pause a job. The job writes a checkpoint, and the next queued job starts.

    Examples:

      cleave jobs pause job-3
    """
    _change("pause", job, server, data, as_json=as_json)


@app.command("resume")
def resume(job: Job, server: Server = "", data: Data = None, as_json: Json = False) -> None:
    """Requeue a job that was paused or stopped, or that was interrupted when its server exited.

    Examples:

      cleave jobs resume job-3
    """
    _change("resume", job, server, data, as_json=as_json)


@app.command("logs")
def logs(
    job: Job,
    last: Annotated[int, Option("--last", "-n", help="Number of records.", min=1)] = 20,
    server: Server = "",
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Print the last records of a job. To follow a job, use `cleave train --attach`.

    Examples:

      cleave jobs logs job-3

      cleave jobs logs job-3 -n 1000 --json
    """
    # Only a running server returns records. Records of earlier servers are in the run folders.
    url = running_server(server, data)
    answer = ask("records", {"job": job, "last": last}, url, None)
    for record in answer["records"]:
        if as_json or record["event"] != "energy":  # `cleave footprint` shows its figures
            typer.echo(json.dumps(record) if as_json else printable(_line(record)))


def _line(record: dict[str, Any]) -> str:
    match record["event"]:
        case "step":
            loss = loss_text(record["loss"])
            return f"step {record['step']:,}  loss {loss}  {record['wall_s']:.2f} s"
        case "eval":
            return f"step {record['step']:,}  held-out loss {loss_text(record['eval_loss'])}"
        case "sample":
            return f"step {record['step']:,}  sample  {record['text']}"
        case "start":
            return f"from step {record['step']:,} to {record['steps']:,} in {record['run_folder']}"
        case "done":
            return f"done: step {record['steps']:,}, loss {loss_text(record['loss'])}"
        case event:
            return f"{event}  {record.get('text', record.get('state', ''))}".rstrip()


def _change(action: str, job: str, server: str, data: Any, *, as_json: bool) -> None:
    answer = ask(action, {"job": job}, running_server(server, data), None)
    if as_json:
        typer.echo(json.dumps(answer))
        return
    # In any other state, the job has already ended or is paused.
    going = answer["state"] in ("running", "queued")
    text = _NEXT[action].format(**{"continues": "", **answer}) if going else "is {state}"
    say(f"{answer['job']} {text.format(**answer)}", err=False)
