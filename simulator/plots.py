"""Figures of simulated results, drawn with matplotlib."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from cleave.files import save_figure
from simulator.method import Outcome
from simulator.sweep import Row

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
