"""Tornado plots, which show how much each assumption changes a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cleave.energy.sensitivity import Bar
from cleave.errors import UsageError, not_installed
from cleave.files import save_figure


def draw_tornado(
    path: Path,
    bars: Sequence[Bar],
    middle: float,
    title: str,
    unit: str,
    *,
    ratio: bool,
    claimed: tuple[float, float] | None = None,
) -> None:
    """Draw a tornado plot into an image file.

    Args:
        path: the image file. The suffix, such as .png, sets the format.
        bars: the bars from top to bottom, normally widest first.
        middle: the figure in the base case.
        title: title of the plot.
        unit: unit of the figure, shown as the label of the axis.
        ratio: whether the figure is a ratio. For a ratio, the axis is logarithmic and a line marks
            the value 1.
        claimed: lowest and highest value of a range to shade; None to shade nothing.

    Raises:
        UsageError: when matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise not_installed("--plot", "matplotlib", "train") from None
    figure = Figure(figsize=(9, 1.6 + 0.5 * len(bars)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for row, bar in enumerate(reversed(bars)):
        # If both ends are on the same side of `middle`, shift the labels apart vertically.
        apart = 5 if (bar.low >= middle) == (bar.high >= middle) else 0
        for end, setting, colour, up in (
            (bar.low, bar.low_setting, "tab:blue", apart),
            (bar.high, bar.high_setting, "tab:orange", -apart),
        ):
            axes.barh(row, end - middle, left=middle, color=colour, height=0.6)
            right = end >= middle
            axes.annotate(
                setting,
                (end, row),
                xytext=(4 if right else -4, up),
                textcoords="offset points",
                ha="left" if right else "right",
                va="center",
                fontsize=8,
            )
    axes.set_yticks(range(len(bars)), [bar.name for bar in reversed(bars)])
    axes.axvline(middle, color="black", linewidth=1)
    if claimed is not None:
        axes.axvspan(*claimed, color="tab:green", alpha=0.15)
    if ratio:
        axes.set_xscale("log")
        axes.axvline(1, color="grey", linewidth=1, linestyle="--")
    axes.set(title=title, xlabel=unit)
    ends = [middle, *(claimed or ()), *(bar.low for bar in bars), *(bar.high for bar in bars)]
    if ratio:  # leave space for the labels
        axes.set_xlim(min(ends) / 10, max(1.0, max(ends)) * 10)
    else:
        room = 0.15 * (max(ends) - min(ends))
        axes.set_xlim(min(ends) - room, max(ends) + room)
    axes.spines[["top", "right", "left"]].set_visible(False)
    try:
        save_figure(figure, path, 150)
    except (OSError, ValueError) as error:
        raise UsageError(f"{str(path)!r} cannot be drawn: {error}; give a .png") from error
