"""Plots of seconds per step: of every row, and of each way's fastest row for the README."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.side_by_side.method import Way
from benchmarks.side_by_side.row import Row
from benchmarks.side_by_side.setting import Fault
from benchmarks.side_by_side.tables import settings_of, title
from benchmarks.side_by_side.verdicts import calm, fastest, full_work, lora_work

_OURS: Final = "#2a6fdb"
_OTHERS: Final = "#9aa0a6"
_NAMES: Final = {
    Way.PLAIN: "one machine, no link",
    Way.DDP: "DDP",
    Way.FSDP: "FSDP2",
    Way.PIPELINE: "pipeline of torch",
    Way.HIVEMIND: "hivemind",
    Way.TILES: "Cleave by tiles",
    Way.STAGES: "Cleave by stages",
    Way.RESIDENT: "Cleave, state on devices",
}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw seconds per step, with a panel for each setting without a fault."""
    shown = [
        (setting, [row for row in rows if row.setting == setting and row.measured])
        for setting in settings_of(rows)
        if setting.fault is Fault.NONE
    ]
    _save(
        [
            (title(setting), [(row.method.name, row) for row in mine])
            for setting, mine in shown
            if len(mine) > 1
        ],
        path,
    )


def summarize(rows: Sequence[Row], path: Path) -> None:
    """Draw each way's fastest fp32 row with plain PyTorch's losses, in the settings with goals."""
    panels = []
    for wanted in (full_work, lora_work):
        for setting in (one for one in settings_of(rows) if wanted(one)):
            here = calm(rows, setting)
            found = [(name, fastest(here, [way], "fp32")) for way, name in _NAMES.items()]
            bars = [(name, row) for name, row in found if row is not None]
            if len(bars) > 1:
                panels.append((title(setting), bars))
    _save(panels, path)


def _save(panels: Sequence[tuple[str, Sequence[tuple[str, Row]]]], path: Path) -> None:
    """Save a bar chart with one titled panel per group of named rows."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    if not panels:
        return
    heights = [len(bars) + 2 for _, bars in panels]
    figure = Figure(figsize=(8, 0.24 * sum(heights)), layout="constrained", facecolor="white")
    axes = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
    for panel, (text, bars) in zip(axes, panels, strict=True):
        _bars(panel, sorted(bars, key=lambda bar: -bar[1].step_s))
        panel.set_title(text, fontsize=8, loc="left")
    axes[-1].set_xlabel("seconds a step", fontsize=8)
    # Keep text as text in the SVG, and make the file reproducible.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "side-by-side"}):
        figure.savefig(path, metadata={"Date": None})


def _bars(panel: Any, bars: Sequence[tuple[str, Row]]) -> None:
    colors = [_OURS if row.method.way.of_cleave else _OTHERS for _, row in bars]
    drawn = panel.barh(range(len(bars)), [row.step_s for _, row in bars], color=colors)
    panel.set_yticks(range(len(bars)), [name for name, _ in bars])
    panel.bar_label(drawn, fmt="%.1f", padding=2, fontsize=7)
    panel.margins(x=0.12)
    panel.tick_params(labelsize=7)
