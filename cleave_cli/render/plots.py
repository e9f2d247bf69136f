"""Figures of plans and of simulated results, drawn with matplotlib."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from cleave.files import save_figure
from cleave.planner.stages.prediction import in_seconds
from cleave_cli.options import counted, writes
from cleave_cli.render.plan import crossing_text
from simulator.method import Outcome
from simulator.sweep import Row

if TYPE_CHECKING:
    from cleave.planner.forecast import Crossing
    from cleave.planner.plan import Plan
    from cleave.planner.stages.model import PlannedStage, StageModel, StagePlan
    from cleave.planner.stages.simulated import SimulatedDevice


_MOST_ROWS: Final = 40  # with more devices, each row shows the mean of a stage's devices

_PARTS: Final[tuple[tuple[str, str, str, Callable[[SimulatedDevice], float]], ...]] = (
    ("downlink", "weights", "#1f5a99", lambda d: d.weights_s),
    ("downlink", "activations in", "#7fb0dd", lambda d: d.x_s),
    ("processor", "computation", "#5a5a5a", lambda d: d.computes_s),
    ("uplink", "gradients", "#b3541e", lambda d: d.gradients_s),
    ("uplink", "activations out", "#edb183", lambda d: d.y_s),
)
"""Parts of a step: resource, name, color, and a function that returns the time on a device."""

_BARS: Final = ("downlink", "processor", "uplink")


def _save(figure: Figure, path: Path) -> None:
    with writes(path):
        save_figure(figure, path, 150)


def draw_tiling(path: Path, plan: Plan) -> None:
    """Plot the rows and columns of the result C that each tile of a GEMM's plan covers."""
    figure = Figure(figsize=(8, 8), layout="constrained")
    axes = figure.add_subplot()
    depths = {t.tile.k for t in plan.tiles}
    most = max(k.size for k in depths)
    colours = colormaps["viridis"]
    # Slabs (tiles with the same rows and columns of C) would hide each other, so draw them side by
    # side within their columns, in the order of k.
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
    _save(figure, path)


