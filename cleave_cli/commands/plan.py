"""`cleave plan`: what a training step takes on a fleet, and what limits it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cleave.errors import UsageError, not_installed
from cleave_cli.options import human_bytes

if TYPE_CHECKING:
    from cleave.planner.plan import DeviceRates, ElementBytes, Plan, PsRates
    from cleave.planner.planner import TilePlanner
    from cleave.planner.report import PlanReport, StepReport
    from cleave.workload.step import StepGemm
    from profiles.fleet_device import FleetDevice

_KINDS = {"forward": "fwd", "input-gradient": "dX", "weight-gradient": "dW"}
_LEAST_GBIT = 1e-3
_ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def plan(
    model: Annotated[str, typer.Option(help="Model name, as opt-13b.")] = "",
    gemm: Annotated[str, typer.Option(help="One GEMM instead of a model: M,N,K.")] = "",
    batch: Annotated[int, typer.Option(help="Sequences per step.")] = 128,
    seq: Annotated[int, typer.Option(help="Tokens per sequence.")] = 1024,
    fleet: Annotated[
        str, typer.Option(help="paper-N, home-mix-N, ..., or a TOML file.")
    ] = "paper-256",
    stragglers: Annotated[
        float, typer.Option(help="Share of devices whose rates are divided by ten.")
    ] = 0.0,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    method: Annotated[
        str, typer.Option(help="3d, or 2d: rows and columns only, as published.")
    ] = "3d",
    fused: Annotated[
        bool, typer.Option("--fused/--unfused", help="Siblings that read one input as one GEMM.")
    ] = True,
    ps_gbit: Annotated[
        float, typer.Option(help="The PS's card, Gbit/s each way; 0: unlimited.")
    ] = 0.0,
    ps_memory: Annotated[
        float, typer.Option(help="GB for partial sums that wait on the PS; 0: unlimited.")
    ] = 0.0,
    objective: Annotated[
        str, typer.Option(help="time, or the front of time against energy or carbon.")
    ] = "time",
    tiles: Annotated[bool, typer.Option("--tiles", help="With --json: every tile.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the tiling of --gemm, or of the slowest GEMM (PNG).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Plan the multiplications of a training step, without running them.

    Examples:

      cleave plan --model opt-13b --batch 128 --seq 1024 --fleet paper-256

      cleave plan --gemm 4096,4096,4096 --fleet home.toml --tiles --json

      cleave plan --model llama2-7b --fleet paper-1024 --ps-gbit 10 --plot tiling.png
    """
    from cleave.gemm import Gemm
    from cleave.planner.front import Objective
    from cleave.planner.plan import ElementBytes, PsRates
    from cleave.planner.planner import PlanMethod, TilePlanner
    from cleave.planner.report import plan_step, report
    from cleave.workload.registry import find_model
    from cleave.workload.step import step_gemms

    if bool(model) == bool(gemm):
        raise UsageError("give either --model or --gemm, as in: cleave plan --model opt-13b")
    if dtype not in _ELEMENT_BYTES:
        raise UsageError(f"--dtype is {dtype!r}; use one of {', '.join(_ELEMENT_BYTES)}")
    for name, value in (("--ps-gbit", ps_gbit), ("--ps-memory", ps_memory)):
        if not value >= 0:
            raise UsageError(f"{name} is {value}; give 0 (unlimited) or more")
    if 0 < ps_gbit < _LEAST_GBIT:
        raise UsageError(f"--ps-gbit is {ps_gbit:g}; give {_LEAST_GBIT:g} or more, 0 for unlimited")
    if tiles and not (gemm and as_json):
        raise UsageError("--tiles lists the tiles of one GEMM as JSON: add --gemm M,N,K and --json")
    profiles = _profiles(fleet, stragglers, dtype)
    devices = [_rates(i, profile) for i, profile in enumerate(profiles)]
    card = ps_gbit * 1e9 / 8 or float("inf")
    ps = PsRates(card, card, ps_memory * 1e9 or float("inf"))
    element = ElementBytes(_ELEMENT_BYTES[dtype], _ELEMENT_BYTES[dtype])
    planner = TilePlanner(ps, _choice("--method", method, PlanMethod))
    wanted = _choice("--objective", objective, Objective)
    if gemm:
        if wanted is not Objective.TIME:
            raise UsageError(f"--objective {objective} is for whole steps: give --model")
        one = report(planner.plan(Gemm(*_sides(gemm)), element, devices), element, devices, ps)
        if as_json:
            typer.echo(json.dumps(_gemm_json(one, devices, tiles=tiles)))
        else:
            _show_gemm(one, len(devices))
        _draw(plot, one.plan)
        return
    gemms = step_gemms(find_model(model), batch, seq, fused)
    if wanted is not Objective.TIME:
        if plot is not None:
            raise UsageError(f"--plot draws one tiling; leave out --objective {objective}")
        _show_front(planner, gemms, element, devices, ps, profiles, wanted, as_json=as_json)
        return
    step = plan_step(planner, gemms, element, devices, ps)
    if as_json:
        typer.echo(json.dumps(_step_json(step, gemms)))
    else:
        _show_step(step, gemms, f"{model}, batch {batch}, {seq} tokens, {dtype}, {fleet}")
    _draw(plot, max(step.reports, key=lambda r: r.plan.makespan_s).plan)


