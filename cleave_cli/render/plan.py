"""Output of `cleave plan`: forecasts, plans, crossings, and comparisons of server counts.

A crossing is the smallest batch size at which a step by stages beats a step without devices.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import typer
from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table

from cleave.planner.coding import coded_ratio
from cleave.planner.plan import Method
from cleave.planner.servers import ServersPlan, why
from cleave.planner.stages.prediction import in_seconds
from cleave.planner.tiles.report import advice
from cleave_cli.options import counted, human_bytes
from cleave_cli.render.text import WIDTH, echo_filled

if TYPE_CHECKING:
    from cleave.planner.coding import CodingPolicy
    from cleave.planner.forecast import Crossing, CrossingPoint, Forecast, MethodChoice
    from cleave.planner.plan import DeviceRates, StepGemm
    from cleave.planner.stages.model import StageModel, StagePlan
    from cleave.planner.tiles.report import PlanReport, StepReport


_RATES: Final = (
    "downlink_bytes_per_s", "uplink_bytes_per_s", "flops_per_s", "latency_s", "memory_bytes",
)  # fmt: skip
_STEP: Final = (
    "makespan_s", "fill_s", "predicted_s", "apart_s", "bound_s", "overlap_bound_s", "egress_bytes",
    "ingress_bytes", "blocks", "peak_egress_bytes_per_s", "peak_ingress_bytes_per_s",
)  # fmt: skip


def show_methods(title: str, found: MethodChoice) -> None:
    """Print the forecast of each method as a table, and the chosen method."""
    echo_filled(title)
    typer.echo(f"\n{'':<8}{'a step':>9}{'down':>11}{'up':>11}{'device':>11}{'server':>11}")
    for each in found.forecasts:
        typer.echo("\n".join(_lines(each)))
    echo_filled(
        "A step includes forward and backward pass, loss and optimizer. down, up: bytes that the "
        "server sends and receives; device, server: memory of the device that needs most, and of "
        "the server."
    )
    echo_filled(found.why, before="\n")


def show_faster_dtype(found: MethodChoice, dtype: str, alone_s: Mapping[str, float]) -> None:
    """Print a hint if the server alone in another dtype is faster than the choice in `dtype`.

    `alone_s` maps dtypes to step times of the server alone, in seconds.
    """
    for other, seconds in alone_s.items():
        if other != dtype and seconds < found.considered.step_s:
            echo_filled(
                f"In {other}, this machine alone takes {in_seconds(seconds)} for a step; pass "
                f"--dtype {other} to `cleave plan` and `cleave train`.",
                before="\n",
            )


def show_own_device(step_s: float) -> None:
    """Print the predicted step time if the server's computer is also a device."""
    echo_filled(
        f"With `cleave serve`, the server's computer is also a device: a step then takes "
        f"{in_seconds(step_s)}.",
        before="\n",
    )


def _lines(each: Forecast) -> Iterator[str]:
    if each.refused:
        yield f"{each.method.value:<8}{'-':>9}"
        yield from _indented(f"refused: {each.refused}")
        return
    remote = each.method is not Method.LOCAL
    numbers = [
        human_bytes(nbytes) if remote else "-"
        for nbytes in (each.downlink_bytes, each.uplink_bytes, each.device_bytes)
    ]
    numbers.append(human_bytes(each.server_bytes))
    yield f"{each.method.value:<8}{in_seconds(each.step_s):>9}" + "".join(
        f"{n:>11}" for n in numbers
    )
    yield from _indented(each.bottleneck)


