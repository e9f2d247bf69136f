"""`cleave serve`: the parameter server."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from cleave.errors import UsageError
from cleave.protocol import limits
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
        str, typer.Option(help="Which results to check before use: auto (all), all or off.")
    ] = "auto",
    tls: Annotated[
        str,
        typer.Option(
            help="auto: a certificate of its own, which the join URL names; off: none. "
            "Default: off on loopback, auto elsewhere."
        ),
    ] = "",
    tls_cert: Annotated[
        Path | None, typer.Option(help="PEM file of a certificate, its chain included.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of its key.")] = None,
    tls_folder: Annotated[
        Path | None, typer.Option(help="Where --tls auto keeps its certificate.")
    ] = None,
    insecure_lan: Annotated[
        bool, typer.Option("--insecure-lan", help="Allow other machines to join without TLS.")
    ] = False,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="Web page whose browsers may join, like https://example.org; repeat it."),
    ] = None,
    max_devices: Annotated[int, typer.Option(help="Most devices at once.")] = limits.MAX_DEVICES,
    max_waiting: Annotated[
        int, typer.Option(help="Most connections from one address that are not admitted yet.")
    ] = limits.MAX_WAITING_PER_ADDRESS,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines on stdout.")] = False,
) -> None:
    """Run the parameter server: devices join it, `cleave train --server` sends it jobs.

    Examples:

      cleave serve

      cleave serve --host 0.0.0.0 --port 9000

      cleave serve --host 0.0.0.0 --tls-cert fullchain.pem --tls-key privkey.pem
    """
    # Threads that spin while they wait make small operations twenty times slower when anything else
    # wants the core, and the server's own loop always does. Read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if verify not in ("auto", "all", "off"):
        raise UsageError(f"--verify is {verify!r}; use auto, all or off")
    if tls not in ("", "auto", "off"):
        raise UsageError(f"--tls is {tls!r}; use auto or off")
    for option, value in (("--max-devices", max_devices), ("--max-waiting", max_waiting)):
        if value < 1:
            raise UsageError(f"{option} is {value}; give 1 or more")
    need_train_extra("cleave serve")
    from cleave.server.jobs import Jobs
    from cleave.server.operator import OperatorSessions
    from cleave.training.run_job import JobRunner
    from cleave.transport.door import ConnectionLimits
    from cleave.transport.listener import allow_many_connections
    from cleave.transport.serve import serve as listen
    from cleave.transport.tls import Security, TlsMode

    def log(text: str) -> None:
        if as_json:
            typer.echo(json.dumps({"event": "note", "text": text}))
        else:
            typer.echo(text, err=True)

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    allow_many_connections()
    sessions = OperatorSessions()
    fleet = listen(
        host,
        port,
        credential=credential or None,
        operator_credential=operator_credential or None,
        notify=log,
        operator=sessions.serve,
        verify=verify != "off",
        security=Security(
            tls=TlsMode(tls) if tls else None,
            certificate=tls_cert,
            key=tls_key,
            folder=tls_folder or Path.home() / ".local" / "share" / "cleave",
            insecure_lan=insecure_lan,
            allow_origins=tuple(allow_origin or ()),
        ),
        allowed=ConnectionLimits(
            waiting_per_address=max_waiting,
            waiting=max(limits.MAX_WAITING, max_waiting),
            devices=max_devices,
        ),
    )
    with fleet:
        jobs = Jobs(fleet, JobRunner(runs), log)
        sessions.jobs, sessions.fleet = jobs, fleet
        if as_json:
            typer.echo(
                json.dumps(
                    {
                        "event": "listening",
                        "url": fleet.url,
                        "operator_url": fleet.operator_url,
                        "fingerprint": fleet.fingerprint,
                    }
                )
            )
        else:
            shown = f"certificate {fleet.fingerprint}\n\n" if fleet.fingerprint else ""
            typer.echo(
                f"listening; Ctrl-C to stop\n\n{shown}"
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
