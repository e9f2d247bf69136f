"""The report that tests the claims of the Cleave paper (arXiv 2512.22142) by simulation.

The report lists results for several values of each condition that the paper does not state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from cleave.files import write_output
from cleave.planner.coding import CodingPolicy
from cleave.planner.plan import ElementBytes, PsRates
from cleave.workload.registry import find_model
from simulator.catalogue import methods
from simulator.claims import (
    Evidence,
    bytes_fall,
    comparable_to_cloud,
    faster_than_dtfm,
    faster_with_memory,
    fits_small_memory,
    recovers_faster,
    uses_more_devices,
)
from simulator.cloud import Cloud
from simulator.method import Method
from simulator.sweep import Cell, Row, cells, simulate
from simulator.verdict import OURS, Claim, paragraphs, table
from simulator.workers import Workers

METHODS: Final = {  # the description of each method in the report
    "cleave": "tiles as this project plans them (`cleave plan`), the LM head with them, attention "
    "as one task for each sample and head",
    "cleave-2d": "the published scheme: tiles of rows and columns only, each Linear by itself; "
    "attention as above",
    "cleave-stages": "whole layers on devices for a step as this project plans them, all traffic "
    "through the parameter server (PS)",
    "diloco": "whole models that devices train alone; weights are exchanged every 50 steps through "
    "the PS; not exact",
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


def report(
    title: str,
    conditions: str,
    claims: Sequence[Claim],
    figures: Sequence[tuple[str, str, str]],
    coded: Sequence[Claim] = (),
) -> str:
    """Return the whole report as Markdown.

    Args:
        conditions: paragraph that describes the simulated conditions.
        claims: the claims, tested with uncompressed payloads.
        figures: caption, file name and explanation of each figure.
        coded: the same claims, tested with compressed payloads; empty if not simulated.
    """
    lines = paragraphs(
        f"# {title}",
        conditions,
        "## Methods",
        table(("name", "what it is"), ((f"`{name}`", what) for name, what in METHODS.items())),
        "## Verdicts",
        "The published method is `cleave-2d`; `cleave` are its tiles as this project plans them, "
        "`cleave-stages` whole layers on devices. A cell says what the method reaches, from the "
        "least to the most of all trials, in how many of them the claim holds, and the verdict.",
        _verdict_table(claims),
    )
    if coded:
        about = _about_coding(claims, coded)
        lines += paragraphs("## Verdicts with coded payloads", about, _verdict_table(coded))
    for number, claim in enumerate(claims, 1):
        found = []
        for name in OURS:
            only_if = claim.only_if(name)
            text = claim.verdict(name).value
            found.append(f"- `{name}`: {text}: {only_if}" if only_if else f"- `{name}`: {text}")
        rows = table(claim.columns, claim.rows)
        lines += paragraphs(f"## {number}. {claim.title}", claim.reading, found, rows)
    lines += paragraphs("## Figures")
    for what, file, reading in figures:
        lines += paragraphs(f"![{what}]({file})", reading)
    return "\n".join([*lines[1:], ""])


def summary(claim: Claim) -> str:
    """Format a claim's title and its verdict for each of Cleave's methods, for the terminal."""
    width = max(map(len, OURS))
    lines = (f"  {name:{width}}  {_reached_and_verdict(claim, name)}" for name in OURS)
    return "\n".join((claim.title, *lines))


def _verdict_table(claims: Sequence[Claim]) -> list[str]:
    rows = (
        (claim.title, claim.holds_at, *(_reached_and_verdict(claim, name) for name in OURS))
        for claim in claims
    )
    return table(("claim", "holds at", *(f"`{name}`" for name in OURS)), rows)


def _reached_and_verdict(claim: Claim, method: str) -> str:
    reached, verdict = claim.reached(method), claim.verdict(method).value
    return f"{reached}: {verdict}" if reached else verdict


def _about_coding(plain: Sequence[Claim], coded: Sequence[Claim]) -> str:
    """Return a paragraph about compressed payloads and the verdicts that they change."""
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
    """Return a sentence on the step time of `cleave` with the fewest and with the most devices.

    The sentence also names the fastest other method that fits with the most devices. If `cleave`
    never fits, the sentence is empty.
    """
    points = [r for r in rows if r.outcome.method == "cleave" and r.devices and r.outcome.fits]
    if not points:
        return ""
    first, last = points[0], points[-1]
    line = (
        f"Tiles go from {first.outcome.step_s:.4g} s on {first.devices} devices to "
        f"{last.outcome.step_s:.4g} s on {last.devices}"
    )
    there = (r.outcome for r in rows if r.devices == last.devices)
    others = [o for o in there if o.fits and not o.method.startswith("cleave")]
    if not others:
        return f"{line}, where no other method fits."
    best = min(others, key=lambda o: o.step_s)
    return f"{line}, where {best.method}, the fastest other that fits, takes {best.step_s:.4g} s."


def marked_quick(text: str) -> str:
    """Return a report with its title and first lines marked as a quick trial with toy models."""
    title, rest = text.split("\n", 1)
    return (
        f"{title}: QUICK, toy models\n\n**QUICK: toy models on a few devices, to try the report "
        f"out. Its verdicts say nothing about the claims.**\n{rest}"
    )


BF16: Final = ElementBytes(2, 2)
CARDS_GBPS: Final = (10, 100)
SMALL_BYTES: Final = 512_000_000
ROOMY_BYTES: Final = 32_000_000_000
Save = Callable[[Path, Sequence[Row], str], None]


@dataclass(frozen=True, slots=True)
class Scope:
    """The models, device counts and batch of a report.

    Attributes:
        model: name of the main model, which is simulated with each number of devices in `counts`.
        others: names of the other models, which are simulated with the device counts in `few`.
        small_memory: device counts at which Cleave's methods run with 512 MB per device.
        carded: device counts at which Cleave's methods run with the PS network cards in
            `CARDS_GBPS`.
        roomy: device count for the simulations with 32 GB per device.
        batch, seq: sequences per step, and tokens per sequence.
    """

    model: str
    counts: tuple[int, ...]
    others: tuple[str, ...]
    few: tuple[int, ...]
    small_memory: tuple[int, ...]
    carded: tuple[int, ...]
    roomy: int
    batch: int = 128
    seq: int = 1024


FULL: Final = Scope(
    "opt-13b",
    (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
    ("opt-1.3b", "opt-6.7b", "opt-30b", "opt-66b", "llama2-7b", "llama2-13b", "llama2-70b"),
    (256, 1024),
    (256, 1024, 8192),
    (32, 256, 1024, 8192),
    256,
)
QUICK: Final = Scope("opt-tiny", (4, 8), ("opt-nano",), (8,), (8,), (4, 8), 4, batch=8, seq=128)


@dataclass(frozen=True, slots=True)
class PaperCells:
    """The simulations for a report, in the same groups as the results in `Evidence`."""

    models: Mapping[str, Sequence[Cell]]
    small: Sequence[Cell]
    carded: Mapping[str, Sequence[Cell]]
    roomy: Sequence[Cell]

    @property
    def every(self) -> list[Cell]:
        groups = (*self.models.values(), self.small, *self.carded.values(), self.roomy)
        return [cell for group in groups for cell in group]


def paper_cells(
    scope: Scope,
    seed: int,
    *,
    thorough: bool = False,
    coding: CodingPolicy = CodingPolicy.OFF,
) -> PaperCells:
    """Return the cells to simulate for a report.

    Args:
        thorough: True to run all trials of every search, however long they take.
        coding: links on which payloads are compressed, both for Cleave and for the baselines.
    """
    every = list(methods(thorough=thorough).values())
    on_devices = [method for method in every if not isinstance(method, Cloud)]
    ours = [method for method in every if method.name in OURS]

    def on_paper_fleet(
        model: str,
        counts: Sequence[int],
        of: Sequence[Method],
        ps: PsRates | None = None,
        memory_bytes: int | None = None,
    ) -> list[Cell]:
        return cells(
            find_model(model), scope.batch, scope.seq, "paper", counts, of, element=BF16,
            ps=ps or PsRates(), seed=seed, coding=coding, memory_bytes=memory_bytes,
        )  # fmt: skip

    counts = {scope.model: scope.counts, **dict.fromkeys(scope.others, scope.few)}
    cards = {f"{gbps} Gbit/s": gbps * 1e9 / 8 for gbps in CARDS_GBPS}
    return PaperCells(
        models={model: on_paper_fleet(model, few, every) for model, few in counts.items()},
        small=on_paper_fleet(scope.model, scope.small_memory, ours, memory_bytes=SMALL_BYTES),
        carded={
            card: on_paper_fleet(scope.model, scope.carded, ours, PsRates(rate, rate))
            for card, rate in cards.items()
        },
        roomy=on_paper_fleet(scope.model, [scope.roomy], on_devices, memory_bytes=ROOMY_BYTES),
    )


def evidence_of(
    scope: Scope,
    planned: PaperCells,
    workers: Workers | None = None,
    done: Callable[[Cell], object] = lambda cell: None,
) -> Evidence:
    """Simulate all cells of a report and return the results as evidence.

    Args:
        planned: cells from `paper_cells` for the same scope.
        workers: workers that simulate the cells; None means this process.
        done: called with each cell after its simulation.
    """
    rows = iter(simulate(planned.every, workers, done))

    def found(group: Sequence[Cell]) -> list[Row]:
        return [row for of_cell in islice(rows, len(group)) for row in of_cell]

    by_model = {model: found(group) for model, group in planned.models.items()}
    small = found(planned.small)
    carded = {card: found(group) for card, group in planned.carded.items()}
    layers = {model: find_model(model).layers for model in by_model}
    return Evidence(scope.model, by_model, small, carded, found(planned.roomy), layers)


def claims_on(scope: Scope, evidence: Evidence) -> list[Claim]:
    return [
        faster_than_dtfm(evidence),
        uses_more_devices(evidence, evidence.layers[scope.model] * scope.batch),
        comparable_to_cloud(evidence),
        recovers_faster(evidence),
        bytes_fall(evidence),
        fits_small_memory(evidence),
        faster_with_memory(evidence),
    ]


def write(
    folder: Path,
    scope: Scope,
    evidence: Evidence,
    save_sweep: Save,
    save_recovery: Save,
    coded: Evidence | None = None,
) -> list[Claim]:
    """Test the claims, write `report.md` and its figures, and return the claims.

    Args:
        evidence: simulated results with uncompressed payloads.
        save_sweep, save_recovery: functions that plot results and save the plot to a file.
        coded: simulated results with compressed payloads; None to leave them out.

    Raises:
        OSError: if a file cannot be written.
    """
    claims = claims_on(scope, evidence)
    rows = evidence.rows[scope.model]
    last = scope.few[-1]
    title = (
        f"{scope.model}, batch {scope.batch}, {scope.seq} tokens, bf16, paper fleet, 1-3 GB each, "
        "PS card unlimited"
    )
    save_sweep(folder / "sweep.png", rows, title)
    save_recovery(
        folder / "recovery.png", [row for row in rows if row.devices == last],
        f"{title}, {last} devices",
    )  # fmt: skip
    figures = [
        (
            f"{scope.model}: time, bytes and PS bandwidth against devices", "sweep.png",
            f"{sweep_reading(rows)} Seconds, bytes of a device and the PS's bandwidth for one "
            "step, against the number of devices. Hollow points do not fit the devices' memory.",
        ),
        (
            f"{scope.model}: recovery", "recovery.png",
            f"Seconds that losing one of {last} devices adds to a step, from when that is "
            "noticed; hollow bars do not fit the devices' memory.",
        ),
    ]  # fmt: skip
    with_coding = claims_on(scope, coded) if coded else []
    text = report("Published claims, simulated", _conditions(scope), claims, figures, with_coding)
    if scope is QUICK:
        text = marked_quick(text)
    write_output(folder / "report.md", text.encode())
    return claims


def _conditions(scope: Scope) -> str:
    return (
        f"One training step of {scope.batch} sequences of {scope.seq} tokens in bf16. Devices are "
        "those of the paper's fleet: 5-7 TFLOP/s, 10-100 MB/s down, 5-10 MB/s up, 1-3 GB of "
        "memory, no latency. The network card of the parameter server (PS) is unlimited, which no "
        f"card is, where no other is named; {scope.model} is also simulated behind "
        f"{' and '.join(str(gbps) for gbps in CARDS_GBPS)} Gbit/s each way. Cloud GPUs reach 50 % "
        "of their bf16 peak. A method *fits* when every device holds what it must; the table says "
        "what the device with least for its part needs of the memory it has. Times of methods that "
        "do not fit are what they would take with memory enough."
    )