def _indented(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  ")


def show_stages(model: StageModel, plan: StagePlan, names: Sequence[str]) -> None:
    """Print the layers and devices of each stage. `names` is indexed by device number."""
    said = (
        f"Stages: {len(model.tokens)} micro-batches of up to {max(model.tokens):,} tokens; each "
        f"device keeps the inputs of its layers for as many micro-batches as fit into its memory; "
        f"the loss is computed {plan.where_loss}."
    )
    if model.in_parts:
        said += " Each layer is divided into two parts, attention and MLP."
    echo_filled(said, before="\n")
    typer.echo(f"\n{'stage':>5}{'parts' if model.in_parts else 'layers':>10}{'devices':>9}  which")
    for number, stage in enumerate(plan.planned, 1):
        part = stage.slice
        first, last = stage.first + 1, stage.stop
        if part is not None:
            layers = f"loss {part.number + 1}"
        elif first > last:
            layers = "loss"
        else:
            layers = f"{first}-{last}" if first < last else f"{first}"
        which = ", ".join(names[device] for device in stage.devices)
        which = textwrap.shorten(which, WIDTH - 26, placeholder=" ...")
        typer.echo(f"{number:>5}{layers:>10}{len(stage.devices):>9}  {which}")


def methods_json(found: MethodChoice) -> dict[str, Any]:
    """Return the forecasts of all methods, and the chosen method, as a JSON object."""
    return {
        "methods": [
            {
                "method": each.method.value,
                "step_s": None if each.refused else each.step_s,
                "downlink_bytes": each.downlink_bytes,
                "uplink_bytes": each.uplink_bytes,
                "bound_by": each.bottleneck,
                "device_memory_bytes": each.device_bytes,
                "server_memory_bytes": each.server_bytes,
                "refused": each.refused,
            }
            for each in found.forecasts
        ],
        "chosen": found.chosen.method.value,
        "why": found.why,
    }


def stages_json(model: StageModel, plan: StagePlan, names: Sequence[str]) -> dict[str, Any]:
    """Return a plan of stages as a JSON object. `names` is indexed by device number."""
    return {
        "micro_batches": list(model.tokens),
        "kept_batches": {names[device]: asdict(kept) for device, kept in plan.kept_batches.items()},
        "step_s": plan.step_s,
        "bound_by": plan.reason,
        "in_parts": model.in_parts,
        "stages": [
            {
                "first_layer": stage.first,
                "stop_layer": stage.stop,
                "loss": stage.loss,
                "slice": None if stage.slice is None else asdict(stage.slice),
                "devices": [
                    {"id": d, "name": names[d], "memory_bytes": plan.memory_bytes[d]}
                    for d in stage.devices
                ],
            }
            for stage in plan.planned
        ],
    }


def show_crossing(found: Crossing, sequence: int) -> None:
    """Print a crossing and the step times by batch size, for sequences of `sequence` tokens."""
    typer.echo(f"\n{'sequences':>9}{'tokens':>10}{'stages s':>10}{'alone s':>10}")
    for point in found.points:
        stages = "-" if point.stages_s == float("inf") else f"{point.stages_s:.4g}"
        tokens = f"{point.rows * sequence:,}"
        typer.echo(f"{point.rows:>9}{tokens:>10}{stages:>10}{point.local_s:>10.4g}")
    echo_filled(crossing_text(found, sequence))


def crossing_text(found: Crossing, sequence: int) -> str:
    """Return a sentence that states from which batch size stages beat the server alone."""

    def tokens(point: CrossingPoint) -> str:
        return f"{point.rows * sequence:,}"

    if found.above is None:
        most = found.points[-1]
        return f"Up to {tokens(most)} tokens per step, the server alone is faster than stages."
    if found.below is None:
        return f"From {tokens(found.above)} tokens per step, stages are faster than the server."
    return (
        f"From about {tokens(found.above)} tokens per step, stages are faster than the server "
        f"alone; with {tokens(found.below)}, the server alone is faster."
    )


def crossing_json(found: Crossing, sequence: int) -> dict[str, Any]:
    """Return a crossing as a JSON object, with the step times at each batch size tried."""
    above, below = found.above, found.below
    return {
        "from_tokens": above.rows * sequence if above is not None else None,
        "not_with_tokens": below.rows * sequence if below is not None else None,
        "points": [
            {
                "sequences": point.rows,
                "tokens": point.rows * sequence,
                "stages_s": point.stages_s if point.stages_s < float("inf") else None,
                "local_s": point.local_s,
            }
            for point in found.points
        ],
    }


_KINDS: Final = {"forward": "fwd", "input-gradient": "dX", "weight-gradient": "dW"}


def gemm_json(report: PlanReport, devices: list[DeviceRates], *, tiles: bool) -> dict[str, Any]:
    """Return the plan of one GEMM as a JSON object; with `tiles`, include all tiles and devices."""
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
            {"id": d.device} | {name: getattr(d, name) for name in _RATES} for d in devices
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
        "most_download_bytes": report.download_bytes,
        "most_upload_bytes": report.upload_bytes,
    }


def step_json(step: StepReport, gemms: tuple[StepGemm, ...]) -> dict[str, Any]:
    """Return the plans of all GEMMs of a step, and the totals of the step, as a JSON object."""
    return {
        "gemms": [
            {"kind": g.kind.value, "name": g.name, "count": g.count} | _report_json(r)
            for g, r in zip(gemms, step.reports, strict=True)
        ],
        **{name: getattr(step, name) for name in _STEP},
        "bottleneck": step.bottleneck.value,
        "advice": advice(step),
    }


