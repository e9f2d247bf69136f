"""The output of `cleave footprint`: tables, CSV, or one JSON document."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from cleave.energy.account import Footprint, cloud_footprint
from cleave.energy.comparison import Bar, Case, ComparisonQuestion, Ratios, ratios, sensitivities
from cleave.energy.grid import Electricity, electricity, load_grids
from cleave.energy.meter import Basis
from cleave.energy.run_energy import RunEnergy
from cleave.energy.typical import load_assumptions, load_typical
from cleave_cli.render.text import Form, write_csv
from profiles.library import load_profiles

if TYPE_CHECKING:
    from collections.abc import Sequence

_CARBON = (
    "operational_gco2e", "embodied_gco2e", "attributed_gco2e", "devices", "devices_unknown",
    "embodied_unknown",
)  # fmt: skip
_BARS = 5  # maximum number of rows in the sensitivity table; --json has all


@dataclass(frozen=True, slots=True)
class Shown:
    """A footprint comparison to print. `notes` are lines to print with the assumptions.

    Attributes:
        of: whose footprint it is: "fleet", or "this machine" for a run without devices.
        time_is: what `duration_s` measures.
    """

    title: str
    duration_s: float
    question: ComparisonQuestion
    case: Case
    notes: tuple[str, ...]
    of: str = "fleet"
    time_is: str = "time"


def show(shown: Shown, form: Form) -> None:
    """Print the footprints and their comparison."""
    question, case = shown.question, shown.case
    fleet, cloud, found, nearer = question.fleet(case), None, None, None
    if question.cloud is not None:
        cloud = cloud_footprint(question.cloud, case.assumptions, case.cloud_gco2e_per_kwh)
        found = ratios(fleet, cloud)
        made = replace(case, assumptions=case.assumptions.without_network())
        nearer = question.ratios(made)
    middle = question.figure(case)
    bars: list[Bar] = []
    if middle is not None:
        intensities = [grid.gco2e_per_kwh for grid in load_grids()]
        bars = sensitivities(
            question.figure, case, intensities, cloud=cloud is not None, kinds=question.kinds
        )
    if form is Form.JSON:
        typer.echo(json.dumps(_document(shown, fleet, cloud, found, nearer, bars)))
        return
    if form is Form.CSV:
        write_csv([*_rows("fleet", fleet), *(_rows("GPU", cloud) if cloud else ())])
        return
    console = Console(highlight=False)
    console.print(_table(shown.of, shown.title, shown.duration_s, fleet, shown.time_is))
    if cloud is not None and question.cloud is not None:
        console.print(_table("GPU", question.cloud.profile.title, question.cloud.time_s, cloud))
    for line in _readings(fleet, found, nearer):
        console.print(line, soft_wrap=True)
    if bars:
        console.print(_bars_table(bars, ratio=found is not None))
    console.print("Assumed:")
    for text in (*shown.notes, *fleet.assumed, *(cloud.assumed if cloud else ())):
        console.print(f"- {text}", soft_wrap=True, markup=False)


# --- tables and text ---


def _table(
    what: str, title: str, duration_s: float, found: Footprint, time_is: str = "time"
) -> Table:
    table = Table(title=f"{what}: {title}", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("")
    table.add_column("Wh", justify="right")
    table.add_column("known by")
    for part in found.parts:
        wh = "" if part.energy_j is None else f"{part.energy_j / 3600:,.3f}"
        table.add_row(part.name, wh, part.basis.value)
    known = found.known
    total = f"{found.energy_j / 3600:,.3f}" if known else ""
    whole = found.complete and all(part.energy_j is not None for part in found.parts)
    table.add_row("energy", total, "" if whole else "at least" if known else "unknown")
    table.add_section()
    table.add_row(time_is, "", human_time(duration_s))
    grams = found.operational_gco2e
    unknown = "unknown; set --grid" if known else "unknown"
    carbon = unknown if grams is None else f"{grams:,.2f} gCO2e"
    table.add_row("carbon of electricity", "", carbon)
    table.add_row("carbon of making, its share", "", _making_text(found, ",.2f"))
    return table


def _making_text(found: Footprint, form: str) -> str:
    """Format the run's share of manufacturing carbon, which may be known of some devices only."""
    if found.embodied_unknown and found.embodied_unknown == found.devices:
        return "unknown"
    least = "at least " if found.embodied_unknown else ""
    return f"{least}{found.embodied_gco2e:{form}} gCO2e"


def _readings(fleet: Footprint, found: Ratios | None, nearer: Ratios | None) -> list[str]:
    if found is None or nearer is None:
        return []
    if found.energy is None:
        return [
            f"No comparison: the power of {fleet.devices_unknown} of {fleet.devices} devices is "
            f"unknown."
        ]
    lines = [_reading("energy", found.energy)]
    if nearer.energy is not None and nearer.energy != found.energy:
        lines.append(_reading("energy without the network", nearer.energy))
    if found.operational is None:
        return [*lines, "Carbon is unknown; set --grid, such as --grid DEU."]
    lines.append(_reading("carbon of electricity alone", found.operational))
    if found.attributed is not None:
        lines.append(
            _reading("carbon, with making shared out to both (attributed)", found.attributed)
        )
    if found.sunk_cost is not None:
        lines.append(
            _reading("carbon, with making counted for the GPU only (sunk cost)", found.sunk_cost)
        )
    return lines


