"""`cleave serve`: run a parameter server."""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer
from typer import Option

from cleave.errors import UsageError
from cleave.protocol import limits
from cleave.ray_cluster import need_ray
from cleave.transport.addresses import is_loopback
from cleave_cli.fleet_options import ClusterOptions, ray_of
from cleave_cli.options import browsers_warn, need_train_extra, only_here
from cleave_cli.render.text import printable, qr_code
from cleave_cli.stopping import ending_signals

if TYPE_CHECKING:
    from cleave.energy.grid import Grid
    from cleave.fleet.own_device import OwnDevice
    from cleave.scheduler.stages.resident import KeptState
    from cleave.server.access import Access, JoinCode
    from cleave.server.app import App
    from cleave.server.fleet_server import Server, ServerConfig
    from cleave.server.jobs.jobs import TrainingJob
    from cleave.server.store.store import CodeRecord, DeviceRecord, StoredJob
    from cleave.training.loop.start import JobRunner
    from cleave.transport.discovery import Announcement


_logger = logging.getLogger(__name__)

_MOST_TITLE, _MOST_ABOUT = 80, 500  # characters; fit above the button on a phone's screen

_MOST_HOST_NAME = 40  # maximum length of the host name in the name of this device

STOP_S = 600.0  # maximum time in which a running job may write a checkpoint and end


