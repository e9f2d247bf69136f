"""`cleave serve`: the parameter server."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from cleave_cli.options import need_train_extra

STOP_S = 600.0  # how long a running job may take to finish its step and write a checkpoint


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for any free one.")] = 8765,
    runs: Annotated[Path, typer.Option(help="Folder for the run folders of jobs.")] = Path("runs"),
    credential: Annotated[
        str,
        typer.Option(
            envvar="CLEAVE_CREDENTIAL", help="What devices must know; random unless given."
        ),
    ] = "",
    operator_credential: Annotated[
        str,
        typer.Option(
            envvar="CLEAVE_OPERATOR_CREDENTIAL",
            help="What operators must know; random unless given.",
        ),
    ] = "",
    verify: Annotated[
        str,
        typer.Option(
            help="Which results to check before use: auto (what crossed a process boundary), all, "
            "off, or sample:P: that share of what devices send that were never wrong."
        ),
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines on stdout.")] = False,
) -> None:
    """Run the parameter server: devices join it, `cleave train --server` sends it jobs.

    Examples:

      cleave serve

      cleave serve --host 0.0.0.0 --port 9000
    """
    # Threads that spin while they wait make small operations twenty times slower when anything else
    # wants the core, and the server's own loop always does. Read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from cleave.fleet.verification import Verification

    verification = Verification.of(verify)
    need_train_extra("cleave serve")
    from cleave.server.jobs import Jobs
    from cleave.server.operator import OperatorSessions
    from cleave.training.run_job import JobRunner
    from cleave.transport.serve import serve as listen

    def log(text: str) -> None:
        if as_json:
            typer.echo(json.dumps({"event": "note", "text": text}))
        else:
            typer.echo(text, err=True)

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    sessions = OperatorSessions()
    fleet = listen(
        host,
        port,
        credential=credential or None,
        operator_credential=operator_credential or None,
        notify=log,
        operator=sessions.serve,
        verify=verification,
    )
    with fleet:
        jobs = Jobs(fleet, JobRunner(runs), log)
        sessions.jobs, sessions.fleet = jobs, fleet
        if as_json:
            typer.echo(
                json.dumps(
                    {"event": "listening", "url": fleet.url, "operator_url": fleet.operator_url}
                )
            )
        else:
            typer.echo(
                f"listening; Ctrl-C to stop\n\n"
                f"a device joins with\n\n  cleave join '{fleet.url}'\n\n"
                f"train with\n\n"
                f"  cleave train --model opt-125m --server '{fleet.operator_url}'\n",
                err=True,
            )
        stop.wait()
        log("stopping: a running job finishes its step and writes a checkpoint")
        for number in (signal.SIGINT, signal.SIGTERM):  # the next one ends it at once
            signal.signal(number, signal.SIG_DFL)
        jobs.close(STOP_S if fleet.device_count else 0)  # without devices no step ends
