"""The output of `cleave profile`: tables, bar charts and plots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from cleave.errors import UsageError, not_installed
from cleave.files import save_figure
from cleave_cli.options import human_bytes, writes

if TYPE_CHECKING:
    from profiles.device_profile import DeviceProfile, Quantiles

_BAR = 40
_DEPTHS = (16, 64, 256, 1024, 4096)
_TILE = 512  # rows and columns of the tile for throughput over depth


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


def tile_seconds(profile: DeviceProfile, dtype: str, c: int = _TILE) -> float:
    """Predict the time in seconds of a 512 x 512 tile of depth `c`, with no operand transposed."""
    from profiles.performance import Layout

    inputs, _, out = dtype.partition(">")
    model = profile.compute_model()
    return model.seconds(inputs, out or inputs, Layout.NN, _TILE, _TILE, c)


# --- tables ---


def show_profile(console: Console, profile: DeviceProfile) -> None:
    """Print a profile as tables and bar charts, without the measured samples."""
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
    if console.is_terminal:
        _show_bars(console, profile)


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
    if profile.contention:
        text = ", ".join(f"{slowdown:.2f}" for slowdown in profile.contention[:8])
        more = ", ..." if len(profile.contention) > 8 else ""
        yield "processes at once", f"{text}{more} times as long", ""
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


def _show_bars(console: Console, profile: DeviceProfile) -> None:
    for dtype, entry in profile.compute.items():
        if not entry.models:
            continue
        rates = [2 * _TILE**2 * c / tile_seconds(profile, dtype, c) for c in _DEPTHS]
        labels = [f"{_TILE} x {_TILE} x {c}" for c in _DEPTHS]
        values = [human_flops_per_s(rate) for rate in rates]
        _bars(console, f"{dtype}, by depth of the tile", labels, rates, values)
    if profile.sustained is not None and len(profile.sustained.speeds) > 1:
        speeds = profile.sustained.speeds[:: max(1, len(profile.sustained.speeds) // 8)]
        shares = [share for _, share in speeds]
        values = [f"{share:.0%}" for share in shares]
        _bars(console, "speed over time", [f"{at_s:.3g} s" for at_s, _ in speeds], shares, values)


def _bars(
    console: Console,
    title: str,
    labels: Sequence[str],
    lengths: Sequence[float],
    values: Sequence[str],
) -> None:
    table = Table(title=title, box=None, show_header=False, pad_edge=False)
    table.add_column(justify="right")
    longest = max(lengths)
    for label, length, value in zip(labels, lengths, values, strict=True):
        table.add_row(label, "█" * max(1, round(_BAR * length / longest)), value)
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


# --- comparison ---


def comparison(a: DeviceProfile, b: DeviceProfile) -> list[tuple[str, float, float]]:
    """Return (name, value in `a`, value in `b`) for each figure that both profiles contain."""
    rows: list[tuple[str, float | None, float | None]] = [
        ("flops_per_s", a.flops_per_s, b.flops_per_s)  # of the fastest dtype
    ]
    for dtype in (d for d in a.compute if d in b.compute):
        pair = a.compute[dtype].flops_per_s, b.compute[dtype].flops_per_s
        rows.append((f"{dtype}_flops_per_s", *pair))
        name = f"{dtype}_{_TILE}x{_TILE}x{_TILE}_s"
        rows.append((name, tile_seconds(a, dtype), tile_seconds(b, dtype)))
    if a.graphs is not None and b.graphs is not None:
        rows.append(("graph_flops_per_s", a.graphs.flops_per_s, b.graphs.flops_per_s))
    rows.append(("memory_bytes", a.memory.bytes, b.memory.bytes))
    rows.append(("sustained_share", sustained_share(a), sustained_share(b)))
    if a.link is not None and b.link is not None:
        for name in ("downlink_bytes_per_s", "uplink_bytes_per_s", "round_trip_s"):
            rows.append((name, getattr(a.link, name).p50, getattr(b.link, name).p50))
    if a.power is not None and b.power is not None:
        for name in ("idle_w", "compute_w", "radio_w"):
            rows.append((name, getattr(a.power, name), getattr(b.power, name)))
    if a.embodied is not None and b.embodied is not None:
        rows.append(("embodied_gco2e", a.embodied.gco2e, b.embodied.gco2e))
    return [(name, x, y) for name, x, y in rows if x is not None and y is not None]


def show_comparison(console: Console, a: DeviceProfile, b: DeviceProfile) -> None:
    """Print a table of the figures that both profiles contain."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for column in (a.name, b.name, f"{b.name} / {a.name}"):
        table.add_column(column, justify="right", overflow="fold")
    for name, x, y in comparison(a, b):
        table.add_row(name, f"{x:.4g}", f"{y:.4g}", f"{y / x:.3g}" if x else "")
    console.print(table)


