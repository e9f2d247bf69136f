"""The report on the published claims, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from simulator.method import Outcome
from simulator.sweep import Row
from simulator.verdict import STAGES, TILES, Claim

METHODS: Final = {
    "cleave": "tiles as this project plans them (`cleave plan`), the LM head with them, attention "
    "as one task for each sample and head",
    "cleave-2d": "the published scheme: tiles of rows and columns only, each Linear by itself; "
    "attention as above",
    "cleave-stages": "whole layers on devices for a step as this project plans them, all traffic "
    "through the parameter server (PS)",
    "dtfm": "DT-FM, data and pipeline parallel over peers; `(formula)` its published cost, "
    "`(pipelined)` all communication overlapped, `(serial)` nothing overlapped",
    "dtfm-all": "the same with every device that is offered, also where fewer are faster",
    "alpa": "a pipeline of tensor- and data-parallel stages on a homogeneous mesh",
    "asteroid": "a hybrid pipeline on unequal devices, aware of memory",
    "confidant": "a pipeline with one device for each stage",
    "data-parallel": "the whole model on every device, gradients by ring all-reduce",
    "cloud-1xa100": "data-centre GPUs, one or eight (`cloud-8xa100`) A100 or H100 (`cloud-1xh100`, "
    "`cloud-8xh100`) of 80 GB; `(offload)` has the optimizer on the host",
}
"""What each is, by its name."""


def report(
    title: str, conditions: str, claims: Sequence[Claim], figures: Sequence[tuple[str, str, str]]
) -> str:
    """Return the whole report.

    Args:
        conditions: text on the conditions of all that follows.
        figures: for each figure what it shows in a few words, its file, and how to read it.
    """
    lines = [
        f"# {title}",
        "",
        conditions,
        "",
        "## Methods",
        "",
        "| name | what it is |",
        "| --- | --- |",
        *(f"| `{name}` | {what} |" for name, what in METHODS.items()),
        "",
        "## Verdicts",
        "",
        "Cleave trains by tiles (`cleave`; `cleave-2d` are those that were published) and by "
        "stages (`cleave-stages`); each has a verdict. *Only if* is what the conditions have in "
        "common under which a claim holds; it may fail under some of those, too.",
        "",
        "| claim | by tiles | only if | by stages | only if |",
        "| --- " * 5 + "|",
        *(
            f"| {claim.title} | {claim.verdict(TILES).value} | {claim.only_if(TILES)} "
            f"| {claim.verdict(STAGES).value} | {claim.only_if(STAGES)} |"
            for claim in claims
        ),
    ]
    for number, claim in enumerate(claims, 1):
        lines += ["", f"## {number}. {claim.title}", ""]
        lines += [f"**{verdicts(claim)}** {claim.reading}", ""]
        lines += ["| " + " | ".join(claim.columns) + " |", "| --- " * len(claim.columns) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in claim.rows]
    lines += ["", "## Figures"]
    for what, file, reading in figures:
        lines += ["", f"![{what}]({file})", "", reading]
    return "\n".join([*lines, ""])


def verdicts(claim: Claim) -> str:
    """Say in two sentences whether a claim holds."""
    tiles, stages = claim.verdict(TILES), claim.verdict(STAGES)
    return f"By tiles: {tiles.value}. By stages: {stages.value}."


def sweep_reading(rows: Sequence[Row]) -> str:
    """Return a sentence on how tiles and the fastest other method scale as devices join."""
    points = [r for r in rows if r.outcome.method == "cleave" and r.devices and r.outcome.fits]
    if not points:
        return ""
    first, last = points[0], points[-1]
    line = (
        f"Tiles go from {first.outcome.step_s:.4g} s on {first.devices} devices to "
        f"{last.outcome.step_s:.4g} s on {last.devices}"
    )
    others: list[Outcome] = [
        r.outcome
        for r in rows
        if r.devices == last.devices
        and r.outcome.fits
        and not r.outcome.method.startswith("cleave")
    ]
    if not others:
        return f"{line}, where no other method fits."
    best = min(others, key=lambda o: o.step_s)
    return f"{line}, where {best.method}, the fastest other that fits, takes {best.step_s:.4g} s."


def marked_quick(text: str) -> str:
    """Return a report that says in itself that it was only a trial."""
    title, rest = text.split("\n", 1)
    return (
        f"{title}: QUICK, toy models\n\n**QUICK: toy models on a few devices, to try the report "
        f"out. Its verdicts say nothing about the claims.**\n{rest}"
    )
