"""The output of `cleave profile`: tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from cleave_cli.options import human_bytes

if TYPE_CHECKING:
    from profiles.device_profile import DeviceProfile, Quantiles


def human_flops_per_s(rate: float) -> str:
    """Format a throughput with a unit, such as "50 GFLOP/s"."""
    if rate < 1e12:
        return f"{rate / 1e9:.3g} GFLOP/s"
    return f"{rate / 1e12:.3g} TFLOP/s" if rate < 1e15 else f"{rate / 1e15:.3g} PFLOP/s"


def sustained_share(profile: DeviceProfile) -> float | None:
    """Return the sustained speed as a share of the full speed; None if not measured."""
    if profile.sustained is None:
        return None
    return profile.sustained.thermal.sustained_speed if profile.sustained.thermal else 1.0


def show_profile(console: Console, profile: DeviceProfile) -> None:
    """Print a profile as tables, without the measured samples."""
    table = Table(title=f"{profile.title} ({profile.name})", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("", "figure", "source"):
        table.add_column(column, overflow="fold")
    for row in _rows(profile):
        table.add_row(*row)
    console.print(table)
    show_fits(console, profile)
    for line in profile.provenance.assumed:
        console.print(f"assumed: {line}", highlight=False, markup=False)
    if profile.provenance.notes:
        console.print(f"note: {profile.provenance.notes}", highlight=False, markup=False)


def _rows(profile: DeviceProfile) -> Iterator[tuple[str, str, str]]:
    from profiles.device_profile import Origin

    origin = profile.provenance
    year = f", {profile.year}" if profile.year else ""
    yield "kind", f"{profile.kind.value}{year}", ""
    verb = "measured" if origin.origin is Origin.MEASURED else "published, looked up"
    yield "origin", f"{verb} {origin.date}", origin.source
    if profile.host is not None:
        host = profile.host
        yield "machine", f"{host.cpu}, cores: {host.cores}", host.system
        yield "multiplied with", f"{host.executor}, threads: {host.threads}", ""
    for dtype, entry in profile.compute.items():
        yield f"compute {dtype}", human_flops_per_s(entry.flops_per_s), entry.source
    if profile.graphs is not None:
        graphs = profile.graphs
        yield "layers as graphs", human_flops_per_s(graphs.flops_per_s), graphs.source
        if graphs.bf16_flops_per_s:
            yield "  in bf16", human_flops_per_s(graphs.bf16_flops_per_s), graphs.source
    memory = profile.memory
    installed = f" of {human_bytes(memory.installed_bytes)}" if memory.installed_bytes else ""
    yield "memory offered", human_bytes(memory.bytes) + installed, memory.source
    share = sustained_share(profile)
    if profile.sustained is not None and share is not None:
        text = f"{share:.0%} of full speed"
        if profile.sustained.thermal is None and profile.sustained.speeds:
            text = f"held its speed for {profile.sustained.speeds[-1][0]:.0f} s"
        yield "sustained", text, profile.sustained.source
    if profile.link is not None:
        yield from link_rows(profile.link)
    if (power := profile.power) is not None:
        figures = {"idle": power.idle_w, "computing": power.compute_w, "radio": power.radio_w}
        for name, watts in figures.items():
            if watts is not None:
                yield f"power {name}", f"{watts:.3g} W", power.source
    if profile.embodied is not None:
        years = profile.embodied.lifetime_years
        text = f"{profile.embodied.gco2e / 1e3:.3g} kgCO2e over {years:g} years"
        yield "embodied", text, profile.embodied.source
    if profile.availability is not None:
        yield "availability", "modelled", getattr(profile.availability, "source", "")


def link_rows(link: Any) -> Iterator[tuple[str, str, str]]:
    """Yield table rows (name, value, source) for a link. A value has percentiles 10, 50 and 90."""

    def spread(q: Quantiles, unit: float, name: str) -> str:
        low, middle, high = (f"{x / unit:.3g}" for x in (q.p10, q.p50, q.p90))
        return f"{middle} {name} (p10 {low}, p90 {high})"

    yield "downlink", spread(link.downlink_bytes_per_s, 1e6, "MB/s"), link.source
    yield "uplink", spread(link.uplink_bytes_per_s, 1e6, "MB/s"), link.source
    yield "round trip", spread(link.round_trip_s, 1e-3, "ms"), link.source


def show_fits(console: Console, profile: DeviceProfile) -> None:
    """Print the error of each performance model on held-out samples."""
    if not any(entry.fits for entry in profile.compute.values()):
        return
    title = "error of the model on held-out shapes"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("dtype", "layout", "fitted", "held out", "median", "95th percentile"):
        left = column in ("dtype", "layout")
        table.add_column(column, justify="left" if left else "right")
    for dtype, entry in profile.compute.items():
        for layout, report in entry.fits.items():
            counts = str(report.fitted), str(report.held_out)
            errors = f"{report.median_error:.1%}", f"{report.p95_error:.1%}"
            table.add_row(dtype, layout.value, *counts, *errors)
    console.print(table)


def show_list(console: Console, profiles: Sequence[DeviceProfile]) -> None:
    """Print a table with one row for each profile."""
    dtypes = ("fp32", "bf16", "fp16")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("name", "kind"):
        table.add_column(column, no_wrap=True)
    for column in (*(f"{dtype}, TFLOP/s" for dtype in dtypes), "memory", "sustained"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("origin", no_wrap=True)
    for profile in profiles:
        rates = [profile.compute[d].flops_per_s if d in profile.compute else None for d in dtypes]
        share = sustained_share(profile)
        table.add_row(
            profile.name,
            profile.kind.value,
            *("" if rate is None else f"{rate / 1e12:.3g}" for rate in rates),
            human_bytes(profile.memory.bytes),
            "" if share is None else f"{share:.0%}",
            profile.provenance.origin.value,
        )
    wide = console.options.update(width=1000)
    console.width = max(console.width, console.measure(table, options=wide).maximum)
    console.print(table)


def list_entry(profile: DeviceProfile) -> dict[str, Any]:
    """Return a summary of a profile as a JSON object, for a list of profiles."""
    return {
        "name": profile.name,
        "title": profile.title,
        "kind": profile.kind.value,
        "flops_per_s": {dtype: entry.flops_per_s for dtype, entry in profile.compute.items()},
        "memory_bytes": profile.memory.bytes,
        "sustained_share": sustained_share(profile),
        "origin": profile.provenance.origin.value,
        "source": profile.provenance.source,
    }
