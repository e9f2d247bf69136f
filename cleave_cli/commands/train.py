"""`cleave train`: train a model, in this process or on a running server."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from cleave.errors import UsageError
from cleave_cli.cluster_options import TABLE, ClusterOptions
from cleave_cli.fleet_options import DEVICES, FLEET_FILE, FleetOptions
from cleave_cli.operator_link import server_of_this_machine
from cleave_cli.options import need_train_extra, not_empty, was_given
from cleave_cli.render.training import Display, make_display
from cleave_cli.stopping import stops_in_order

if TYPE_CHECKING:
    pass

_NOT_OF_THE_JOB = (
    "devices",
    "fleet",
    "churn",
    "coding",
    "server",
    "config",
    "runs",
    "name",
    "resume",
    "restart",
    "accept_changes",
    "attach",
    "grid",
    "servers",
    "ray_address",
    "listen",
    "verbose",
    "as_json",
)
_EMULATED: Final = ("devices", "fleet", "churn", "coding")
"""Options of devices that this process emulates."""
_PATHS: Final = {"model", "data", "eval_data", "state_dir", "against"}
"""Options of the job that may be paths."""


def train(
    model: Annotated[
        str, typer.Option(help="Model name, as opt-125m, or a Hugging Face folder.")
    ] = "",
    devices: Annotated[
        int, typer.Option(help="Emulated devices in this process; 0 for plain PyTorch.")
    ] = DEVICES,
    fleet: Annotated[
        str, typer.Option(help="What they are: paper, home-mix, ..., or a TOML file.")
    ] = "paper",
    churn: Annotated[
        str, typer.Option(help="They come and go: mean virtual seconds on:off, or a name.")
    ] = "",
    coding: Annotated[
        str, typer.Option(help="Count their payloads as coded: auto (on slow links), on, off.")
    ] = "auto",
    server: Annotated[
        str,
        typer.Option(
            help="URL of a server, to train there, or @FILE [default: this machine's, if one runs]",
            callback=not_empty,
        ),
    ] = "",
    config: Annotated[
        Path | None,
        typer.Option(help="Settings: a TOML file, as the config.toml of a run; see docs/scale.md."),
    ] = None,
    data: Annotated[
        str,
        typer.Option(
            help="Text, folder, JSONL, Parquet or `datasets` name [default: Python's library]"
        ),
    ] = "",
    steps: Annotated[int, typer.Option(help="Optimizer steps in total.")] = 100,
    batch: Annotated[int, typer.Option(help="Sequences per micro-batch.")] = 4,
    seq: Annotated[int, typer.Option(help="Tokens per sequence.")] = 128,
    packing: Annotated[
        str,
        typer.Option(help="Of documents in a sequence: joined, or separate (none sees another)."),
    ] = "joined",
    accumulate: Annotated[int, typer.Option(help="Micro-batches per step.")] = 1,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    learning_rate: Annotated[
        float, typer.Option("--learning-rate", "--lr", help="Peak rate; 0 for the published one.")
    ] = 0.0,
    warmup_steps: Annotated[int, typer.Option(help="Warm-up; -1 for a tenth of the run.")] = -1,
    schedule: Annotated[
        str, typer.Option(help="After the warm-up: cosine, linear, constant, or wsd.")
    ] = "cosine",
    floor: Annotated[float, typer.Option(help="Share of the peak at the end.")] = 0.1,
    decay_steps: Annotated[
        int, typer.Option(help="Of wsd: its last steps, that fall; -1: a tenth of the run.")
    ] = -1,
    lora: Annotated[
        str,
        typer.Option(
            help="Train adapters: r=16,alpha=32,targets=q_proj+v_proj,dora,save=lm_head; bits=4 or "
            "8: beside frozen weights in so many bits (QLoRA)."
        ),
    ] = "",
    optimizer: Annotated[str, typer.Option(help="adamw, sgd, adafactor, or muon.")] = "adamw",
    beta1: Annotated[float, typer.Option(help="Of AdamW.")] = 0.9,
    beta2: Annotated[float, typer.Option(help="Of AdamW.")] = 0.95,
    momentum: Annotated[float, typer.Option(help="Of sgd and muon.")] = 0.9,
    weight_decay: Annotated[float, typer.Option(help="On matrices.")] = 0.1,
    clip: Annotated[float, typer.Option(help="Largest gradient norm; 0 for none.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of weights and data order.")] = 0,
    eval_data: Annotated[
        str, typer.Option(help="Of held-out losses, as --data [default: 2% of --data]")
    ] = "",
    eval_every: Annotated[int, typer.Option(help="Steps between held-out losses; 0: never.")] = 0,
    eval_batches: Annotated[int, typer.Option(help="Batches per held-out loss.")] = 8,
    checkpoint_every: Annotated[
        str, typer.Option(help="Between checkpoints: steps, as 500, or a time, as 10min; 0: none.")
    ] = "10min",
    save_total_limit: Annotated[int, typer.Option(help="Latest checkpoints that are kept.")] = 2,
    keep_best: Annotated[
        bool, typer.Option("--keep-best", help="And that with the lowest held-out loss.")
    ] = False,
    early_stop: Annotated[
        int, typer.Option(help="Stop after so many held-out losses that are not lowest; 0: never.")
    ] = 0,
    report_to: Annotated[
        str, typer.Option(help="Curves also to: tensorboard, wandb, or tensorboard+wandb.")
    ] = "",
    memory: Annotated[
        str,
        typer.Option(
            help="auto, plain, recompute (activations), lean (and step in the backward pass), or "
            "sharded (recompute; --servers share the weights)."
        ),
    ] = "auto",
    state_dir: Annotated[
        str, typer.Option(help="Folder for the optimizer's state, in files; else in memory.")
    ] = "",
    method: Annotated[
        str, typer.Option(help="stages (whole layers on devices), tiles, local (PS alone) or auto.")
    ] = "auto",
    audit: Annotated[
        float, typer.Option(help="Chance that the PS repeats a device's part of a stage.")
    ] = 0.05,
    offload: Annotated[
        str,
        typer.Option(help="By tiles: all, or auto: keep on the PS what it does sooner alone."),
    ] = "all",
    journal: Annotated[
        bool, typer.Option("--journal/--no-journal", help="Resume inside a step after a crash.")
    ] = False,
    fallback: Annotated[
        str, typer.Option(help="Without devices: wait, or local: multiply on the PS.")
    ] = "wait",
    fallback_after_s: Annotated[
        float, typer.Option("--fallback-after", help="Seconds without devices before local.")
    ] = 30.0,
    against: Annotated[
        str, typer.Option(help="Run folder, as of plain PyTorch: show its losses beside these.")
    ] = "",
    runs: Annotated[str, typer.Option(help="Folder for run folders.")] = "runs",
    name: Annotated[str, typer.Option(help="Name of the run folder; else the time.")] = "",
    resume: Annotated[str, typer.Option(help="Run folder to go on with.")] = "",
    restart: Annotated[
        bool,
        typer.Option("--restart", help="With --resume: from step 1 if none is whole."),
    ] = False,
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes",
            help="With --resume: go on although the data, tokenizer or model is another.",
        ),
    ] = False,
    servers: Annotated[
        int, typer.Option(help="Servers that share the work, each with a part of the devices.")
    ] = 1,
    ray_address: Annotated[
        str,
        typer.Option("--ray", help="Start them on the Ray cluster at host:port, or auto."),
    ] = "",
    listen: Annotated[
        str,
        typer.Option(
            help="With --servers: devices join here, at host:port and the next ports, instead of "
            "emulated ones."
        ),
    ] = "",
    attach: Annotated[str, typer.Option(help="Follow this job of --server again.")] = "",
    grid: Annotated[
        str, typer.Option(help="Country of the electricity, as DEU: for the run's carbon.")
    ] = "",
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Also tiles, traffic by kind, and what coding saved.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines on stdout.")] = False,
    context: typer.Context = None,  # type: ignore[assignment]
) -> None:
    """Train a transformer on a fleet of devices; the losses are those of one machine.

    Examples:

      cleave train --model opt-125m --devices 8

      cleave train --model opt-125m --server 'ws://127.0.0.1:8765/ws#c=...'

      cleave train --config runs/20261121-101500/config.toml --seed 1

      cleave train --resume runs/20261121-101500
    """
    given = {
        key: value
        for key, value in context.params.items()
        if was_given(context, key) or key == "model"
    }
    # Options that are settings of the job have the same names.
    settings: dict[str, Any] = {
        key: value for key, value in context.params.items() if key not in _NOT_OF_THE_JOB
    }
    if "offload" in given and "method" not in given:  # an option of tiles
        settings["method"] = given["method"] = "tiles"
    if devices < 0:
        raise UsageError(f"--devices is {devices}; give 0 for plain PyTorch, or 1 and more")
    in_file = _settings_of(config) if config is not None else {}
    cluster = ClusterOptions.of(
        in_file.pop(TABLE, {}),
        {"ray" if key == "ray_address" else key: value for key, value in given.items()},
    )
    if cluster.listen and given.keys() & _EMULATED:
        raise UsageError(
            "--listen is where devices join several servers; give no --devices or --fleet with it"
        )
    if cluster.servers > 1 and (server or attach):
        raise UsageError(
            f"--servers, or [{TABLE}] of --config, starts servers for this training and --server "
            "trains on one that runs; give one of the two"
        )
    display = make_display(as_json=as_json, verbose=verbose)
    where = f"--server {server if server.startswith('@') else 'URL'} " if server else ""
    trained_here = bool(resume) and (Path(resume) / FLEET_FILE).is_file()
    if not (server or cluster.servers > 1 or trained_here or given.keys() & _EMULATED):
        server = server_of_this_machine()
        if server and not attach:
            display.note(
                "training on this machine's server, with the devices that joined it; "
                "--devices N would emulate some here"
            )
            resume = str(Path(resume).resolve()) if resume else ""
            for key in _PATHS & given.keys():  # the server has another working folder
                if settings[key] and Path(settings[key]).exists():
                    settings[key] = str(Path(settings[key]).resolve())
        elif resume:
            display.note(
                f"{resume} kept no emulated devices, as a run of a server does not; {DEVICES} are "
                f"emulated here; --server URL would go on there"
            )
    if attach and not server:
        raise UsageError(f"--attach {attach}: no server runs here; say which with --server URL")
    if in_file:
        if resume:
            raise UsageError(
                "the settings of --config begin a run and --resume goes on with one; give one of "
                f"them, or a file that has no more than [{TABLE}]"
            )
        ours = {key: value for key, value in settings.items() if key in given and value != ""}
        settings = {**in_file, **ours}
        model = settings.get("model", "")
    if not (model or resume or attach):
        raise UsageError("nothing to train; give --model, as in: cleave train --model opt-125m")
    for option in _EMULATED:
        if server and option in given:
            raise UsageError(
                f"--{option} emulates devices in this process and --server trains on that "
                f"server's; give one of the two"
            )
    if resume:  # change only the given settings of the run folder
        changed = given if model else given.keys() - {"model"}
        settings = {key: value for key, value in settings.items() if key in changed}
    request: dict[str, Any] = {"job": settings, "resume": resume, "name": name}
    if restart:
        request["restart"] = True
    if accept_changes:
        request["accept_changes"] = True
    if server:
        _on_server(server, request, attach, where, grid, display)
    else:
        asked: dict[str, Any] = {
            "devices": devices,
            "fleet": fleet,
            "churn": churn,
            "coding": coding,
        }
        asked = {name: value for name, value in asked.items() if name in given}
        options = FleetOptions(**asked)
        if resume:
            kept = FleetOptions.of_run(Path(resume))
            if "fleet" in asked and "devices" not in asked:  # the saved number was of another fleet
                kept = replace(kept, devices=None)
            options = replace(kept, **asked)
        if cluster.servers > 1:
            from cleave_cli.several_servers import train_on_several

            train_on_several(request, options, cluster, grid, display)
            return
        _here(request, options, Path(cluster.runs), grid, display)


def _settings_of(path: Path) -> dict[str, Any]:
    """Read the settings of a job from a TOML file.

    Raises:
        UsageError: when the file cannot be read.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"--config {str(path)!r} cannot be read ({error.strerror}); give a TOML file"
        ) from error
    except ValueError as error:
        raise UsageError(f"--config {str(path)!r} is no TOML ({error})") from error