def _choice(option: str, value: str, kind: Any) -> Any:
    for member in kind:
        if member.value == value:
            return member
    raise UsageError(f"{option} is {value!r}; use one of {', '.join(m.value for m in kind)}")


def _profiles(fleet: str, stragglers: float, dtype: str) -> list[FleetDevice]:
    from profiles.fleets import find_fleet

    try:
        return find_fleet(fleet, stragglers, dtype=dtype)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _rates(number: int, profile: FleetDevice) -> DeviceRates:
    from cleave.planner.plan import DeviceRates

    return DeviceRates(
        number,
        profile.stated_downlink_bytes_per_s,
        profile.stated_uplink_bytes_per_s,
        profile.stated_flops_per_s,
        profile.latency_s,
        profile.memory_bytes,
    )


def _sides(text: str) -> tuple[int, int, int]:
    parts = text.replace("x", ",").split(",")
    try:
        m, n, k = (int(part) for part in parts)
    except ValueError:
        raise UsageError(f"--gemm is {text!r}; give M,N,K, as 4096,4096,4096") from None
    for name, side in (("M", m), ("N", n), ("K", k)):
        if side < 1:
            raise UsageError(f"{name} of --gemm is {side}; give 1 or more")
    return m, n, k


# --- JSON ---


def _gemm_json(report: PlanReport, devices: list[DeviceRates], *, tiles: bool) -> dict[str, Any]:
    plan = report.plan
    document = _report_json(report)
    if tiles:
        document["tiles"] = [
            {
                "device": t.device,
                "m": list(t.tile.m),
                "n": list(t.tile.n),
                "k": list(t.tile.k),
                "download_bytes": t.download_bytes,
                "upload_bytes": t.upload_bytes,
                "time_s": t.time_s,
                "memory_bytes": t.memory_bytes,
            }
            for t in plan.tiles
        ]
        document["devices"] = [
            {
                "id": d.device,
                "downlink_bytes_per_s": d.downlink_bytes_per_s,
                "uplink_bytes_per_s": d.uplink_bytes_per_s,
                "flops_per_s": d.flops_per_s,
                "latency_s": d.latency_s,
                "memory_bytes": d.memory_bytes,
            }
            for d in devices
        ]
    return document