def serve(
    host: Annotated[
        str, Option(help="Address to listen on; 0.0.0.0 means all addresses.")
    ] = "127.0.0.1",
    port: Annotated[int, Option(help="Port to listen on; 0 uses any free port.")] = 8765,
    runs: Annotated[Path, Option(help="Folder for the run folders of jobs.")] = Path("runs"),
    data: Annotated[
        str,
        Option(
            envvar="CLEAVE_DATA",
            help="Folder for the records of devices and jobs; `none` keeps no records. "
            "Default: the system's data folder.",
        ),
    ] = "",
    credential: Annotated[
        str,
        Option(
            envvar="CLEAVE_CREDENTIAL",
            help="Shared credential for any number of devices. The server keeps no records of "
            "them, and shows no join code.",
        ),
    ] = "",
    operator_credential: Annotated[
        str,
        Option(
            envvar="CLEAVE_OPERATOR_CREDENTIAL",
            help="Credential of operators. Default: the token in the data folder.",
        ),
    ] = "",
    verify: Annotated[
        str,
        Option(
            help="Which results to check before use: auto (results from other processes), all, "
            "off, or sample:P (a share P of the results of devices without a fault)."
        ),
    ] = "auto",
    stages_on: Annotated[
        str,
        Option(help="Devices that may train whole layers: own (paired with --own), or any."),
    ] = "own",
    coding: Annotated[
        str,
        Option(
            help="Lossless compression of numbers: auto (on links that are slower than the "
            "compression), on, or off."
        ),
    ] = "auto",
    tls: Annotated[
        str,
        Option(
            help="`auto` uses a self-signed certificate that the join URL names; `off` uses none. "
            "Default: off on loopback, auto elsewhere."
        ),
    ] = "",
    tls_cert: Annotated[
        Path | None, Option(help="PEM file of a certificate and its chain.")
    ] = None,
    tls_key: Annotated[Path | None, Option(help="PEM file of the key.")] = None,
    insecure_lan: Annotated[
        bool, Option("--insecure-lan", help="Allow other machines to join without TLS.")
    ] = False,
    public_url: Annotated[
        str,
        Option(
            help="Address of a tunnel or reverse proxy that forwards connections to this server, "
            "such as wss://example.org:8765, for join URLs. It sees only TLS, unless --tls is off."
        ),
    ] = "",
    announce: Annotated[
        bool,
        Option(
            "--announce",
            help="Announce this server on the local network, so that `cleave join` finds it. "
            "Devices still need a join code. Needs zeroconf: the extra `lan`.",
        ),
    ] = False,
    allow_origin: Annotated[
        list[str] | None,
        Option(help="Origin of browsers that may join, such as https://example.org; repeatable."),
    ] = None,
    ps_gbit: Annotated[
        float, Option(help="Speed of this machine's network card in Gbit/s; 0 means unlimited.")
    ] = 0,
    grid: Annotated[
        str, Option(help="Country whose electricity is used, such as DEU, for carbon.")
    ] = "",
    ps_watts: Annotated[
        float,
        Option(help="Power of this machine at the socket in watts; 0 reads its sensors."),
    ] = 0,
    servers: Annotated[
        int,
        Option(
            help="Number of servers, started by Ray. Devices join this one, which redirects "
            "them to others. Needs Ray: the extra `ray`."
        ),
    ] = 1,
    ray: Annotated[
        str,
        Option(
            help="With --servers: HOST:PORT of this machine's Ray cluster. Default: start a "
            "cluster here."
        ),
    ] = "",
    max_devices: Annotated[
        int, Option(help="Maximum number of connected devices per server.")
    ] = limits.MAX_DEVICES,
    max_waiting: Annotated[
        int, Option(help="Maximum number of waiting connections from one address.")
    ] = limits.MAX_WAITING_PER_ADDRESS,
    compute: Annotated[
        str,
        Option(
            help="Whether this machine also computes layers, as one more device: auto (if that "
            "shortens steps by stages), or off."
        ),
    ] = "auto",
    title: Annotated[
        str, Option(help="Person or project that asks for devices. The join page shows it.")
    ] = "",
    about: Annotated[
        str, Option(help="What the devices help to train, in a sentence for their owners.")
    ] = "",
    resume_jobs: Annotated[
        bool,
        Option("--resume-jobs", help="Continue the jobs that the last server left unfinished."),
    ] = False,
    as_json: Annotated[bool, Option("--json", help="JSON lines on stdout.")] = False,
) -> None:
    """Run a parameter server. Devices join it, and `cleave train --server` submits jobs to it.

    The server prints a join code for one device, and a new code after each use. `cleave pair` makes
    more codes. The server recognizes a device that has used a code, even after a restart.

    Examples:

      cleave serve

      cleave serve --host 0.0.0.0 --title "Ada's lab" --about "We train a model of Welsh."

      cleave serve --host 0.0.0.0 --tls-cert fullchain.pem --tls-key privkey.pem

      cleave serve --public-url wss://relay.example.org:8765

      cleave serve --host 0.0.0.0 --servers 4 --ray 10.0.0.1:6379
    """
    # Busy-waiting threads make small operations 20 times slower while another thread, such as the
    # server's event loop, needs the core. torch reads this variable on import.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from cleave.planner.coding import CodingPolicy
    from cleave.scheduler.sessions.result_judging import Verification
    from cleave.scheduler.stages.runs import StagesOn

    verification = Verification.of(verify)
    stages, coded = StagesOn.of(stages_on), CodingPolicy.of(coding)
    if tls not in ("", "auto", "off"):
        raise UsageError(f"--tls is {tls!r}; use auto or off")
    if compute not in ("auto", "off"):
        raise UsageError(f"--compute is {compute!r}; use auto or off")
    for option, value in (("--max-devices", max_devices), ("--max-waiting", max_waiting)):
        if value < 1:
            raise UsageError(f"{option} must be 1 or more, not {value}")
    if not 0 <= port < 2**16:
        raise UsageError(
            f"--port must be between 1 and {2**16 - 1}, or 0 for any free port, not {port}"
        )
    if not 0 <= ps_gbit < math.inf:
        raise UsageError(f"--ps-gbit must be 0 (unlimited) or more, not {ps_gbit:g}")
    if not 0 <= ps_watts < math.inf:
        raise UsageError(
            f"--ps-watts must be a number of watts, or 0 to read the sensors, not {ps_watts:g}"
        )
    for option, text, most in (("--title", title, _MOST_TITLE), ("--about", about, _MOST_ABOUT)):
        if len(text) > most:
            raise UsageError(f"{option} has {len(text)} characters; use at most {most}")
    cluster = ClusterOptions(servers, ray).checked()
    need_train_extra("cleave serve", "prometheus_client")
    if announce and is_loopback(host):
        raise UsageError(
            f"--announce has no effect with --host {host}, which other machines cannot reach; use "
            "--host 0.0.0.0"
        )
    if announce and tls_cert is not None:
        raise UsageError(
            f"--announce publishes addresses, but devices check the names in {tls_cert}; omit "
            f"--announce and give devices the join URL, or omit --tls-cert"
        )
    if servers > 1:
        if public_url:
            raise UsageError(
                f"--public-url {public_url} is the address of one server, but --servers is "
                f"{servers}; use --servers 1"
            )
        need_ray("--servers")
    import cleave
    from cleave.energy.grid import load_grid
    from cleave.machine.sensors import hold_strips_well
    from cleave.planner.plan import PS_BLOCK_S, PS_BYTE_S, PsRates
    from cleave.planner.tiles.planner import TilePlanner
    from cleave.scheduler.sessions.session import EventKind
    from cleave.server.api.overview import ServerFacts
    from cleave.server.app import open_app
    from cleave.server.fleet_server import ServerConfig
    from cleave.server.jobs.energy import SAMPLE_S
    from cleave.server.jobs.jobs import Jobs
    from cleave.transport.connection_limits import ConnectionLimits
    from cleave.transport.discovery import announced
    from cleave.transport.listener import allow_many_connections
    from cleave.transport.tls import Security, TlsMode

    give_back = hold_strips_well()
    gc.freeze()  # a collection that scans torch's modules blocks all sessions for 0.25 s
    stop = threading.Event()
    for number in ending_signals():
        signal.signal(number, lambda *_: stop.set())
    allow_many_connections()
    card = ps_gbit * 1e9 / 8 or None
    facts = ServerFacts(
        cleave.__version__, socket.gethostname(), verify, card, card, title.strip(), about.strip()
    )
    ps = PsRates(card, card, block_s=PS_BLOCK_S, byte_s=PS_BYTE_S) if card is not None else None
    planner = TilePlanner(ps) if ps is not None else TilePlanner()
    electricity = load_grid(grid) if grid else None
    with (
        printed_log(as_json=as_json),
        open_app(
            data, operator_credential, credential, facts, electricity, ps_watts or None
        ) as server_app,
    ):
        config = ServerConfig(
            host=host,
            port=port,
            credential=credential,
            operator_credential=server_app.operator_token,
            viewer_credential=server_app.viewer_token,
            planner=planner,
            events=server_app.overview.happened,
            operator=server_app.operators.serve,
            pages=server_app.pages,
            verify=verification,
            stages_on=stages,
            coding=coded,
            card=ps,
            kept=_kept_by_devices(server_app.history.interrupted) if resume_jobs else (),
            auth=server_app.access,
            security=Security(
                tls=TlsMode(tls) if tls else None,
                certificate=tls_cert,
                key=tls_key,
                folder=server_app.folder.path if server_app.folder is not None else None,
                insecure_lan=insecure_lan,
                allow_origins=tuple(allow_origin or ()),
                public_url=public_url,
            ),
            allowed=ConnectionLimits(
                waiting_per_address=max_waiting,
                waiting=max(limits.MAX_WAITING, max_waiting),
                devices=max_devices,
            ),
        )
        listening = serving(server_app, config, runs.absolute(), cluster, electricity)
        with listening as (server, runner), ExitStack() as ending:
            if compute == "auto" and servers == 1:
                url = server.direct_join_url(server_app.own_credential)
                server.live.own_device = ending.enter_context(_own_device(url))

            def job_happened(kind: EventKind, text: str) -> None:
                server_app.overview.events.add(kind, 0, text)
                give_back()  # the memory of a job that has ended

            jobs = Jobs(server.fleet, runner, server_app.history, job_happened)
            server_app.operators.jobs = server_app.overview.jobs = jobs
            for job in server_app.history.left_unfinished() if not resume_jobs else ():
                _logger.warning(
                    "job-%d (%s) was interrupted: %s", job.number, job.model, job.reason
                )
            if announce:
                ending.enter_context(announced(_announcement(server, host, title.strip())))
            code = None if credential else server_app.access.pair()
            _welcome(server, credential, code, server_app.url_file, as_json=as_json)
            if code is not None:
                server_app.access.on_redeemed = _Codes(server, code, as_json=as_json).redeemed
            if resume_jobs:
                jobs.resume_unfinished()
            while not stop.wait(SAMPLE_S):
                server_app.power.used()  # read the energy counters before they overflow
            _logger.info(stopping(jobs.running))
            for number in (signal.SIGINT, signal.SIGTERM):  # a second signal ends the process
                signal.signal(number, signal.SIG_DFL)
            jobs.close(STOP_S)


