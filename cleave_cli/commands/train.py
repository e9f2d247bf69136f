"""`cleave train`: train a model, in this process or on a running server."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Collection
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer import Option

from cleave.errors import UsageError
from cleave.training.loop.job import JobSpec
from cleave.training.loop.run_folder import RunFolder
from cleave_cli.fleet_options import DEVICES, FLEET_FILE, TABLE, ClusterOptions, FleetOptions
from cleave_cli.operator_link import server_of_this_machine
from cleave_cli.options import counted, need_train_extra, not_empty, show_every_option, was_given
from cleave_cli.render.training import Display, make_display
from cleave_cli.stopping import stops_in_order

_EMULATED: Final = ("devices", "fleet", "churn", "coding")  # options for emulated devices
_PATHS: Final = {"model", "data", "eval_data", "state_dir", "against"}  # settings that may be paths


def train(
    devices: Annotated[
        int, Option(help="Number of emulated devices; 0 uses plain PyTorch.")
    ] = DEVICES,
    fleet: Annotated[str, Option(help="Fleet: paper, home-mix, ..., or a TOML file.")] = "paper",
    churn: Annotated[
        str,
        Option(help="How emulated devices join and leave: mean virtual seconds on:off, or a name."),
    ] = "",
    coding: Annotated[
        str,
        Option(help="Count emulated payloads as compressed: auto (on slow links), on, off."),
    ] = "auto",
    server: Annotated[
        str,
        Option(
            help="Train on a server: @FILE, a copy of its operator.url "
            "[default: the server on this machine, if one runs]",
            callback=not_empty,
        ),
    ] = "",
    config: Annotated[
        Path | None,
        Option(help="Settings: a TOML file such as a run's config.toml; see docs/scale.md."),
    ] = None,
    runs: Annotated[str, Option(help="Folder for run folders.")] = "runs",
    name: Annotated[str, Option(help="Name of the run folder. Default: the time.")] = "",
    resume: Annotated[str, Option(help="Run folder to resume.")] = "",
    restart: Annotated[
        bool,
        Option("--restart", help="With --resume, start over when no checkpoint is intact."),
    ] = False,
    accept_changes: Annotated[
        bool,
        Option(
            "--accept-changes",
            help="With --resume, continue even if the data, tokenizer or model has changed.",
        ),
    ] = False,
    servers: Annotated[
        int, Option(help="Number of servers that share the batch and the devices.")
    ] = 1,
    ray_address: Annotated[
        str,
        Option("--ray", help="Start the servers on the Ray cluster at host:port, or auto."),
    ] = "",
    listen: Annotated[
        str,
        Option(
            help="With --servers: host:port (and the next ports) where devices join; none are "
            "emulated."
        ),
    ] = "",
    attach: Annotated[str, Option(help="Follow this job of --server again.")] = "",
    grid: Annotated[
        str, Option(help="Country whose electricity is used, such as DEU, for carbon.")
    ] = "",
    verbose: Annotated[
        bool,
        Option(
            "--verbose",
            help="Also print tiles, traffic by kind, compression, and a timeline of each device.",
        ),
    ] = False,
    log_every: Annotated[
        int | None,
        Option(
            help="Print a line every N steps; 0 for none [default: 1; 0 on a terminal]",
            metavar="N",
            min=0,
        ),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="JSON lines on stdout.")] = False,
    help_all: Annotated[
        bool,
        Option("--help-all", help="List every option.", is_eager=True, callback=show_every_option),
    ] = False,
    context: typer.Context = None,  # type: ignore[assignment]
    **job: Any,
) -> None:
    """Train a transformer on a fleet of devices, with the same losses as on one machine.

    Examples:

      cleave train --model opt-125m --devices 8

      cleave train --model opt-125m --server @operator.url

      cleave train --config runs/20261121-101500/config.toml --seed 1

      cleave train --resume runs/20261121-101500
    """
    given = {
        key: value
        for key, value in context.params.items()
        if was_given(context, key) or key == "model"
    }
    settings, model = job, job["model"]
    if "offload" in given and "method" not in given:  # --offload implies tiles
        settings["method"] = given["method"] = "tiles"
    if devices < 0:
        raise UsageError(f"--devices must be 0 (for plain PyTorch) or more, not {devices}")
    in_file = settings_of(config) if config is not None else {}
    cluster = ClusterOptions.of(
        in_file.pop(TABLE, {}),
        {"ray" if key == "ray_address" else key: value for key, value in given.items()},
    )
    if cluster.listen and given.keys() & _EMULATED:
        raise UsageError(
            "--listen is for real devices, and cannot be combined with options of emulated devices "
            "such as --devices and --fleet"
        )
    if cluster.servers > 1 and (server or attach):
        raise UsageError(
            f"--servers (or [{TABLE}] in --config) starts new servers, and cannot be combined with "
            "--server or --attach, which use a running server"
        )
    display = make_display(as_json=as_json, verbose=verbose, log_every=log_every)
    where = f"--server {server if server.startswith('@') else 'URL'} " if server else ""
    trained_here = bool(resume) and (Path(resume) / FLEET_FILE).is_file()
    found_here = not (server or cluster.servers > 1 or trained_here or given.keys() & _EMULATED)
    if found_here:
        server = server_of_this_machine()
        if server and not attach:
            display.note(
                "training on this machine's server, with the devices that joined it; to emulate "
                "devices instead, use --devices N"
            )
            resume = str(Path(resume).resolve()) if resume else ""
        elif resume and RunFolder(Path(resume)).config_path.is_file():
            display.note(
                f"{resume} was trained by a server and has no emulated devices, so {DEVICES} are "
                "emulated; to continue on a server, use --server @FILE"
            )
    if attach and not server:
        raise UsageError(
            f"--attach {attach} needs a server, but none runs here; name one with --server @FILE"
        )
    if in_file:
        if resume:
            raise UsageError(
                "--config starts a new run, and cannot be combined with --resume unless the file "
                f"contains only [{TABLE}]"
            )
        ours = {key: value for key, value in settings.items() if key in given and value != ""}
        settings = {**in_file, **ours}
        model = settings.get("model", "")
    if not (model or resume or attach):
        raise UsageError("nothing to train; add --model, as in: cleave train --model opt-125m")
    for option in _EMULATED:
        if server and option in given:
            raise UsageError(
                f"--{option} is for emulated devices, and cannot be combined with --server, which "
                f"uses the server's devices"
            )
    if resume:  # change only those settings of the run that are on the command line
        changed = given if model else given.keys() - {"model"}
        settings = {key: value for key, value in settings.items() if key in changed}
    if found_here and server:  # the server may have another working directory
        for key in _PATHS & settings.keys():
            value = settings[key]
            if isinstance(value, str) and value and Path(value).exists():
                settings[key] = str(Path(value).resolve())
    request: dict[str, Any] = {"job": settings, "resume": resume, "name": name}
    if restart:
        request["restart"] = True
    if accept_changes:
        request["accept_changes"] = True
    if grid:
        from cleave.energy.grid import electricity

        electricity(grid, 0.0, 0.0)  # raises for an unknown country, before the run starts
    if server:
        _on_server(server, request, attach, where, grid, display)
    else:
        asked: dict[str, Any] = {key: given[key] for key in _EMULATED if key in given}
        options = FleetOptions(**asked)
        if resume:
            kept = FleetOptions.of_run(Path(resume))
            if "fleet" in asked and "devices" not in asked:  # the saved number is another fleet's
                kept = replace(kept, devices=None)
            options = replace(kept, **asked)
        if cluster.servers > 1:
            from cleave_cli.several_servers import train_on_several

            train_on_several(request, options, cluster, grid, display)
            return
        _here(request, options, Path(cluster.runs), grid, display, searched=found_here)


def with_job_options(
    command: Callable[..., None], names: Collection[str] = tuple(JobSpec.settings())
) -> inspect.Signature:
    """Return the signature of `command`, extended by one option for each field of `JobSpec`.

    Args:
        command: a function whose last parameters are `context` and `**job`.
        names: names of the fields to include; by default, all settings.
    """
    only = inspect.Parameter.KEYWORD_ONLY
    of_job = []
    for known in fields(JobSpec):
        if known.name not in names:
            continue
        setting = known.metadata["setting"]
        default: Any = "" if known.default is MISSING else known.default
        kind: Any = type(default)
        option = Annotated[kind, Option(*setting.names, help=setting.help)]
        of_job.append(inspect.Parameter(known.name, only, default=default, annotation=option))
    own = inspect.signature(command, eval_str=True).parameters.values()
    *before, context, _ = own  # the last parameter is **job
    keyword_only = [each.replace(kind=only) for each in before]
    return inspect.Signature([context, of_job[0], *keyword_only, *of_job[1:]])


train.__signature__ = with_job_options(train)  # type: ignore[attr-defined]

COMMON: Final = frozenset(  # the options that `cleave train --help` lists
    {name for name, setting in JobSpec.settings().items() if setting.common}
    | {"devices", "fleet", "server", "config", "name", "resume", "as_json"}
)


def settings_of(path: Path) -> dict[str, Any]:
    """Read the settings of a job from the TOML file of `--config`."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"--config {str(path)!r} cannot be read ({error.strerror}); use a readable TOML file"
        ) from error
    except ValueError as error:
        raise UsageError(f"--config {str(path)!r} is not valid TOML ({error})") from error


