"""`cleave service`: install a system service that starts `cleave join` at boot or login."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from cleave.device import owner
from cleave.device import service as device_service
from cleave.device.policy import parse_memory, parse_policy, require_visible
from cleave.device.service import Service, ServiceManager
from cleave.errors import UsageError
from cleave.machine.sensors import total_memory_bytes
from cleave_cli.commands import join
from cleave_cli.options import Json

app = typer.Typer(
    name="service",
    help="Start `cleave join` when this machine starts, with systemd or launchd.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

RUNTIME_BYTES = 2 * 10**9  # memory of Python, torch and messages in flight, excluding arrays

System = Annotated[
    bool, Option("--system/--user", help="For the whole machine (needs root), or for your account.")
]


@app.command("install")
def install(
    url: join.Url,
    name: join.Name = "",
    backend: join.BackendName = "auto",
    runner: join.RunnerName = "auto",
    memory: join.Memory = "1000",
    threads: join.Threads = 0,
    cores: join.Cores = 0,
    when: join.When = "idle,charging",
    hours: join.Hours = "",
    max_temp: join.MaxTemp = 0,
    idle_after: join.IdleAfter = 5,
    max_data: join.MaxData = "",
    profile: join.Profile = "",
    kind: join.Kind = "",
    system: System = False,
    account: Annotated[
        str,
        Option(
            envvar="SUDO_USER",
            help="With --system: account of the service. Default: yours, under sudo.",
        ),
    ] = "",
    print_only: Annotated[bool, Option("--print", help="Print the unit; install nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Install and start the service. By default, it works while this machine is idle and charging.

    The join URL is stored in a file that only the service's account can read.

    Examples:

      cleave service install 'http://192.168.1.20:8765/join#c=...' --hours 22-7

      cleave service install @join.url --when always --print
    """
    from cleave.machine.graph_choice import one_processor
    from cleave.transport.join_url import parse_join_url, read_url

    secret = read_url(url)
    parse_join_url(secret)
    one_processor(backend, runner)
    join.known_threads(threads)
    if cores:
        owner.cores_to_lend(cores)
    join.known_profile(profile)
    join.known_length(name)
    join.known_kind(kind)
    policy = parse_policy(when or "always", hours, max_temp, idle_after, max_data)
    memory_bytes = parse_memory(memory, total_memory_bytes())
    if system and not account:
        raise UsageError("--system needs an account to run as; use sudo, or pass --account NAME")
    installer = _installer(system=system)
    given: dict[str, object] = {
        "--when": when or "always", "--hours": hours, "--max-temp": max_temp and f"{max_temp:g}",
        "--idle-after": f"{idle_after:g}", "--max-data": max_data, "--memory": memory,
        "--cores": cores,
        "--threads": threads, "--backend": backend, "--runner": runner,
        "--name": name, "--profile": profile, "--kind": kind,
    }  # fmt: skip
    options = [f"{option}={value}" for option, value in given.items() if value]
    source = f"@{installer.places.url}"
    service = Service(
        (sys.executable, "-m", "cleave_cli", "join", source, *options),
        memory_bytes + RUNTIME_BYTES,
        account if system else None,
    )
    if installer.manager is ServiceManager.SYSTEMD:
        unit = device_service.systemd_unit(service).encode()
    else:
        unit = device_service.launchd_plist(service, installer.places.log)
    if print_only:
        typer.echo(unit.decode(), nl=False)
        return
    installer.require_manager()
    if policy is not None:
        require_visible(policy, owner.observe(owner.this_machine(), policy))
    installer.install(unit, secret, service.account)
    if as_json:
        typer.echo(json.dumps(_files(installer)))
        return
    typer.echo(f"installed and started; to see its log: {installer.log_command}", err=True)
    if installer.manager is ServiceManager.SYSTEMD and not system:
        typer.echo(
            "it runs while you are logged in; to start it at boot: loginctl enable-linger",
            err=True,
        )


@app.command("uninstall")
def uninstall(system: System = False, as_json: Json = False) -> None:
    """Stop the service and remove its files.

    Examples:

      cleave service uninstall
    """
    installer = _installer(system=system)
    installer.uninstall()
    if as_json:
        typer.echo(json.dumps(_files(installer)))
    else:
        typer.echo("removed", err=True)


@app.command("status")
def status(system: System = False, as_json: Json = False) -> None:
    """Report whether the service is installed and running.

    Examples:

      cleave service status --json
    """
    installer = _installer(system=system)
    state = installer.status()
    if as_json:
        typer.echo(json.dumps({"state": state, **_files(installer)}))
    else:
        typer.echo(f"{state}; its log: {installer.log_command}", err=True)


def _files(installer: device_service.Installer) -> dict[str, str]:
    return {
        "manager": installer.manager.value,
        "unit": str(installer.places.unit),
        "url_file": str(installer.places.url),
    }


def _installer(*, system: bool) -> device_service.Installer:
    if sys.platform == "win32":
        raise UsageError(
            "Windows has neither systemd nor launchd; use its Task Scheduler to start `cleave join`"
        )
    manager = ServiceManager.LAUNCHD if sys.platform == "darwin" else ServiceManager.SYSTEMD
    home = Path.home()
    config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    root = Path("/")
    where = device_service.places(manager, system=system, config=config, home=home, root=root)
    return device_service.Installer(
        manager, where, system, device_service.run_command, os.getuid(), root
    )