def _report_json(report: PlanReport) -> dict[str, Any]:
    plan = report.plan
    return {
        "m": plan.gemm.m,
        "n": plan.gemm.n,
        "k": plan.gemm.k,
        "makespan_s": plan.makespan_s,
        "fill_s": plan.fill_s,
        "predicted_s": report.predicted_s,
        "bound_s": plan.bound_s,
        "overlap_bound_s": report.overlap_bound_s,
        "gap": report.gap,
        "regions": [
            {"m": list(r.m), "n": list(r.n), "slabs": r.slabs, "devices": r.devices}
            for r in plan.regions
        ],
        "slabs": [r.slabs for r in plan.regions],
        "devices_used": plan.devices_used,
        "egress_bytes": plan.egress_bytes,
        "ingress_bytes": plan.ingress_bytes,
        "bottleneck": report.bottleneck.value,
        "peak_memory_bytes": report.memory_bytes,
    }


def _step_json(step: StepReport, gemms: tuple[StepGemm, ...]) -> dict[str, Any]:
    from cleave.planner.report import advice

    return {
        "gemms": [
            {"kind": g.kind.value, "name": g.name, "count": g.count} | _report_json(r)
            for g, r in zip(gemms, step.reports, strict=True)
        ],
        "makespan_s": step.makespan_s,
        "fill_s": step.fill_s,
        "predicted_s": step.predicted_s,
        "bound_s": step.bound_s,
        "overlap_bound_s": step.overlap_bound_s,
        "egress_bytes": step.egress_bytes,
        "ingress_bytes": step.ingress_bytes,
        "blocks": step.blocks,
        "peak_egress_bytes_per_s": step.peak_egress_bytes_per_s,
        "peak_ingress_bytes_per_s": step.peak_ingress_bytes_per_s,
        "bottleneck": step.bottleneck.value,
        "advice": advice(step),
    }


# --- for people ---


def _slabs(plan: Plan) -> str:
    slabs = [r.slabs for r in plan.regions]
    return str(slabs[0]) if len(set(slabs)) == 1 else f"{min(slabs)}-{max(slabs)}"


def _show_gemm(report: PlanReport, fleet: int) -> None:
    from rich.console import Console
    from rich.table import Table

    plan = report.plan
    table = Table(title=f"{plan.gemm.m} x {plan.gemm.n} x {plan.gemm.k}", show_header=False)
    table.add_row(
        "predicted",
        f"{report.predicted_s:.4g} s ({plan.makespan_s:.4g} s with ever thinner strips)",
    )
    table.add_row("bound", f"{plan.bound_s:.4g} s ({report.gap:.1%} below), one tile per device")
    table.add_row("no plan beats", f"{report.overlap_bound_s:.4g} s")
    table.add_row("limited by", report.bottleneck.value)
    table.add_row("devices", f"{plan.devices_used} of {fleet}, {len(plan.tiles)} tiles")
    table.add_row("slabs by region", ", ".join(str(r.slabs) for r in plan.regions))
    table.add_row(
        "PS sends, receives", f"{human_bytes(plan.egress_bytes)}, {human_bytes(plan.ingress_bytes)}"
    )
    table.add_row("device memory", f"{human_bytes(report.memory_bytes)} at most")
    Console().print(table)