def _kept_by_devices(interrupted: Iterable[StoredJob]) -> list[KeptState]:
    """Return the trained state that devices had when the last server ended."""
    from cleave.training.loop.run_folder import LOG
    from cleave.training.stages.step_log import LogFolder

    found: list[KeptState] = []
    for run in (Path(job.run_folder) for job in interrupted if job.run_folder):
        try:
            found += LogFolder(run / LOG).kept()
        except OSError as error:
            _logger.warning("devices cannot continue with the state of %s: %s", run, error)
    return found


@contextmanager
def _own_device(url: str) -> Iterator[OwnDevice]:
    """Yield a device on this machine that a job can start. The device joins at `url`."""
    from cleave.fleet.own_device import OwnDevice
    from cleave.transport.join_url import url_file

    with url_file(url) as source:  # a file, because other users can read command lines
        command = [sys.executable, "-m", "cleave_cli", "join", source, "--once"]
        command += ["--name", f"{socket.gethostname()[:_MOST_HOST_NAME]} (server)"]
        device = OwnDevice(command)
        try:
            yield device
        finally:
            device.stop()


def _announcement(server: Server, host: str, title: str) -> Announcement:
    """Return what a server that listens on `host` announces on its network."""
    from cleave.transport.addresses import outside_addresses
    from cleave.transport.discovery import Announcement

    own = urlsplit(server.operator_url)
    assert own.port is not None
    return Announcement(
        name=socket.gethostname(),
        title=title,
        addresses=outside_addresses(host),
        port=own.port,
        fingerprint=server.fingerprint,
        secure=own.scheme == "wss",
    )


