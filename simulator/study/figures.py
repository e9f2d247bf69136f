"""Figures of the study's report, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from cleave.energy.sensitivity import draw_tornado
from cleave.files import save_figure
from simulator.study.conditions import CARBON_CLAIM, ENERGY_CLAIM, Found
from simulator.study.dependence import UTILISATIONS
from simulator.study.sections import quantity
from simulator.study.study import Judged, SetupStudy, StudyJudgement

_DPI = 110
_BAND = {"color": "tab:green", "alpha": 0.15}


def save_all(folder: Path, found: Sequence[SetupStudy]) -> None:
    """Draw all figures of the report and save them in an existing folder.

    Raises:
        OSError, UsageError: if a figure cannot be written.
    """
    save_energy(folder / "energy.png", found)
    save_ratios(folder / "ratios.png", found)
    save_speeds(folder / "speed.png", found)
    save_in_use(folder / "in-use.png", found)
    for name, study, at in tornado_files(found):
        dependence = study.dependences[at]
        claim = ENERGY_CLAIM if dependence.of == "energy" else CARBON_CLAIM
        what = "joules" if dependence.of == "energy" else "gCO2e, making shared out,"
        draw_tornado(
            folder / name,
            dependence.bars,
            dependence.middle,
            f"{study.setup.name}: {dependence.row.name}",
            f"{what} of the GPU over the devices' (green: as claimed)",
            ratio=True,
            claimed=claim,
        )


def tornado_files(found: Sequence[SetupStudy]) -> Iterator[tuple[str, SetupStudy, int]]:
    """Yield the file name, set-up and index in `SetupStudy.dependences` of each tornado plot."""
    for study in found:
        for at, dependence in enumerate(study.dependences):
            slug = study.setup.name.replace(" ", "-")
            yield f"depends-{slug}-{dependence.of}.png", study, at


def save_energy(path: Path, found: Sequence[SetupStudy]) -> None:
    """Plot the energy (Wh) of the GPU and of each row that fits in memory, as stacked bars."""
    figure = Figure(figsize=(11, 2 + 0.35 * sum(len(_fitting(s)) + 2 for s in found)))
    figure.set_layout_engine("constrained")
    heights = [len(_fitting(study)) + 2 for study in found]
    panels = figure.subplots(len(found), 1, gridspec_kw={"height_ratios": heights}, squeeze=False)
    for axes, study in zip(panels[:, 0], found, strict=True):
        rows = _fitting(study)
        gpu = rows[0].found.gpu
        bars = [(j.row.name, j.found.fleet.parts) for j in rows]
        bars.append(("A5000", gpu.parts))
        names: dict[str, Any] = {}
        for at, (_, parts) in enumerate(reversed(bars)):
            left = 0.0
            for part in parts:
                wh = (part.energy_j or 0.0) / 3600
                if wh <= 0:
                    continue
                colour = colormaps["tab10"](_COLOURS.index(part.name) % 10)
                names[part.name] = axes.barh(at, wh, left=left, color=colour, height=0.7)
                left += wh
            axes.text(left, at, f" {quantity(left)} Wh", va="center", fontsize=8)
        axes.set_yticks(range(len(bars)), [name for name, _ in reversed(bars)], fontsize=8)
        axes.set(title=study.setup.name, xlabel=f"Wh for {study.setup.steps} steps")
        axes.set_xlim(right=1.15 * axes.get_xlim()[1])
        axes.legend(names.values(), names, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    save_figure(figure, path, _DPI)


_COLOURS = (
    "devices, multiplying",
    "devices, waiting",
    "devices, radio",
    "chargers and power supplies",
    "network",
    "parameter server",
    "GPU",
    "host",
    "data centre (PUE)",
)


def save_ratios(path: Path, found: Sequence[SetupStudy]) -> None:
    """Plot each row's GPU-to-device ratios: the range as a bar, the central case as a dot."""
    rows = [(study, judged) for study in found for judged in study.rows]
    figure = Figure(figsize=(16, 1.8 + 0.28 * len(rows)), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    asked: list[tuple[tuple[float, float], str, Callable[[StudyJudgement], Found]]] = [
        (ENERGY_CLAIM, "energy: J of the GPU over the devices'", lambda j: j.energy),
        (CARBON_CLAIM, "carbon, attributed: gCO2e, GPU over devices", lambda j: j.attributed),
        (CARBON_CLAIM, "carbon, sunk cost: gCO2e, GPU over devices", lambda j: j.sunk_cost),
    ]
    for axes, (claim, name, of) in zip(panels, asked, strict=True):
        axes.axvspan(*claim, **_BAND)
        axes.axvline(1, color="grey", linewidth=1, linestyle="--")
        for at, (_, judged) in enumerate(reversed(rows)):
            held = of(judged.found)
            colour = "tab:blue" if judged.row.fits else "lightgrey"
            axes.plot([held.least, held.most], [at, at], color=colour, linewidth=3)
            axes.plot(held.central, at, "o", color="black" if judged.row.fits else "grey")
        axes.set(xscale="log", xlabel=name)
        axes.grid(axis="x", which="major", linewidth=0.3)
    names = [f"{study.setup.title}: {judged.row.name}" for study, judged in reversed(rows)]
    panels[0].set_yticks(range(len(rows)), names, fontsize=8)
    figure.suptitle(
        "bars: over all conditions; dots: central case; green: as claimed; grey: does not fit",
        fontsize=10,
    )
    save_figure(figure, path, _DPI)


def save_speeds(path: Path, found: Sequence[SetupStudy]) -> None:
    """Plot the energy ratio of each method and set-up against the throughput of a device."""
    figure = Figure(figsize=(12, 8), layout="constrained")
    for axes, study in _panels(figure, found, ENERGY_CLAIM):
        axes.axvline(study.setup.flops_per_s / 1e12, color="black", linewidth=1)
        axes.axvspan(*(s / 1e12 for s in study.setup.measured_flops_per_s), color="grey", alpha=0.1)
        for method, points in study.speeds.items():
            x, y = [point[0] / 1e12 for point in points], [point[1] for point in points]
            axes.plot(x, y, marker=".", label=method)
        axes.set(
            xscale="log", yscale="log", title=study.setup.name,
            xlabel="TFLOP/s of a device in multiplication, at the power it draws now",
            ylabel="J of the GPU over J of the devices",
        )  # fmt: skip
        axes.legend(fontsize=7)
    save_figure(figure, path, _DPI)


def save_in_use(path: Path, found: Sequence[SetupStudy]) -> None:
    """Plot the attributed carbon ratio against utilisation, with one curve per lifetime."""
    figure = Figure(figsize=(12, 8), layout="constrained")
    percent = [100 * share for share in UTILISATIONS]
    for axes, study in _panels(figure, found, CARBON_CLAIM):
        for years, ratios in study.in_use.items():
            axes.plot(percent, ratios, label=f"{years:g} years")
        axes.set(
            yscale="log", title=f"{study.setup.name}: {study.best.row.name}",
            xlabel="utilisation of devices and GPU, % of their lifetime",
            ylabel="gCO2e of the GPU over the devices'",
        )  # fmt: skip
        axes.legend(title="lifetime", fontsize=7)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))  # more labels would overlap
        axes.yaxis.set_minor_formatter("{x:g}")
    save_figure(figure, path, _DPI)


def _panels(
    figure: Figure, found: Sequence[SetupStudy], claim: tuple[float, float]
) -> Iterator[tuple[Any, SetupStudy]]:
    """Draw the claimed range and the ratio 1 on the axes of each set-up; yield axes and set-up."""
    panels = figure.subplots(2, -(-len(found) // 2), squeeze=False).flat
    for axes, study in zip(panels, found, strict=False):
        axes.axhspan(*claim, **_BAND)
        axes.axhline(1, color="grey", linewidth=1, linestyle="--")
        yield axes, study


def _fitting(study: SetupStudy) -> list[Judged]:
    return [judged for judged in study.rows if judged.row.fits]