def _here(
    request: dict[str, Any],
    options: FleetOptions,
    runs: Path,
    grid: str,
    display: Display,
    *,
    searched: bool,
) -> None:
    """Train in this process. `searched`: whether no server was found on this machine."""
    need_train_extra("cleave train")
    from cleave.machine.sensors import PowerMeter, Sensors, hold_strips_well
    from cleave.training.loop.context import TrainContext
    from cleave.training.loop.records import DoneRecord, Record, StartRecord
    from cleave.training.loop.start import JobRequest, JobRunner
    from cleave_cli.render.footprint import summary
    from emulator.run_meter import RunMeter

    hold_strips_well()
    asked = JobRequest.from_dict(request)
    spec = asked.spec()  # raises for an invalid job, before anything is started
    members = options.members(spec.dtype, spec.seed)
    if searched and members:
        display.note(
            f"training on {counted(len(members), 'emulated device')} (fleet {options.fleet}); no "
            f"server runs on this machine"
        )
    display.start(spec.steps)
    fleet = None
    runtime: Any = None
    if members:
        from emulator.virtual import emulated

        fleet = emulated(members, seed=spec.seed, coding=options.coding)
        runtime = fleet.runtime
        display.watch(runtime.progress)
    meter = RunMeter(PowerMeter(Sensors()), runtime, members)

    def record(record: Record) -> None:
        meter.sample()
        if isinstance(record, StartRecord):
            started, waiting = Path(record.run_folder), context.patience(lambda: record.step)
            waiting.insist(lambda: options.keep(started))
        if isinstance(record, DoneRecord):  # append the energy record before this record
            energy, folder = meter.finish(), RunFolder(Path(record.run_folder))
            patience = context.patience(lambda: record.steps)
            patience.insist(lambda: folder.append(energy.to_record()))
            display.plain(energy.to_record() | summary(energy, grid))
        display.record(record)

    try:
        with stops_in_order(display.note) as stop:
            context = TrainContext(fleet, record, stop)
            with display:
                JobRunner(runs).train(asked, context)
    finally:
        if fleet is not None:
            fleet.close()