def _reading(what: str, ratio: float) -> str:
    first, second = ("GPU", "fleet") if ratio >= 1 else ("fleet", "GPU")
    times = max(ratio, 1 / ratio)
    shown = f"{times:,.0f}" if times >= 100 else f"{times:.3g}"
    return f"{what}: the {first}'s is {shown} times the {second}'s"


def _bars_table(bars: Sequence[Bar], *, ratio: bool) -> Table:
    of = "attributed carbon, GPU over fleet" if ratio else "attributed carbon, gCO2e"
    table = Table(title=f"What it depends on: {of}", box=box.SIMPLE_HEAD, title_justify="left")
    for name in ("assumed", "low", "", "high", ""):
        table.add_column(name, justify="left" if name == "assumed" else "right")
    for bar in bars[:_BARS]:
        table.add_row(
            bar.name, bar.low_setting, f"{bar.low:.3g}", bar.high_setting, f"{bar.high:.3g}"
        )
    return table


def human_time(seconds: float) -> str:
    """Format a duration with a unit, such as "3.5 min"."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def summary(energy: RunEnergy, grid: str) -> dict[str, Any]:
    """Return a run's energy and carbon as values and as text, for the summary of `cleave train`.

    `grid` is a country code, or the path of a CSV file with hourly carbon intensities; empty if
    unknown.
    """
    at = electricity(grid, 0.0, energy.duration_s) if grid else None
    case = Case(load_assumptions(), at.gco2e_per_kwh if at else None, None)
    profiles = load_profiles()
    found = ComparisonQuestion(energy.usages, profiles, load_typical(), energy.ps).fleet(case)
    known = found.devices > found.devices_unknown or energy.ps.energy_j is not None
    return {
        "energy_j": found.energy_j if known else None,
        "operational_gco2e": found.operational_gco2e if known else None,
        "embodied_gco2e": found.embodied_gco2e if known and not found.embodied_unknown else None,
        "devices_unknown": found.devices_unknown,
        "energy_text": _energy_text(found, energy, known=known),
        "carbon_text": _carbon_text(found, at, known=known),
    }


def _energy_text(found: Footprint, energy: RunEnergy, *, known: bool) -> str:
    if not known and energy.usages:
        return "unknown: no device has a profile with known power"
    if not known:
        return "unknown: this machine does not report its power"
    text = f"{found.energy_j / 3600:,.3g} Wh"
    if not energy.usages:
        return f"{text}, measured here ({energy.machine_source})"
    if found.devices_unknown:
        text += f" without {found.devices_unknown} of {found.devices} devices (power unknown)"
    bases = {part.basis for part in found.parts if part.energy_j}
    how = " and ".join(basis.value for basis in Basis if basis in bases)
    return f"{text}, {how}; for details: cleave footprint RUN"


def _carbon_text(found: Footprint, at: Electricity | None, *, known: bool) -> str:
    if not known:
        return ""
    if found.operational_gco2e is None:
        return "unknown; set the country of the electricity, such as --grid DEU"
    text = f"{found.operational_gco2e:,.3g} gCO2e of electricity"
    if found.devices:
        making = _making_text(found, ",.3g")
        text += f", {making} of making the devices"
    return text


# --- JSON and CSV ---


def _rows(of: str, found: Footprint) -> list[dict[str, Any]]:
    return [{"of": of, **part} for part in _parts_json(found)]


def _parts_json(found: Footprint) -> list[dict[str, Any]]:
    return [
        {"name": part.name, "energy_j": part.energy_j, "basis": part.basis.value}
        for part in found.parts
    ]


def _document(
    shown: Shown,
    fleet: Footprint,
    cloud: Footprint | None,
    found: Ratios | None,
    nearer: Ratios | None,
    bars: Sequence[Bar],
) -> dict[str, Any]:
    question = shown.question
    document: dict[str, Any] = {
        "title": shown.title,
        "fleet": _footprint_json(fleet, shown.duration_s),
        "gpu": None,
        "ratios": None if found is None else asdict(found),
        "ratios_without_network": None if nearer is None else asdict(nearer),
        "sensitivity": [asdict(bar) for bar in bars],
        "assumed": list(shown.notes),
    }
    if cloud is not None and question.cloud is not None:
        document["gpu"] = _footprint_json(cloud, question.cloud.time_s)
    return document


def _footprint_json(found: Footprint, duration_s: float) -> dict[str, Any]:
    return {
        "duration_s": duration_s,
        "energy_j": found.energy_j if found.known else None,
        "parts": _parts_json(found),
        **{name: getattr(found, name) for name in _CARBON},
        "assumed": list(found.assumed),
    }
