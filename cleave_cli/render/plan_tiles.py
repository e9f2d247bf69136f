"""Output of plans by tiles, as tables and JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rich import box
from rich.console import JustifyMethod
from rich.table import Table

from cleave.planner.tiles.report import advice
from cleave_cli.options import human_bytes
from cleave_cli.render.narrow import narrow_console

if TYPE_CHECKING:
    from cleave.planner.plan import DeviceRates
    from cleave.planner.tiles.report import PlanReport, StepReport
    from cleave.workload.step import StepGemm

_KINDS: Final = {"forward": "fwd", "input-gradient": "dX", "weight-gradient": "dW"}


def gemm_json(report: PlanReport, devices: list[DeviceRates], *, tiles: bool) -> dict[str, Any]:
    """Return the plan of one GEMM as JSON.

    Args:
        report: the plan and its bounds.
        devices: rates of the devices.
        tiles: whether to list every tile and every device.
    """
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
        "most_download_bytes": report.download_bytes,
        "most_upload_bytes": report.upload_bytes,
    }


def step_json(step: StepReport, gemms: tuple[StepGemm, ...]) -> dict[str, Any]:
    """Return the plans of all GEMMs of a step as JSON, with the totals of the step."""
    return {
        "gemms": [
            {"kind": g.kind.value, "name": g.name, "count": g.count} | _report_json(r)
            for g, r in zip(gemms, step.reports, strict=True)
        ],
        "makespan_s": step.makespan_s,
        "fill_s": step.fill_s,
        "predicted_s": step.predicted_s,
        "apart_s": step.apart_s,
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


def show_gemm(report: PlanReport, fleet: int) -> None:
    """Print the plan of one GEMM as a table.

    Args:
        report: the plan and its bounds.
        fleet: number of devices in the fleet.
    """
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
    narrow_console().print(table)


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
    console = narrow_console()
    console.print("\nTiles, if every multiplication is sent out:", highlight=False)
    console.print(table)
    console.print(
        "fwd: forward, dX: input gradient, dW: weight gradient; gap: above the bound.\n"
        f"These multiplications: {step.predicted_s:.4g} s a step, both gradients of a Linear "
        f"together; {step.apart_s:.4g} s one after another ({step.makespan_s:.4g} s with ever "
        f"thinner strips; bound {step.bound_s:.4g} s, no plan beats {step.overlap_bound_s:.4g} s). "
        f"The PS sends {human_bytes(step.egress_bytes)} and receives "
        f"{human_bytes(step.ingress_bytes)} in {step.blocks:,} blocks; its card needs "
        f"{step.peak_egress_bytes_per_s * 8e-9:.3g} Gbit/s out and "
        f"{step.peak_ingress_bytes_per_s * 8e-9:.3g} Gbit/s in. {advice(step).capitalize()}",
        highlight=False,
    )