def stopping(job: TrainingJob | None) -> str:
    """Return the log message for a server that stops while `job` (None: no job) is running."""
    if job is None:
        return "stopping"
    return f"stopping: {job.id} writes a checkpoint of its last completed step"


def _welcome(
    server: Server, credential: str, code: JoinCode | None, url_file: Path | None, *, as_json: bool
) -> None:
    from cleave.server.http.pages import Pages

    secret = credential if code is None else code.text
    page_url = server.join_page_url(secret)
    if as_json:
        values: dict[str, object] = {
            "url": server.join_url(secret),
            "page_url": page_url,
            "operator_url": server.operator_url,
            "dashboard_url": server.dashboard_url,
            "fingerprint": server.fingerprint,
        }
        if url_file is not None:
            values["operator_url_file"] = str(url_file)
        typer.echo(json.dumps({"event": "listening", **values}))
        return
    # Do not print a token that is stored in a file, because printed text ends up in logs.
    operator = f"'{server.operator_url}'" if url_file is None else f"'@{url_file}'"
    watch = server.dashboard_url
    if url_file is not None:
        watch = f"cleave dashboard --data '{url_file.parent}'      # prints the page's address"
    typer.echo("listening; Ctrl-C to stop\n", err=True)
    if server.fingerprint:
        typer.echo(f"certificate {server.fingerprint}\n", err=True)
    if code is None:
        typer.echo(f"to add a device, {_how(page_url)}\n", err=True)
    else:
        _show(page_url)
    for note in (only_here(page_url), browsers_warn(page_url)):
        if note:
            typer.echo(f"{note}\n", err=True)
    if relayed := _relayed(server):
        typer.echo(f"{relayed}\n", err=True)
    typer.echo(f"train with\n\n  cleave train --model opt-125m --server {operator}\n", err=True)
    if Pages.of_package().complete:
        typer.echo(f"watch it in a browser\n\n  {watch}\n", err=True)
    else:
        typer.echo(
            "browsers can neither join nor watch, because the web pages of this copy of Cleave "
            "were not built; run `make web` (needs Node.js), and restart the server\n",
            err=True,
        )