def _here(
    request: dict[str, Any],
    options: FleetOptions,
    runs: Path,
    grid: str,
    display: Display,
) -> None:
    need_train_extra("cleave train")
    from cleave.energy.grid import electricity
    from cleave.machine.sensors import PowerMeter, Sensors
    from cleave.training.loop.records import DoneRecord, Record, StartRecord
    from cleave.training.loop.run_folder import RunFolder
    from cleave.training.loop.run_job import JobRequest, JobRunner
    from cleave.training.loop.trainer import TrainContext
    from cleave_cli.render.footprint import summary
    from emulator.run_meter import RunMeter

    if grid:
        electricity(grid, 0.0, 0.0)  # refuse an unknown country now
    asked = JobRequest.from_dict(request)
    spec = asked.spec()  # refuse before anything is started
    members = options.members(spec.dtype, spec.seed)
    display.start(spec.steps)
    fleet = None
    if members:
        from emulator.virtual import emulated

        fleet = emulated(members, seed=spec.seed, coding=options.coding)
    if fleet is not None:
        display.watch(fleet.runtime.progress)
    runtime: Any = fleet.runtime if fleet is not None else None
    meter = RunMeter(PowerMeter(Sensors()), runtime, members)

    def record(record: Record) -> None:
        meter.sample()
        if isinstance(record, StartRecord):
            started, waiting = Path(record.run_folder), context.patience(lambda: record.step)
            waiting.insist(lambda: options.keep(started))
        if isinstance(record, DoneRecord):  # the energy comes before it
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
    """Train on a server.

    Args:
        server: the operator's URL, or `@FILE`.
        request: the job to submit.
        attach: a job to follow instead; empty for a new one.
        where: `--server` option to print in the command that attaches again; may be empty.
        grid: the electricity grid; empty if not given.
        display: shows the records.
    """
    import asyncio

    from cleave.energy.grid import electricity
    from cleave.energy.run_energy import EVENT, run_energy
    from cleave.errors import CleaveError
    from cleave_cli.operator_client import OperatorClient
    from cleave_cli.render.footprint import summary

    if grid:
        electricity(grid, 0.0, 0.0)  # refuse an unknown country now

    async def follow() -> None:
        client = await OperatorClient.connect(server)
        job = attach
        try:
            if attach:
                answer = await client.request("attach", {"job": attach})
            else:
                answer = await client.request("submit", request)
                job = answer["job"]
                display.note(f"{job} submitted; paths are read, and results written, on the server")
                display.start(int(request["job"].get("steps", 0)))
            if ahead := answer.get("ahead"):  # older servers do not send it
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
                f"detached; {job} goes on, follow it again with: cleave train {where}--attach {job}"
            )
        finally:
            await client.close()

    asyncio.run(follow())
