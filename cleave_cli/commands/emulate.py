"""`cleave emulate`: emulate devices in real time (on a server) or in virtual time."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from cleave.errors import UsageError
from cleave_cli.emulate_real_time import Watch, real_time
from cleave_cli.fleet_options import choose_fleet
from cleave_cli.options import counted, human_bytes, not_empty, was_given
from cleave_cli.render.text import Csv, Form, filled, form_of, write_csv

if TYPE_CHECKING:
    from emulator.sized_step import SizedStep
    from profiles.fleet_device import FleetDevice

MAX_REAL_TIME = 20_000
_DTYPES = ("fp32", "bf16", "fp16")
_COUNTED = ("gemms", "tiles", "blocks", "reissued", "downlink_bytes", "uplink_bytes")
_REAL_TIME = ("duration", "speed")
_VIRTUAL = (
    "method", "batch", "seq", "steps", "ps_gbit", "ps_gflops", "coding", "reuse", "as_csv",
)  # fmt: skip


def emulate(
    devices: Annotated[
        int | None, Option(help="Number of devices [default: the number in --fleet, or 1000]")
    ] = None,
    fleet: Annotated[
        str, Option(help="Fleet: paper, home-mix-N, campus, ..., or a TOML file.")
    ] = "paper",
    server: Annotated[
        str,
        Option(
            help="Join URL of a running server, or @FILE. Default: start a server.",
            callback=not_empty,
        ),
    ] = "",
    model: Annotated[str, Option(help="Emulate steps of this model in virtual time.")] = "",
    churn: Annotated[
        str, Option(help="How devices join and leave: mean seconds on:off, or a name.")
    ] = "",
    stragglers: Annotated[
        float, Option(help="Share of devices slowed to a tenth of their speed.")
    ] = 0.0,
    duration: Annotated[
        float, Option(help="Seconds until all devices leave; 0 means until Ctrl-C.")
    ] = 0.0,
    speed: Annotated[float, Option(help="Emulated seconds per real second.")] = 1.0,
    compute: Annotated[
        bool,
        Option("--compute/--no-compute", help="Compute results, or return zeros for tiles."),
    ] = True,
    trace: Annotated[Path | None, Option(help="Trace file to write, for ui.perfetto.dev.")] = None,
    log: Annotated[Path | None, Option(help="Write every event as a JSON line.")] = None,
    seed: Annotated[int, Option(help="Random seed for links, jitter, drift and churn.")] = 0,
    start_hour: Annotated[
        float, Option(help="Hour of the day at the start, for devices with daily hours.")
    ] = 22.0,
    batch: Annotated[int, Option(help="With --model: sequences per step.")] = 128,
    seq: Annotated[int, Option(help="With --model: tokens per sequence.")] = 1024,
    method: Annotated[
        str, Option(help="With --model: method, tiles or stages (whole layers on devices).")
    ] = "tiles",
    steps: Annotated[int, Option(help="With --model: number of steps.")] = 1,
    dtype: Annotated[str, Option(help="Dtype: bf16, fp16 or fp32.")] = "fp32",
    ps_gbit: Annotated[
        float,
        Option(help="With --model: PS's network card, Gbit/s each way; 0 means unlimited."),
    ] = 0.0,
    ps_gflops: Annotated[
        float,
        Option(
            help="With --model: server's GFLOP/s; 0 measures this machine (stages), or assumes no "
            "time for the server's own work (tiles)."
        ),
    ] = 0.0,
    coding: Annotated[str, Option(help="With --model, compress payloads: auto, on, off.")] = "auto",
    reuse: Annotated[
        bool,
        Option("--reuse/--no-reuse", help="With --model: reuse timelines of equal GEMMs."),
    ] = True,
    as_json: Annotated[bool, Option("--json", help="JSON lines on stdout.")] = False,
    as_csv: Csv = False,
    context: typer.Context = None,  # type: ignore[assignment]
) -> None:
    """Emulate a fleet of devices at the speeds in their profiles.

    In real time, the devices join a parameter server, which cannot tell them from real devices.
    With --model, steps run in virtual time, as fast as this machine can compute.

    Examples:

      cleave emulate --devices 1000

      cleave emulate --devices 200 --fleet home-mix --server 'http://127.0.0.1:8765/join#c=...'

      cleave emulate --fleet phones-4g-50 --churn 600:120 --duration 60 --trace fleet.json

      cleave emulate --model opt-13b --fleet paper-1024 --dtype bf16

      cleave emulate --model opt-1.3b --batch 64 --seq 512 --fleet household-9 --method stages
    """
    if devices is not None and devices < 1:
        raise UsageError(f"--devices must be 1 or more, not {devices}")
    if dtype not in _DTYPES:
        raise UsageError(f"--dtype is {dtype!r}; use one of {', '.join(_DTYPES)}")
    numbers = {"--duration": duration, "--ps-gbit": ps_gbit, "--ps-gflops": ps_gflops}
    for name, value in numbers.items():
        if not value >= 0:
            raise UsageError(f"{name} must be 0 or more, not {value}")
    if steps < 1:
        raise UsageError(f"--steps must be 1 or more, not {steps}")
    if not 1e-3 <= speed <= 1e3:
        raise UsageError(f"--speed must be between 0.001 and 1000, not {speed:g}")
    if not 0 <= start_hour < 24:
        raise UsageError(
            f"--start-hour must be an hour of the day, from 0 to below 24, not {start_hour:g}"
        )
    if method not in ("tiles", "stages"):
        raise UsageError(f"--method is {method!r}; use tiles or stages")
    if method == "stages" and dtype == "fp16":
        raise UsageError(
            "--dtype is 'fp16', but stages support only bf16 and fp32; use one of these"
        )
    if model and server:
        raise UsageError("--model emulates without a server, and cannot be combined with --server")
    from cleave.workload.registry import find_model
    from cleave.workload.step import check_step

    _need_meaning(context, virtual=bool(model))
    form = form_of(as_json=as_json, as_csv=as_csv)
    members = choose_fleet(
        fleet, devices, default=1000, dtype="fp32" if method == "stages" else dtype, churn=churn,
        stragglers=stragglers, seed=seed,
    )  # fmt: skip
    if model:
        check_step(find_model(model), batch, seq)
    watch = Watch(trace, log)
    if model:
        asked = _Asked(
            members, model, batch, seq, dtype, steps, ps_gbit * 1e9 / 8 or math.inf, ps_gflops,
            coding, seed, start_hour, reuse, watch, form,
        )  # fmt: skip
        if method == "stages":
            _stages(asked)
        else:
            _tiles(asked)
    else:
        if len(members) > MAX_REAL_TIME:
            raise UsageError(
                f"{len(members):,} devices in real time are too many for one machine; use at most "
                f"{MAX_REAL_TIME:,}, or emulate in virtual time with --model"
            )
        real_time(
            members, server, compute, speed, duration, seed, start_hour, watch, as_json=as_json
        )


def _need_meaning(context: typer.Context, *, virtual: bool) -> None:
    """Raise UsageError if the command line has an option that has no effect in this mode."""
    for name in _REAL_TIME if virtual else _VIRTUAL:
        if was_given(context, name):
            option = f"--{name.removeprefix('as_').replace('_', '-')}"
            raise UsageError(
                f"{option} is for real time, and cannot be combined with --model, which emulates "
                f"in virtual time"
                if virtual
                else f"{option} is for virtual time, and needs --model"
            )


# --- virtual time ---


@dataclass(frozen=True, slots=True)
class _Asked:
    """The options of `cleave emulate --model`, which runs steps in virtual time."""

    members: list[FleetDevice]
    model: str
    rows: int
    sequence: int
    dtype: str
    steps: int
    card_bytes_per_s: float
    ps_gflops: float
    coding: str
    seed: int
    start_hour: float
    reuse: bool
    watch: Watch
    form: Form


def _tiles(asked: _Asked) -> None:
    from rich.console import Console
    from rich.progress import Progress

    from cleave.arrays import DType
    from cleave.planner.plan import PS_BLOCK_S, PS_BYTE_S, PsRates
    from cleave.planner.tiles.planner import TilePlanner
    from cleave.workload.registry import find_model
    from emulator.sized_step import SizedStepper, server_s
    from emulator.virtual import emulated

    card, form, watch, devices = asked.card_bytes_per_s, asked.form, asked.watch, len(asked.members)
    with emulated(
        asked.members, compute=False, ps=PsRates(card, card), seed=asked.seed,
        start_hour=asked.start_hour, coding=asked.coding,
    ) as fleet:  # fmt: skip
        # The server's event loop takes no virtual time, but plans account for it as on a real
        # server.
        fleet.planner = TilePlanner(PsRates(card, card, block_s=PS_BLOCK_S, byte_s=PS_BYTE_S))
        runtime: Any = fleet.runtime
        runtime.observers.extend(watch.observers)
        spec, rows, sequence = find_model(asked.model), asked.rows, asked.sequence
        dtype = DType(asked.dtype)
        stepper = SizedStepper(fleet, spec, rows * sequence, dtype, reuse=asked.reuse)
        flops_per_s = asked.ps_gflops * 1e9
        here_s = server_s(spec, rows, sequence, flops_per_s) if flops_per_s else None
        console = Console(stderr=True)
        hidden = form is not Form.PEOPLE or not console.is_terminal
        rows_done = list[dict[str, Any]]()
        try:
            for number in range(1, asked.steps + 1):
                # Remove the progress bar of a step before printing the result on the same terminal.
                with Progress(console=console, transient=True, disable=hidden) as bar:
                    title = f"step {number} of {asked.model}"
                    task = bar.add_task(title, total=2 * stepper.groups)
                    step = stepper.step(lambda done, _: bar.update(task, completed=done))  # noqa: B023
                rows_done.append(_step_values(step, here_s, number, devices))
                if form is Form.JSON:
                    typer.echo(json.dumps(rows_done[-1]))
                elif form is Form.PEOPLE:
                    _show_step(step, here_s, number, devices)
        finally:
            watch.finish()  # write the files even after Ctrl-C
            if form is Form.CSV and rows_done:
                write_csv(rows_done)


def _stages(asked: _Asked) -> None:
    from rich.console import Console

    from cleave.arrays import DType
    from cleave.planner.plan import PsRates
    from cleave.planner.stages.prediction import in_seconds
    from cleave.workload.registry import find_model
    from cleave.workload.stages import StageSizes
    from cleave_cli.plan_question import server_of
    from emulator.sized_stages import emulate_stages

    card, form, members = asked.card_bytes_per_s, asked.form, asked.members
    spec, dtype = find_model(asked.model), DType(asked.dtype)
    sizes = StageSizes(spec, asked.sequence, dtype.itemsize, dtype.itemsize)
    ps = server_of(sizes, asked.ps_gflops, asked.dtype, PsRates(card, card))
    try:
        with Console(stderr=True).status(f"planning and emulating {asked.model} by stages"):
            found = emulate_stages(
                spec, asked.rows, asked.sequence, members, ps, dtype=dtype, steps=asked.steps,
                coding=asked.coding, seed=asked.seed, observers=asked.watch.observers,
            )  # fmt: skip
    finally:
        asked.watch.finish()
    values = [
        {
            "event": "step", "step": number, "devices": len(members), "method": "stages",
            "fleet_s": step.seconds, "optimizer_s": found.ps.optimizer_s,
            "downlink_bytes": step.downlink_bytes, "uplink_bytes": step.uplink_bytes,
            "alone_s": found.alone_s,
        }
        for number, step in enumerate(found.steps, 1)
    ]  # fmt: skip
    if form is Form.CSV:
        write_csv(values)
        return
    if form is Form.JSON:
        typer.echo("\n".join(map(json.dumps, values)))
        return
    for number, step in enumerate(found.steps, 1):
        seconds = step.seconds + found.ps.optimizer_s
        text = (
            f"step {number}: {in_seconds(seconds)}, simulated, on "
            f"{counted(len(members), 'device')}, including {in_seconds(found.ps.optimizer_s)} for "
            f"the server's optimizer; the server sends "
            f"{human_bytes(step.downlink_bytes)} and receives {human_bytes(step.uplink_bytes)}"
        )
        typer.echo(filled(text))
    whose = "of --ps-gflops" if asked.ps_gflops else "of this machine"
    text = (
        f"  the PS alone: {in_seconds(found.alone_s)}, simulated, at the "
        f"{ps.flops_per_s / 1e9:.3g} GFLOP/s {whose}\n"
        f"  {found.plan.described(found.model)}"
    )
    typer.echo(filled(text))


def _step_values(
    step: SizedStep, here_s: float | None, number: int, devices: int
) -> dict[str, Any]:
    done, seconds = step.counters, step.fleet_s
    return {
        "event": "step",
        "step": number,
        "devices": devices,
        "fleet_s": seconds,
        "server_s": here_s,
        **{name: getattr(done, name) for name in _COUNTED},
        "coding_saved_down_bytes": done.saved.down.total,
        "coding_saved_up_bytes": done.saved.up.total,
        "ps_egress_bytes_per_s": done.downlink_bytes / seconds,
        "ps_ingress_bytes_per_s": done.uplink_bytes / seconds,
        "events": step.events,
        "reused_events": step.reused_events,
        "wall_s": step.wall_s,
    }


def _show_step(step: SizedStep, here_s: float | None, number: int, devices: int) -> None:
    """Print a step's time and traffic. `here_s` is the server's time for attention, if known."""
    from cleave.planner.stages.prediction import in_seconds

    done, seconds = step.counters, step.fleet_s
    counts = f"included: every Linear and the LM head, {in_seconds(seconds)} on devices"
    if here_s is None:
        counts += "; excluded: the server's attention (use --ps-gflops to include it) and optimizer"
    else:
        counts += f"; attention, {in_seconds(here_s)} on the server; excluded: its optimizer"
    text = (
        f"step {number}: {in_seconds(seconds + (here_s or 0.0))}, simulated, on "
        f"{counted(devices, 'device')}\n"
        f"  {counts}\n"
        f"  {counted(done.gemms, 'GEMM')}, {counted(done.tiles, 'tile')}, "
        f"{counted(done.blocks, 'block')}, {done.reissued:,} reissued\n"
        f"  the server sends {human_bytes(done.downlink_bytes)} "
        f"({done.downlink_bytes * 8e-9 / seconds:.3g} Gbit/s) and receives "
        f"{human_bytes(done.uplink_bytes)} ({done.uplink_bytes * 8e-9 / seconds:.3g} Gbit/s)\n"
        f"  compression saves {human_bytes(done.saved.down.total)} of the bytes sent and "
        f"{human_bytes(done.saved.up.total)} of the bytes received\n"
        f"  emulated here in {step.wall_s:.3g} s: {step.events:,} events, and "
        f"{step.reused_events:,} taken from recorded timelines"
    )
    typer.echo(filled(text))
