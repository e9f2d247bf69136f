"""Plots of plans: the tiles of a GEMM, device utilization by stages, and crossings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cleave.errors import not_installed
from cleave.files import save_figure
from cleave.planner.stages.prediction import in_seconds
from cleave_cli.options import counted, writes
from cleave_cli.render.plan import crossing_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise not_installed("--plot", "matplotlib", "train") from None
    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Figure, path: Path) -> None:
    with writes(path):
        save_figure(figure, path, 150)


def draw_tiling(path: Path, plan: Plan) -> None:
    """Plot the rows and columns of the result C that each tile of a GEMM's plan covers."""
    figure = _figure(8, 8)
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

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
    figure = _figure(10, 1.6 + 0.42 * len(rows))
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
    text = f"{one} {first}" if first == last else f"{many} {first}-{last}"
    return f"{text}, loss" if stage.loss else text


def draw_crossing(path: Path, found: Crossing, sequence: int, title: str) -> None:
    """Plot the step time by stages and without devices against the tokens per step."""
    figure = _figure(8, 5)
    from matplotlib.ticker import LogLocator, StrMethodFormatter

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