def _on_server(
    server: str, request: dict[str, Any], attach: str, where: str, grid: str, display: Display
) -> None:
    """Submit a job to a server, or attach to a job, and show the job's records."""
    import asyncio

    from cleave.energy.run_energy import EVENT, run_energy
    from cleave.errors import CleaveError
    from cleave_cli.operator_client import OperatorClient
    from cleave_cli.render.footprint import summary

    async def follow() -> None:
        job = attach
        async with OperatorClient.connect(server) as client:
            try:
                if attach:
                    answer = await client.request("attach", {"job": attach})
                else:
                    answer = await client.request("submit", request)
                    job = answer["job"]
                    display.note(f"{job} submitted; all paths are on the server")
                    display.start(int(request["job"].get("steps", 0)))
                if ahead := answer.get("ahead"):  # older servers omit this field
                    display.note(f"{job} is queued behind {', '.join(ahead)}")
                with display:
                    async for record in client.records():
                        if record.get("event") == "failed":
                            raise CleaveError(f"{job} failed: {record.get('text')}")
                        if record.get("event") == EVENT:
                            record = record | summary(run_energy([record]), grid)
                        display.plain(record)
            except asyncio.CancelledError:
                display.note(
                    f"detached; {job} continues; follow it with: cleave train {where}--attach {job}"
                )

    asyncio.run(follow())