# --- plots ---


def plot(path: Path, profile: DeviceProfile) -> None:
    """Plot predicted against measured time, throughput against depth, and speed against time."""
    check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.6), layout="constrained")
    predicted, throughput, sustained = figure.subplots(1, 3)
    _plot_predicted(predicted, profile)
    _plot_throughput(throughput, profile)
    _plot_sustained(sustained, profile)
    figure.suptitle(f"{profile.title} ({profile.name})")
    with writes(path):
        save_figure(figure, path, 120)


def check_plot(path: Path) -> None:
    """Raise UsageError if a plot cannot be written. Call this before a long measurement."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
        from matplotlib.figure import Figure  # noqa: F401
    except ImportError:
        raise not_installed("--plot", "matplotlib", "profile") from None
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise UsageError(f"{path} is no name for a plot; give one that ends in .png")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path} cannot be written: there is no folder {path.parent}")


def _plot_predicted(axes: Any, profile: DeviceProfile) -> None:
    from profiles.performance import TimedTile

    longest, shortest = 0.0, float("inf")
    for dtype, entry in profile.compute.items():
        tiles = [TimedTile(*s) for s in entry.samples if s[3] in entry.models]
        if not tiles:
            continue
        measured = [tile.seconds for tile in tiles]
        modelled = [entry.models[tile.layout].expected(tile) for tile in tiles]
        axes.plot(measured, modelled, ".", markersize=3, label=dtype)
        longest, shortest = max(longest, *measured), min(shortest, *measured)
    axes.set(title="model against measurement", xlabel="measured, s", ylabel="predicted, s")
    if longest:
        axes.plot([shortest, longest], [shortest, longest], color="grey", linewidth=0.8)
        axes.set(xscale="log", yscale="log")
        axes.legend()
    else:
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)


def _plot_throughput(axes: Any, profile: DeviceProfile) -> None:
    from matplotlib.ticker import EngFormatter

    depths = [2 ** (4 + i / 4) for i in range(33)]
    for dtype, entry in profile.compute.items():
        rates = [2 * _TILE**2 * round(c) / tile_seconds(profile, dtype, round(c)) for c in depths]
        (line,) = axes.plot(depths, rates, label=dtype)
        # Measured tiles with half to twice the rows and columns, in any layout.
        near = [
            (c, 2 * a * b * c / seconds)
            for a, b, c, _, seconds, _ in entry.samples
            if _TILE / 2 <= a <= 2 * _TILE and _TILE / 2 <= b <= 2 * _TILE
        ]
        axes.plot([c for c, _ in near], [r for _, r in near], ".", color=line.get_color(), ms=4)
    axes.set(
        title=f"{_TILE} x {_TILE} tiles (dots: half to twice as wide)",
        xlabel="depth", ylabel="throughput", xscale="log", ylim=(0, None),
    )  # fmt: skip
    axes.yaxis.set_major_formatter(EngFormatter(unit="FLOP/s"))  # such as 50 GFLOP/s
    axes.legend()


def _plot_sustained(axes: Any, profile: DeviceProfile) -> None:
    from profiles.thermal import ThermalState

    axes.set(title="speed under load", xlabel="s", ylabel="share of full speed", ylim=(0, 1.15))
    run = profile.sustained
    if run is None:
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)
        return
    if run.speeds:
        axes.plot(*zip(*run.speeds, strict=True), ".", label="measured")
    if run.thermal is not None:
        tau_s = run.thermal.time_constant_s
        last_s = run.speeds[-1][0] if run.speeds else 5 * tau_s
        state, times, shares = ThermalState(run.thermal, run.thermal.ambient), [0.0], [1.0]
        while times[-1] < last_s:
            times.append(times[-1] + state.busy(times[-1], last_s / 200))
            shares.append(run.thermal.speed(state.temperature))
        axes.plot(times, shares, label="model")
    elif run.speeds:
        axes.axhline(1.0, color="grey", linewidth=0.8, label="model: never slows down")
    if run.temperatures:
        hot = axes.twinx()
        hot.plot(*zip(*run.temperatures, strict=True), color="tab:red", linewidth=0.8)
        hot.set_ylabel("degrees Celsius")
    if run.speeds or run.thermal is not None:
        axes.legend(loc="lower left")
