"""The Markdown text of the report on the Cleave paper's claims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from simulator.method import Outcome
from simulator.sweep import Row
from simulator.verdict import OURS, Claim

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
"""Maps the name of each method to its description in the report."""


def report(
    title: str,
    conditions: str,
    claims: Sequence[Claim],
    figures: Sequence[tuple[str, str, str]],
    coded: Sequence[Claim] = (),
) -> str:
    """Return the Markdown text of the whole report.

    Args:
        title: heading of the report.
        conditions: text on the conditions under which all results were simulated.
        claims: tested claims with uncompressed payloads.
        figures: caption, file name and explanation of each figure.
        coded: the same claims, tested with compressed payloads for Cleave and the baselines alike;
            empty if not simulated.
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
        "The published method is `cleave-2d`; `cleave` are its tiles as this project plans them, "
        "`cleave-stages` whole layers on devices. A cell says what the method reaches, from the "
        "least to the most of all trials, in how many of them the claim holds, and the verdict.",
        "",
        *_verdict_table(claims),
    ]
    if coded:
        lines += ["", "## Verdicts with coded payloads", "", _about_coding(claims, coded), ""]
        lines += _verdict_table(coded)
    for number, claim in enumerate(claims, 1):
        lines += ["", f"## {number}. {claim.title}", "", claim.reading, ""]
        lines += [f"- `{name}`: {_conditions_of(claim, name)}" for name in OURS]
        lines += ["", "| " + " | ".join(claim.columns) + " |", "| --- " * len(claim.columns) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in claim.rows]
    lines += ["", "## Figures"]
    for what, file, reading in figures:
        lines += ["", f"![{what}]({file})", "", reading]
    return "\n".join([*lines, ""])


def summary(claim: Claim) -> str:
    """Return text for the terminal: a claim's title, and one line per Cleave method.

    Each line has the method's range of results and its verdict.
    """
    width = max(map(len, OURS))
    lines = (f"  {name:{width}}  {_reached_and_verdict(claim, name)}" for name in OURS)
    return "\n".join((claim.title, *lines))


def _verdict_table(claims: Sequence[Claim]) -> list[str]:
    header = ("claim", "holds at", *(f"`{name}`" for name in OURS))
    return [
        "| " + " | ".join(header) + " |",
        "| --- " * len(header) + "|",
        *(
            f"| {claim.title} | {claim.holds_at} | "
            + " | ".join(_reached_and_verdict(claim, name) for name in OURS)
            + " |"
            for claim in claims
        ),
    ]


def _reached_and_verdict(claim: Claim, method: str) -> str:
    reached, verdict = claim.reached(method), claim.verdict(method)
    return f"{reached}: {verdict.value}" if reached else f"{verdict.value}"


def _conditions_of(claim: Claim, method: str) -> str:
    """Return text on a method's verdict and on the trials in which the claim holds."""
    verdict, only_if = claim.verdict(method), claim.only_if(method)
    return f"{verdict.value}: {only_if}" if only_if else f"{verdict.value}"


def _about_coding(plain: Sequence[Claim], coded: Sequence[Claim]) -> str:
    """Return text on the compressed payloads and the verdicts that compression changes.

    Args:
        plain, coded: the same claims, tested without and with compressed payloads.
    """
    changed = [
        f"*{before.title}*, `{name}`: {before.verdict(name).value} with plain payloads, "
        f"{after.verdict(name).value} with coded ones"
        for before, after in zip(plain, coded, strict=True)
        for name in OURS
        if before.verdict(name) is not after.verdict(name)
    ]
    return (
        "Cleave codes what it sends over slow links. The published methods do not, so that all "
        "else in this report is with plain payloads. Here what every method sends counts as "
        "coded, ours and the others' alike: activations, gradients and weights on the same links "
        "at the same measured ratio. "
        + ("That changes: " + "; ".join(changed) + "." if changed else "That changes no verdict.")
    )


def sweep_reading(rows: Sequence[Row]) -> str:
    """Return a sentence that compares tiles on the fewest and on the most devices.

    The sentence also names the fastest other method that fits in memory on the most devices. It is
    empty if tiles fit on no number of devices.
    """
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
    """Mark a report as a quick trial with toy models, in its title and in a first paragraph."""
    title, rest = text.split("\n", 1)
    return (
        f"{title}: QUICK, toy models\n\n**QUICK: toy models on a few devices, to try the report "
        f"out. Its verdicts say nothing about the claims.**\n{rest}"
    )
