"""`cleave profile`: measure devices and links, and show profiles."""

from __future__ import annotations

import datetime
import importlib
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from cleave.errors import CleaveError, UsageError, not_installed
from cleave_cli.options import Json, usage_errors
from cleave_cli.render.text import printable

if TYPE_CHECKING:
    from rich.progress import Progress

    from profiles.device_profile import DeviceProfile

app = typer.Typer(
    name="profile",
    help="Measure devices and links; list, show and fit profiles.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Force = Annotated[bool, Option("--force", help="Overwrite the output file.")]
_PROFILE = "Name from the library, or a .toml file."
_LONGEST_S = 86400.0
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@app.command("device")
def device(
    quick: Annotated[bool, Option("--quick", help="Measure for only a minute.")] = False,
    output: Annotated[
        Path | None, Option("--output", "-o", help="File to write. Default: NAME.toml.")
    ] = None,
    name: Annotated[str, Option(help="Name of the profile. Default: the host name.")] = "",
    title: Annotated[str, Option(help="Readable title. Default: the CPU.")] = "",
    kind: Annotated[
        str, Option(help="Kind: phone, tablet, laptop, desktop, sbc, server or cloud-gpu.")
    ] = "",
    backend: Annotated[
        str,
        Option(help="Backend for multiplications: auto, numpy or torch."),
    ] = "auto",
    threads: Annotated[int, Option(help="Threads for multiplications; 0 uses all cores.")] = 0,
    memory: Annotated[
        int, Option(help="Memory to offer in MB; 0 offers half of this machine's memory.")
    ] = 0,
    sustained: Annotated[
        float | None,
        Option(
            help="Duration of the sustained-load test in seconds; 0 skips it [default: 180; with "
            "--quick: 5]"
        ),
    ] = None,
    budget: Annotated[
        float | None,
        Option(help="Seconds for measuring all shapes [default: 240; with --quick: 40]"),
    ] = None,
    seed: Annotated[int, Option(help="Random seed for choosing the shapes to measure.")] = 0,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Measure this machine: multiplication speed, memory, speed under sustained load, and power.

    Run no other programs during the measurement.

    Examples:

      cleave profile device --quick

      cleave profile device --name anna-laptop --threads 4 -o anna.toml

      cleave profile device --sustained 600
    """
    from cleave.device.policy import parse_memory
    from cleave.machine.sensors import this_machine, total_memory_bytes, usable_cores

    cores = len(usable_cores())
    if not 0 <= threads <= cores:
        raise UsageError(f"--threads must be between 0 (for all cores) and {cores}, not {threads}")
    if threads:  # math libraries read these variables on import
        os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(threads)))
    if memory:
        parse_memory(str(memory), total_memory_bytes())
    if sustained is not None and not 0 <= sustained <= _LONGEST_S:
        raise UsageError(
            "--sustained must be from 0 (to skip the test) to one day in seconds, not "
            f"{sustained:g}"
        )
    if budget is not None and not 0 < budget <= _LONGEST_S:
        raise UsageError(f"--budget must be more than 0 seconds and at most a day, not {budget:g}")
    if seed < 0:
        raise UsageError(f"--seed must be 0 or more, not {seed}")
    _need("scipy.optimize", "tomli_w")
    from msgspec.structs import replace

    from cleave.arrays import DType
    from cleave.machine.backends import choose
    from cleave.machine.graph_choice import AUTO, GraphChoice, one_processor
    from cleave.machine.sensors import hold_strips_well
    from cleave_cli.own_server import own_device
    from profiles.library import write_profile
    from profiles.measuring import device as profiling

    _, runner = one_processor(backend, AUTO)  # as `cleave join` does
    if name and profiling.valid_name(name) != name:
        raise UsageError(
            f"--name {name!r} has characters that profile names cannot have; "
            f"use {profiling.valid_name(name)!r}"
        )
    name = name or profiling.valid_name(socket.gethostname())
    target = _writable(output or Path(f"{name}.toml"), force=force)
    defaults = (40.0, 5.0) if quick else (240.0, 180.0)
    settings = profiling.Settings(
        name=name,
        title=title or this_machine().cpu or name,
        date=datetime.date.today().isoformat(),
        quick=quick,
        grid_s=defaults[0] if budget is None else budget,
        sustained_s=defaults[1] if sustained is None else sustained,
        kind=_kind(kind) if kind else None,
        memory_bytes=memory * 10**6,
        threads=threads,
        seed=seed,
    )
    hold_strips_well()  # the same memory settings as on a device
    chosen = choose(backend).backend
    examined: list[str] = []
    graphs = GraphChoice(runner, examined.append)
    with _progress() as bar:
        task = bar.add_task("starting", total=settings.total_s)

        def progress(what: str, seconds: float) -> None:
            bar.update(task, description=what, completed=seconds)

        try:
            with own_device(chosen.name, threads) as timer:
                measured = profiling.measure_device(
                    settings, chosen, progress, timer=timer, graphs=graphs.flops_per_s
                )
        except (OSError, ValueError) as error:
            raise CleaveError(f"this machine could not be measured: {error}") from None
    for text in examined:
        typer.echo(printable(text), err=True)
    if measured.graphs is not None:
        by = " and ".join(dict.fromkeys(map(graphs.named, (None, DType.BF16))))
        source = f"{measured.graphs.source}, by {by}"
        measured = replace(measured, graphs=replace(measured.graphs, source=source))
    with usage_errors():
        write_profile(measured, target)
    _show(measured, as_json=as_json, file=target)
    _warn_of_poor_fits(measured)


@app.command("link")
def link(
    server: Annotated[str, Option(help="Join URL that `cleave serve` prints, or @FILE.")],
    repeats: Annotated[int, Option(help="Number of measurements.")] = 7,
    into: Annotated[
        Path | None,
        Option("--into", "-o", help="Profile file to which to add the measured link."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the downlink, uplink and round trip between this machine and a parameter server.

    The server first sends large inputs for a multiplication whose result is one number, and then
    small inputs for a multiplication with a large result. This machine gets no training work.

    Examples:

      cleave profile link --server 'http://192.168.1.20:8765/join#c=...'

      cleave profile link --server URL --repeats 20 --into anna.toml
    """
    import asyncio

    import msgspec

    from cleave.device.credentials import SavedCredentials, state_folder
    from cleave.transport.join_url import read_url
    from profiles.library import read_profile, write_profile
    from profiles.measuring.link import measure_link, summarise

    profile = None
    if into is not None:
        _need("tomli_w")
        with usage_errors():
            profile = read_profile(into)
    saved = SavedCredentials(state_folder())  # credentials for servers that know this machine
    with _progress() as bar:
        task = bar.add_task("measuring the link", total=repeats)
        found = asyncio.run(
            measure_link(
                read_url(server),
                repeats,
                lambda done, _: bar.update(task, completed=done),
                lambda target: saved.keys(target, socket.gethostname()),
            )
        )
    today = datetime.date.today().isoformat()
    with usage_errors():
        measured = summarise(found, f"cleave profile link, {repeats} times, {today}")
        if profile is not None and into is not None:
            write_profile(msgspec.structs.replace(profile, link=measured), into)
    if as_json:
        each = [
            {
                "downlink_bytes_per_s": rates.downlink_bytes_per_s,
                "uplink_bytes_per_s": rates.uplink_bytes_per_s,
                "round_trip_s": 2 * rates.latency_s,
            }
            for rates in found
        ]
        typer.echo(json.dumps({"link": msgspec.to_builtins(measured), "measured": each}))
        return
    from rich.console import Console
    from rich.table import Table

    from cleave_cli.render.profile import link_rows

    table = Table(show_header=False, box=None, pad_edge=False)
    for label, figure, _ in link_rows(measured):
        table.add_row(label, figure)
    Console().print(table)
    if into is not None:
        typer.echo(f"written to {into}", err=True)


@app.command("list")
def list_profiles(
    kind: Annotated[str, Option(help="Only this kind, such as phone or laptop.")] = "",
    as_json: Json = False,
) -> None:
    """List the profiles of the library.

    Examples:

      cleave profile list

      cleave profile list --kind phone --json
    """
    from profiles.library import load_profile, profile_names

    wanted = _kind(kind) if kind else None
    with usage_errors():
        profiles = [load_profile(name) for name in profile_names()]
    profiles = [p for p in profiles if wanted is None or p.kind is wanted]
    from cleave_cli.render.profile import list_entry, show_list

    if as_json:
        typer.echo(json.dumps({"profiles": [list_entry(profile) for profile in profiles]}))
        return
    from rich.console import Console

    show_list(Console(), profiles)


@app.command("show")
def show(profile: Annotated[str, Argument(help=_PROFILE)], as_json: Json = False) -> None:
    """Show a profile, the sources of its figures, and its assumptions.

    Examples:

      cleave profile show iphone-13-pro

      cleave profile show anna.toml
    """
    from profiles.library import load_profile

    with usage_errors():
        found = load_profile(profile)
    _show(found, as_json=as_json)


@app.command("fit")
def fit(
    file: Annotated[Path, Argument(help="File of a profile with samples.")],
    output: Annotated[
        Path | None, Option("--output", "-o", help="File to write. Default: FILE itself.")
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Refit the models of a profile to its stored samples.

    Examples:

      cleave profile fit anna.toml

      cleave profile fit anna.toml -o refitted.toml
    """
    _need("scipy.optimize", "tomli_w")
    from profiles.library import read_profile, write_profile
    from profiles.measuring.device import refit

    target = file if output in (None, file) else _writable(output or file, force=force)
    with usage_errors():
        fitted = refit(read_profile(file))
        write_profile(fitted, target)
    _show(fitted, as_json=as_json, file=target)
    _warn_of_poor_fits(fitted)


# --- shared helpers ---


def _show(profile: DeviceProfile, *, as_json: bool, file: Path | None = None) -> None:
    import msgspec

    from cleave_cli.render.profile import show_profile

    if as_json:
        document: dict[str, Any] = {"profile": msgspec.to_builtins(profile)}
        typer.echo(json.dumps(document if file is None else {"file": str(file), **document}))
        return
    from rich.console import Console

    show_profile(Console(), profile)
    if file is not None:
        typer.echo(f"profile written to {file}", err=True)


def _warn_of_poor_fits(profile: DeviceProfile) -> None:
    """Warn on stderr about performance models with large errors on held-out shapes."""
    from profiles.performance import POOR_ERROR

    for dtype, entry in profile.compute.items():
        worst = max((report.median_error for report in entry.fits.values()), default=0.0)
        if worst > POOR_ERROR:
            typer.echo(
                f"do not rely on {dtype} in this profile: its model has a median error of "
                f"{worst:.0%} on held-out shapes; measure again while nothing else runs",
                err=True,
            )


def _kind(text: str) -> Any:
    from profiles.device_profile import DeviceKind

    try:
        return DeviceKind(text)
    except ValueError:
        kinds = ", ".join(kind.value for kind in DeviceKind)
        raise UsageError(f"--kind is {text!r}; use one of {kinds}") from None


def _writable(path: Path, *, force: bool) -> Path:
    """Return `path` if a new profile can be written to it; otherwise raise UsageError."""
    if path.suffix != ".toml":
        raise UsageError(f"{path} is not a valid profile file; use a name that ends in .toml")
    if path.is_dir():
        raise UsageError(f"{path} is a folder; use another -o")
    if path.exists() and not force:
        raise UsageError(f"{path} already exists; add --force to overwrite it, or use another -o")
    if not path.absolute().parent.is_dir():
        raise UsageError(
            f"{path} cannot be written, because the folder {path.parent} does not exist"
        )
    if not os.access(path.absolute().parent, os.W_OK):
        raise UsageError(
            f"{path} cannot be written, because this user may not create files in {path.parent}"
        )
    return path


def _need(*modules: str) -> None:
    missing = []
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError:
            missing.append(module.partition(".")[0].replace("_", "-"))
    if missing:
        raise not_installed("cleave profile", " and ".join(missing), "profile")


@contextmanager
def _progress() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    hidden = not console.is_terminal  # on other outputs, the bar would print an empty line
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        yield bar