def _relayed(server: Server) -> str:
    """Return what the relay of --public-url must do; empty without a relay."""
    outside, own = (urlsplit(url) for url in (server.address, server.operator_url))
    if outside.netloc == own.netloc:
        return ""
    text = f"devices connect to {outside.netloc}, which must forward connections to {own.netloc}"
    if outside.scheme != own.scheme:
        text += (
            "; it must terminate TLS with a certificate that devices trust, and it can read "
            "everything (to prevent that, omit --tls off)"
        )
    return text


def _show(page_url: str) -> None:
    """Print a join URL that is valid for one device, as text and, on a terminal, as a QR code."""
    typer.echo(f"one device can join within 10 minutes: {_how(page_url)}\n", err=True)
    if sys.stderr.isatty() and not only_here(page_url):
        typer.echo(qr_code(page_url), err=True)
    typer.echo(
        "this device gets single matrix products only. For fine-tuning and whole layers, your own "
        "devices need a code of: cleave pair --own\n",
        err=True,
    )


def _how(page_url: str) -> str:
    return f"open the address in its browser, or run on it\n\n  cleave join '{page_url}'"


class _Codes:
    """Prints a new join code after a device has used the previous join code."""

    def __init__(self, server: Server, shown: JoinCode, *, as_json: bool) -> None:
        self._server = server
        self._shown = shown
        self._as_json = as_json

    def redeemed(self, code: CodeRecord, device: DeviceRecord, access: Access) -> None:
        """Log that a device used a join code. If it was the printed code, print a new code."""
        _logger.info("%s used a join code, and is now device %d", device.name, device.id)
        if code.id != self._shown.record.id:
            return
        self._shown = access.pair()
        url = self._server.join_url(self._shown.text)
        page_url = self._server.join_page_url(self._shown.text)
        if self._as_json:
            typer.echo(json.dumps({"event": "join_code", "url": url, "page_url": page_url}))
        else:
            _show(page_url)


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(record.getMessage())


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps({"event": "note", "text": record.getMessage()})


@contextmanager
def printed_log(*, as_json: bool) -> Iterator[None]:
    """Print Cleave's log until the `with` block ends, as JSON on stdout or text on stderr."""
    handler = logging.StreamHandler(sys.stdout if as_json else sys.stderr)
    handler.setFormatter(_JsonFormatter() if as_json else _TextFormatter())
    loggers = [logging.getLogger(name) for name in ("cleave", "cleave_cli")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False  # a library's root handler would print each message again
    try:
        yield
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate


@contextmanager
def serving(
    app: App, config: ServerConfig, runs: Path, cluster: ClusterOptions, grid: Grid | None
) -> Iterator[tuple[Server, JobRunner]]:
    """Listen for devices until the `with` block ends; yield the server and its job runner."""
    from cleave.server.fleet_server import serve

    if cluster.servers == 1:
        from cleave.training.loop.start import JobRunner

        with serve(config) as server:
            app.open(server)
            yield server, JobRunner(runs, lambda: app.meter(server))
        return
    from cleave.cluster.endpoints import EndpointLogs
    from cleave.cluster.membership import Members
    from cleave.cluster.ray_train import SharedRunner
    from cleave.cluster.servers import serving_together
    from cleave.server.runtime import Numbering

    members = Members(app.access)
    config = replace(config, auth=members, numbering=Numbering(1, cluster.servers))
    with ray_of(cluster) as ray, ExitStack() as opened:
        server = opened.enter_context(serve(config))
        together = serving_together(
            ray, server, config, members, app.overview, cluster.servers, grid
        )
        servers, endpoints = opened.enter_context(together)
        elsewhere, alone = EndpointLogs(endpoints.calls[1:]), endpoints.on_one_machine
        app.overview.combine = servers.combine
        app.overview.energy_elsewhere = servers.energy
        app.open(server, servers)
        yield (
            server,
            SharedRunner(
                runs,
                lambda: app.meter(server, [elsewhere], alone=alone),
                ray=ray,
                servers=cluster.servers,
                fleet_of=endpoints,
            ),
        )