def draw_stages(
    path: Path,
    model: StageModel,
    plan: StagePlan,
    devices: Mapping[int, SimulatedDevice],
    names: Sequence[str],
    title: str,
) -> None:
    """Plot how long each device's links and processor are busy in a step by stages."""
    rows = _rows(model, plan, names)
    figure = Figure(figsize=(10, 1.6 + 0.42 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    height = 0.8 / len(_BARS)
    for row, (_, members) in enumerate(rows):
        ends = dict.fromkeys(_BARS, 0.0)
        for bar, what, colour, seconds in _PARTS:
            mean_s = math.fsum(seconds(devices[d]) for d in members) / len(members)
            place = row + (_BARS.index(bar) - 1) * height
            axes.barh(
                place, mean_s, height, ends[bar], color=colour,
                label=f"{bar}: {what}" if row == 0 else None,
            )  # fmt: skip
            ends[bar] += mean_s
    axes.axvline(plan.step_s, color="black", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set(
        ylim=(len(rows) - 0.5, -0.5),
        xlim=(0, 1.02 * plan.step_s),
        xlabel=f"seconds busy in a step; dashed: the step, {in_seconds(plan.step_s)}",
    )
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.suptitle(f"{title}\n{plan.reason}", fontsize=9)
    _save(figure, path)


def _rows(
    model: StageModel, plan: StagePlan, names: Sequence[str]
) -> list[tuple[str, tuple[int, ...]]]:
    """Return the label and the devices of each row. A row is one device or one stage."""
    places = [(stage, device) for stage in plan.planned for device in stage.devices]
    if len(places) <= _MOST_ROWS:
        return [(f"{_held(model, stage)}: {names[d]}", (d,)) for stage, d in places]
    return [
        (f"{_held(model, stage)}: mean of {counted(len(stage.devices), 'device')}", stage.devices)
        for stage in plan.planned
    ]


def _held(model: StageModel, stage: PlannedStage) -> str:
    if stage.slice is not None:
        return f"loss {stage.slice.number + 1} of {stage.slice.of}"
    one, many = ("part", "parts") if model.in_parts else ("layer", "layers")
    first, last = stage.first + 1, stage.stop
    if first > last:
        return "loss"
    text = f"{one} {first}" if first == last else f"{many} {first}-{last}"
    return f"{text}, loss" if stage.loss else text


def draw_crossing(path: Path, found: Crossing, sequence: int, title: str) -> None:
    """Plot the step time by stages and without devices against the tokens per step."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    tokens = [point.rows * sequence for point in found.points]
    lines: tuple[tuple[str, str, list[float]], ...] = (
        ("stages", "#b3541e", [point.stages_s for point in found.points]),
        ("the server alone", "#5a5a5a", [point.local_s for point in found.points]),
    )
    for name, colour, seconds in lines:
        known: list[Any] = [s if math.isfinite(s) else None for s in seconds]
        axes.plot(tokens, known, marker="o", markersize=4, color=colour, label=name)
    axes.set(xscale="log", yscale="log", xlabel="tokens a step", ylabel="seconds a step")
    axes.set_xticks(tokens, [f"{each:,}" for each in tokens], rotation=45, ha="right", fontsize=7)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.minorticks_off()
    axes.grid(which="major", linewidth=0.3)
    axes.legend(frameon=False)
    figure.suptitle(f"{title}\n{crossing_text(found, sequence)}", fontsize=9)
    _save(figure, path)


_PANELS: tuple[tuple[str, Callable[[Outcome], float]], ...] = (
    ("seconds for one step", lambda o: o.step_s),
    ("GB down, per device and step", lambda o: o.download_bytes * 1e-9),
    ("GB up, per device and step", lambda o: o.upload_bytes * 1e-9),
    ("PS out, Gbit/s, busiest part", lambda o: o.ps_egress_bytes_per_s * 8e-9),
    ("PS in, Gbit/s, busiest part", lambda o: o.ps_ingress_bytes_per_s * 8e-9),
    ("seconds that losing one device adds", lambda o: o.recovery_s or 0.0),
)
# Line styles by prefix of the method name. The lines of other methods are dash-dotted.
_DASHES = {"cleave": "-", "dtfm": "--", "cloud": ":"}


def save_sweep(path: Path, rows: Sequence[Row], title: str) -> None:
    """Plot step time, bytes, PS bandwidth and recovery time against the number of devices.

    Each method has a curve, whose slope is in the legend. A hollow point marks a method that does
    not fit in memory. A cloud method is a horizontal line, left out if the model does not fit.

    Raises:
        OSError, ValueError: if the file cannot be written.
    """
    curves: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.devices or row.outcome.fits:
            curves[row.outcome.method].append(row)
    counts = sorted({row.devices for row in rows if row.devices is not None})
    figure = Figure(figsize=(22, 9), layout="constrained")
    for axes, (label, value) in zip(figure.subplots(2, 3).flat, _PANELS, strict=True):
        for number, (method, points) in enumerate(curves.items()):
            _curve(axes, method, points, value, colormaps["tab10"](number % 10))
        axes.set(xscale="log", yscale="log", xlabel="devices", ylabel=label)
        if counts:
            axes.set_xticks(counts, [str(count) for count in counts], rotation=45)
            axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(which="major", linewidth=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=6, loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle(f"{title}\nhollow: does not fit the devices' memory", fontsize=10)
    save_figure(figure, path, 200)


def _curve(
    axes: Any, method: str, rows: Sequence[Row], value: Callable[[Outcome], float], colour: Any
) -> None:
    if rows[0].devices is None:
        level = value(rows[0].outcome)
        if level > 0 and math.isfinite(level):
            axes.axhline(level, color=colour, linewidth=1, linestyle=_dash(method), label=method)
        return
    points = [(r.devices or 0, value(r.outcome), r.outcome.fits) for r in rows]
    points = [p for p in points if p[1] > 0 and math.isfinite(p[1])]
    if not points:
        return
    x, y, fits = (np.array(column) for column in zip(*points, strict=True))
    label = method
    if len(x) > 1:
        label += f" (slope {np.polyfit(np.log(x), np.log(y), 1)[0]:.2f})"
    axes.plot(x, y, color=colour, linewidth=1, linestyle=_dash(method), label=label)
    axes.scatter(x[fits], y[fits], color=colour, s=16, zorder=3)
    axes.scatter(x[~fits], y[~fits], facecolors="none", edgecolors=colour, s=16, zorder=3)


def _dash(method: str) -> str:
    return next((dash for name, dash in _DASHES.items() if method.startswith(name)), "-.")
