"""Report of the study, as Markdown for readers who do not know the paper, and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import product
from math import prod
from typing import Any

from cleave.energy.assumptions import load_assumptions
from simulator.study.conditions import (
    CARBON_CLAIM,
    ENERGY_CLAIM,
    LAPTOPS_AT_ALL,
    Axis,
    Found,
    carbon_axes,
    energy_axes,
    together,
)
from simulator.study.inputs import Input, unconfirmed
from simulator.study.sections import (
    between,
    carbon,
    contrary,
    depends,
    energy,
    fits,
    only_if_text,
    ratio,
    span,
    speed,
)
from simulator.study.study import Judged, SetupStudy, StudyJudgement, needed_flops_per_s
from simulator.verdict import OURS, paragraphs, table

_VIEWS: tuple[tuple[str, tuple[float, float], Callable[[StudyJudgement], Found]], ...] = (
    ("energy", ENERGY_CLAIM, lambda found: found.energy),
    ("carbon, attributed", CARBON_CLAIM, lambda found: found.attributed),
    ("carbon, sunk cost", CARBON_CLAIM, lambda found: found.sunk_cost),
)


def report(found: Sequence[SetupStudy], figures: Sequence[Input], tornados: Iterable[str]) -> str:
    """Return the text of `report.md`.

    `tornados` lists the file names of the tornado plots, in the order of `figures.tornado_files`.
    """
    lines = [
        *_what(found),
        *_claims(found),
        *fits(found),
        *energy(found),
        *carbon(found),
        *speed(found),
        *contrary(found),
        *depends(found, list(tornados)),
        *_conditions(),
        *_figures(figures),
    ]
    return "\n".join(lines[1:]) + "\n"


def _what(found: Sequence[SetupStudy]) -> list[str]:
    first = found[0].setup
    names = "; ".join(study.setup.name for study in found)
    host = load_assumptions().host_share.value
    return paragraphs(
        "# Training on laptops and phones against a GPU: energy and carbon",
        "The paper *arXiv 2507.01803* (HotCarbon 2025) trained language models on laptops and "
        f"phones and says that this took {span(ENERGY_CLAIM)} times less energy than an NVIDIA "
        f"A5000 and caused {span(CARBON_CLAIM)} times less carbon, when making the machines "
        "counts. Here its set-up is simulated and both claims are held against it. Its own tables "
        "of joules could not be read: none of its measurements is in this report, only its set-up.",
        f"Set-up: {names}. {first.steps} steps of {first.batch} sequences of {first.seq} tokens in "
        "bf16; links of 10 MB/s both ways; Wi-Fi of 0.5 W. Laptops are M2 Pro in the paper and M1 "
        "Pro here, whose multiplication was measured; phones are Snapdragon 888.",
        "Methods: *alone*, one device does it all. *dtfm*, DT-FM (Yuan et al. 2022): layers are "
        "spread over devices that send activations to each other, on all devices (*dtfm-all*, as "
        "in the paper) or on as many as are fastest (*dtfm*); *formula* as DT-FM's paper has it, "
        "*pipelined* with everything overlapped, *serial* with nothing overlapped. *cleave*: "
        "devices multiply tiles and keep nothing; *cleave-2d*: the published tiles; "
        "*cleave-stages*: devices train whole layers for a step.",
        "A ratio is what the GPU takes over what the devices take: above 1 the devices take less. "
        "The *central case* counts what the paper's formulae count: devices as they come, chargers "
        "as the rules ask, Wi-Fi, the GPU and its building (PUE), no network; carbon with making "
        "shared out to both by the time used. And, beyond the paper's formulae and in favour of "
        f"the devices, the machine around the GPU ({host:.0%} of the GPU's energy).",
        "Speed decides most, and the paper's is not known. In the central case laptops and GPU are "
        "treated alike: training whole layers, each reaches half of what it reaches in "
        "multiplication alone. Tiles are plain multiplications, at all of it; the phone's figure "
        "was measured end to end and is taken as it is. Laptops at all of their speed against a "
        "GPU at half of its own look twice as thrifty: that is a condition here (section 8), not "
        "the central case.",
    )


def _claims(found: Sequence[SetupStudy]) -> list[str]:
    rows = []
    for study in found:
        published = study.published()
        for what, claim, of in _VIEWS:
            each = [of(j.found) for j in published]
            rows.append(
                (
                    study.setup.name,
                    f"{span(claim)} times less {what}",
                    together(one.verdict for one in each).value if each else "does not fit",
                    between(one.central for one in each),
                    f"{ratio(min(o.least for o in each))} to {ratio(max(o.most for o in each))}"
                    if each
                    else "",
                    _only_if(each),
                )
            )
    lines = paragraphs(
        "## 1. Do the claims hold?",
        "By the paper's own methods, on memory that fits. *Holds* means: the lower end of the "
        "claim or more in every combination of the conditions of section 8. *Only if*: what "
        "every combination in which it holds has; that alone need not be enough.",
        table(
            ("set-up", "claim", "verdict", "ratio, central case", "over all conditions", "only if"),
            rows,
        ),
        f"Reading: {_reading(found)}",
        "*Attributed*: devices and GPU both carry the share of making them that falls to the time "
        "they are used; that is the paper's view. *Sunk cost*: the devices have been made anyway "
        "and carry none; the GPU was made for the job.",
    )
    return [*lines, *_by_cleave(found), *_one_by_one(found)]


def _by_cleave(found: Sequence[SetupStudy]) -> list[str]:
    rows = []
    for study in found:
        by_method = {name: study.by(name) for name in OURS}
        if not any(by_method.values()):  # a set-up with a single device
            continue
        for what, claim, of in _VIEWS:
            cells = (_central([of(j.found) for j in each]) for each in by_method.values())
            rows.append((study.setup.name, f"{span(claim)} times less {what}", *cells))
    return paragraphs(
        "### By Cleave's methods",
        "Ratios in the central case on memory that fits, and the verdict: tiles as published, "
        "tiles as this project plans them, and stages. A device alone has no use for them.",
        table(("set-up", "claim", *(f"`{name}`" for name in OURS)), rows),
    )


def _central(each: Sequence[Found]) -> str:
    if not each:
        return "does not fit"
    verdict = together(one.verdict for one in each)
    return f"{between(one.central for one in each)}: {verdict.value}"


def _one_by_one(found: Sequence[SetupStudy]) -> list[str]:
    rows = []
    for settings in zip(*(study.changed for study in found), strict=True):
        cells = []
        for ratios in (changed.ratios for changed in settings):
            cells.append(_met(ratios.energy, ENERGY_CLAIM))
            cells += [_met(each, CARBON_CLAIM) for each in (ratios.attributed, ratios.sunk_cost)]
        rows.append((settings[0].axis, settings[0].setting, *cells))
    views = product((s.setup.name for s in found), ("energy", "attributed", "sunk"))
    columns = ("condition", "setting", *(f"{name}: {view}" for name, view in views))
    best = "; ".join(f"{study.setup.name}: {study.best.row.name}" for study in found)
    return paragraphs(
        "### One condition at a time",
        f"Ratios of the method that takes least energy on memory that fits ({best}), with one "
        "condition changed and the others as in the central case. Bold: as claimed, or more.",
        table(columns, rows),
        "Reading: a column without bold figures is a claim that no single condition rescues.",
    )


def _met(value: float | None, claim: tuple[float, float]) -> str:
    text = ratio(value)
    return f"**{text}**" if value is not None and value >= claim[0] else text


def _reading(found: Sequence[SetupStudy]) -> str:
    best = {s.setup.title: [j.found.energy.central for j in s.published()] for s in found}
    texts = [f"{title}: {_times(max(each))} the GPU" for title, each in best.items() if each]
    unequal = [
        f"{study.setup.title} {ratio(changed.ratios.energy)}"
        for study in found
        if study.setup.trains_slower
        for changed in study.changed
        if changed.setting == LAPTOPS_AT_ALL
    ]
    return (
        "at best, in the central case, " + "; ".join(texts) + ". How fast a device multiplies "
        "for each watt decides this, see section 5. Were laptops taken at all of their speed in "
        "multiplication and the GPU at half of its own, the ratios of energy would be "
        + ", ".join(unequal)
        + ": whether the claim of energy holds for laptops hangs on that choice."
    )


def _times(best: float) -> str:
    if ratio(best) == "1":
        return "as much energy as"
    if best > 1:
        return f"{ratio(best)} times less energy than"
    return f"{ratio(1 / best)} times more energy than"


def _conditions() -> list[str]:
    of_energy, of_carbon = energy_axes(), carbon_axes()

    def listed(axes: Iterable[Axis]) -> list[tuple[str, str]]:
        return [(axis.name, "; ".join(axis.settings)) for axis in axes]

    def count(axes: Iterable[Axis]) -> int:
        return prod(len(axis.settings) for axis in axes)

    return paragraphs(
        "## 8. The conditions",
        f"A claim of energy was held against {count(of_energy)} combinations of the first five "
        f"conditions, one of carbon against {count((*of_energy, *of_carbon))} of all. The first "
        "setting of each is that of the "
        "central case. How many combinations hold is no probability. Laptops' power was measured "
        "at the socket, so that of their chargers' loss only the radio's share is added. Another "
        "share of laptops' speed changes nothing for phones and for tiles.",
        table(("condition", "settings"), listed((*of_energy, *of_carbon))),
    )


def _figures(figures: Sequence[Input]) -> list[str]:
    rows = [(i.name, i.used, i.range or "-", i.standing.value, i.source or "-") for i in figures]
    names = ", ".join(each.name for each in unconfirmed(figures))
    return paragraphs(
        "## 9. Where the figures are from",
        "Every energy here is modelled; nothing was measured for this report. *Not confirmed* "
        "means that no source kept with this project says so: "
        f"{names}. What they would change is in sections 1 and 7.",
        table(("figure", "used", "range", "standing", "source"), rows),
    )


def _only_if(each: Sequence[Found]) -> str:
    """Return a table cell with the settings that a claim needs in order to hold.

    Rows in which the claim never holds are ignored.
    """
    holding = [found.only_if for found in each if found.held]
    if not holding:
        return "-"
    common = {k: v for k, v in holding[0].items() if all(o.get(k) == v for o in holding)}
    return only_if_text(together(found.verdict for found in each), common)


def document(found: Sequence[SetupStudy], figures: Sequence[Input]) -> dict[str, Any]:
    """Return the results of the study as a JSON document."""
    return {
        "basis": "modelled",
        "claims": {"energy": list(ENERGY_CLAIM), "carbon": list(CARBON_CLAIM)},
        "setups": [
            {
                "setup": study.setup.name,
                "model": study.setup.model,
                "devices": study.setup.devices,
                "profile": study.setup.profile.name,
                "flops_per_s": study.setup.flops_per_s,
                "batch": study.setup.batch,
                "seq": study.setup.seq,
                "steps": study.setup.steps,
                "gpu": {
                    "profile": study.gpu.profile.name,
                    "duration_s": study.gpu.cloud.time_s,
                    "memory_needed_bytes": study.gpu.needed_bytes,
                    "memory_bytes": study.gpu.installed_bytes,
                    "misfit": study.gpu.misfit,
                },
                "rows": [_row_document(judged) for judged in study.rows],
                "speeds": {
                    method: {
                        "points": [list(point) for point in points],
                        "needed_flops_per_s": needed_flops_per_s(points, ENERGY_CLAIM[0]),
                    }
                    for method, points in study.speeds.items()
                },
                "best": study.best.row.method,
                "one_condition_changed": [asdict(changed) for changed in study.changed],
                "sensitivity": [
                    {
                        "of": dependence.of,
                        "method": dependence.row.method,
                        "ratio": dependence.middle,
                        "bars": [asdict(bar) for bar in dependence.bars],
                    }
                    for dependence in study.dependences
                ],
            }
            for study in found
        ],
        "figures": [{**asdict(each), "standing": each.standing.value} for each in figures],
    }


def _row_document(judged: Judged) -> dict[str, Any]:
    row, found = judged.row, judged.found
    return {
        "method": row.method,
        "memory_bytes": [offer.memory_bytes for offer in row.memory],
        "memory_needed_bytes": row.needed_bytes,
        "fits": row.fits,
        "misfit": row.misfit,
        "devices_used": row.usage.devices,
        "step_s": row.step_s,
        "duration_s": row.duration_s,
        "compute_s": row.usage.compute_s,
        "down_bytes": row.usage.down_bytes,
        "up_bytes": row.usage.up_bytes,
        "network_bytes": row.usage.crossing_bytes,
        "energy_j": found.fleet.energy_j,
        "gpu_energy_j": found.gpu.energy_j,
        "parts": [
            {"name": part.name, "energy_j": part.energy_j, "basis": part.basis.value}
            for part in found.fleet.parts
        ],
        "operational_gco2e": found.fleet.operational_gco2e,
        "embodied_gco2e": found.fleet.embodied_gco2e,
        "ratios": asdict(found.ratios),
        "energy_claim": _found_document(found.energy),
        "attributed_claim": _found_document(found.attributed),
        "sunk_cost_claim": _found_document(found.sunk_cost),
        "compute_over_gpu": found.compute_over_gpu,
    }


def _found_document(found: Found) -> dict[str, Any]:
    return {**asdict(found), "verdict": found.verdict.value}