def _show_step(step: StepReport, gemms: tuple[StepGemm, ...], title: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from cleave.planner.report import advice

    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    left = {"GEMM", "limited by"}
    for column in (
        *("GEMM", "M x N x K", "times", "tiles", "devices", "g", "time s", "bound s", "gap"),
        *("limited by", "down", "up", "memory"),
    ):
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    for g, r in zip(gemms, step.reports, strict=True):
        table.add_row(
            f"{g.name} {_KINDS[g.kind.value]}",
            f"{g.gemm.m} x {g.gemm.n} x {g.gemm.k}",
            str(g.count),
            str(len(r.plan.tiles)),
            str(r.plan.devices_used),
            _slabs(r.plan),
            f"{r.plan.makespan_s:.4g}",
            f"{r.plan.bound_s:.4g}",
            f"{r.gap:.1%}",
            r.bottleneck.value,
            human_bytes(r.download_bytes),
            human_bytes(r.upload_bytes),
            human_bytes(r.memory_bytes),
        )
    console = Console()
    console.width = max(console.width, console.measure(table).maximum)  # rather wrapped than cut
    console.print(table)
    console.print(
        "fwd: forward, dX: input gradient, dW: weight gradient; g: slabs in depth; down, up, "
        "memory: of the device with most.\n"
        f"One step: {step.predicted_s:.4g} s ({step.makespan_s:.4g} s with ever thinner strips); "
        f"bound {step.bound_s:.4g} s, no plan beats {step.overlap_bound_s:.4g} s.\n"
        f"The PS sends {human_bytes(step.egress_bytes)} and receives "
        f"{human_bytes(step.ingress_bytes)} in {step.blocks:,} blocks; its card needs "
        f"{step.peak_egress_bytes_per_s * 8e-9:.3g} Gbit/s out and "
        f"{step.peak_ingress_bytes_per_s * 8e-9:.3g} Gbit/s in.",
        soft_wrap=True,
        highlight=False,
    )
    console.print(advice(step).capitalize(), soft_wrap=True, highlight=False)


def _show_front(
    planner: TilePlanner,
    gemms: tuple[StepGemm, ...],
    element: ElementBytes,
    devices: list[DeviceRates],
    ps: PsRates,
    profiles: list[FleetDevice],
    objective: Any,
    *,
    as_json: bool,
) -> None:
    from rich.console import Console
    from rich.table import Table

    from cleave.planner.front import Draw, Objective, front

    draws = {}
    for number, profile in enumerate(profiles):
        if profile.active_power_w is None:
            raise UsageError(
                f"active_power_w of device {profile.name!r} is not known, so its energy is not "
                f"either; give it in a fleet file"
            )
        if objective is Objective.CARBON and profile.gco2e_per_kwh is None:
            raise UsageError(
                f"gco2e_per_kwh of device {profile.name!r} is not known, so its carbon is not "
                f"either; give it in a fleet file"
            )
        draws[number] = Draw(profile.active_power_w, profile.gco2e_per_kwh or 0.0)
    choices = front(planner, gemms, element, devices, ps, draws, objective)
    unit = "joules" if objective is Objective.ENERGY else "grams CO2e"
    if as_json:
        key = "energy_j" if objective is Objective.ENERGY else "carbon_gco2e"
        document = [
            {"makespan_s": c.step.makespan_s, key: c.cost, "devices": list(c.devices)}
            for c in choices
        ]
        typer.echo(json.dumps({"front": document}))
        return
    table = Table(title=f"one step: time against {objective.value}")
    for column in ("devices", "time s", unit):
        table.add_column(column, justify="right")
    for c in choices:
        table.add_row(str(len(c.devices)), f"{c.step.makespan_s:.4g}", f"{c.cost:.4g}")
    Console().print(table)


def _draw(path: Path | None, plan: Plan) -> None:
    if path is None:
        return
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError:
        raise not_installed("--plot", "matplotlib", "train") from None
    figure = Figure(figsize=(8, 8))
    axes = figure.add_subplot()
    depths = {t.tile.k for t in plan.tiles}
    most = max(k.size for k in depths)
    colours = colormaps["viridis"]
    # Slabs lie above one another: a tile is drawn where its rows and columns of C are, and the
    # slabs of a place share it from left to right in the order of k.
    for t in plan.tiles:
        m, n, k = t.tile.m, t.tile.n, t.tile.k
        left = n.start + n.size * k.start / plan.gemm.k
        width = n.size * k.size / plan.gemm.k
        axes.add_patch(
            Rectangle(
                (left, m.start), width, m.size, facecolor=colours(k.size / most),
                edgecolor="white", linewidth=0.3,
            )
        )  # fmt: skip
    axes.set(
        xlim=(0, plan.gemm.n),
        ylim=(plan.gemm.m, 0),
        xlabel="columns of C; the slabs of a tile side by side, in the order of k",
        ylabel="rows of C",
        title=f"{plan.gemm.m} x {plan.gemm.n} x {plan.gemm.k} on {plan.devices_used} devices: "
        f"{plan.makespan_s:.4g} s\ncolour: depth of the tile, up to {most}",
    )
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot write {path}: {reason}") from None