def show_gemm(report: PlanReport, fleet: int) -> None:
    """Print the plan of one GEMM as a table. `fleet` is the number of devices in the fleet."""
    plan = report.plan
    table = Table(title=f"{plan.gemm.m} x {plan.gemm.n} x {plan.gemm.k}", show_header=False)
    table.add_row(
        "predicted",
        f"{report.predicted_s:.4g} s ({plan.makespan_s:.4g} s with infinitely many strips)",
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
    Console(width=WIDTH).print(table)


def show_step(step: StepReport, gemms: tuple[StepGemm, ...]) -> None:
    """Print the plans of all GEMMs of a step, and the totals of the step."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in ("GEMM", "M x N x K", "times", "devices", "time s", "gap", "limited by"):
        justify: JustifyMethod = "left" if column in {"GEMM", "limited by"} else "right"
        table.add_column(column, justify=justify, no_wrap=True)
    for g, r in zip(gemms, step.reports, strict=True):
        table.add_row(
            f"{g.name} {_KINDS[g.kind.value]}",
            f"{g.gemm.m}x{g.gemm.n}x{g.gemm.k}",
            str(g.count),
            str(r.plan.devices_used),
            f"{r.predicted_s:.3g}",
            f"{r.gap:.1%}",
            r.bottleneck.value,
        )
    console = Console(width=WIDTH)
    console.print("\nTiles, if devices compute every multiplication:", highlight=False)
    console.print(table)
    console.print(
        "fwd: forward, dX: input gradient, dW: weight gradient; gap: above the bound.\n"
        f"All multiplications: {step.predicted_s:.4g} s per step with both gradients of a Linear "
        f"together; {step.apart_s:.4g} s one after another ({step.makespan_s:.4g} s with "
        f"infinitely many strips; bound {step.bound_s:.4g} s, no plan beats "
        f"{step.overlap_bound_s:.4g} s). "
        f"The PS sends {human_bytes(step.egress_bytes)} and receives "
        f"{human_bytes(step.ingress_bytes)} in {step.blocks:,} blocks; its card needs "
        f"{step.peak_egress_bytes_per_s * 8e-9:.3g} Gbit/s out and "
        f"{step.peak_ingress_bytes_per_s * 8e-9:.3g} Gbit/s in. {advice(step).capitalize()}",
        highlight=False,
    )


def servers_json(plans: Sequence[ServersPlan]) -> list[dict[str, Any]]:
    """Return the forecasts for several numbers of servers as JSON objects, one per number."""
    return [
        {
            "servers": plan.servers,
            "devices_each": plan.devices,
            "rows_each": plan.rows,
            "method": plan.slowest.method.value,
            "refused": plan.refused,
            "step_s": None if plan.refused else plan.step_s,
            "exchange_s": plan.exchange_s,
            "exchanged_bytes_each_way": plan.exchanged_bytes,
            "downlink_bytes_each": plan.slowest.downlink_bytes,
            "uplink_bytes_each": plan.slowest.uplink_bytes,
            "server_memory_bytes": plan.server_bytes,
            "bound_by": plan.slowest.bottleneck,
        }
        for plan in plans
    ]


def show_servers(title: str, plans: Sequence[ServersPlan]) -> None:
    """Print one row per number of servers, and a sentence on whether more servers are faster."""
    echo_filled(title)
    typer.echo(
        f"\n{'servers':>7}{'devices':>9}{'rows':>6}  {'method':<7}{'a step':>8}{'exchange':>10}"
        f"{'sent':>9}{'down':>9}{'up':>9}"
    )
    for plan in plans:
        fleet = plan.slowest
        if plan.refused:
            typer.echo(f"{plan.servers:>7}{plan.devices:>9}{plan.rows:>6}  {'refused':<7}")
            typer.echo(textwrap.indent(textwrap.fill(plan.refused, WIDTH - 2), "  "))
            continue
        typer.echo(
            f"{plan.servers:>7}{plan.devices:>9}{plan.rows:>6}  {fleet.method.value:<7}"
            f"{in_seconds(plan.step_s):>8}{in_seconds(plan.exchange_s):>10}"
            f"{human_bytes(plan.exchanged_bytes):>9}{human_bytes(fleet.downlink_bytes):>9}"
            f"{human_bytes(fleet.uplink_bytes):>9}"
        )
    echo_filled(
        "devices, rows: of each server. exchange, sent: time of the exchange between servers, and "
        "bytes that each sends. down, up: bytes to and from a server's devices."
    )
    echo_filled(why(plans), before="\n")


def coding_text(devices: Sequence[DeviceRates], dtypes: Sequence[str]) -> str:
    """Return a clause about compression, starting with ";"; empty if no link is compressed."""
    down, up = _links(devices)
    if not down + up:
        return ""
    ratios = " and ".join(
        f"{dtype} takes {coded_ratio(dtype):.3g} of the bytes" for dtype in dtypes
    )
    links = f"{counted(down, 'downlink')} and {counted(up, 'uplink')}"
    return f"; {links} are compressed: {ratios}"


def coding_json(
    policy: CodingPolicy, devices: Sequence[DeviceRates], dtypes: Sequence[str]
) -> dict[str, Any]:
    """Return the compression policy, compressed links and ratio per dtype as a JSON object."""
    down, up = _links(devices)
    return {
        "policy": policy.value,
        "downlinks": down,
        "uplinks": up,
        "ratios": {dtype: coded_ratio(dtype) for dtype in dtypes},
    }


def _links(devices: Sequence[DeviceRates]) -> tuple[int, int]:
    down = sum(device.codes_downlink for device in devices)
    return down, sum(device.codes_uplink for device in devices)
