"""Test the claims of the Cleave paper (arXiv 2512.22142) by simulation.

    python -m benchmarks.published_claims [--coding auto] [--jobs 2] [--quick]

Simulates OPT and Llama 2 models by all methods on fleets of the paper. Prints a table with the
verdict on each claim for the published tiles, our tiles and our stages, and then every result. The
conditions that the paper does not state, such as the network card of the parameter server (PS),
have several values. `--coding` tests the claims again with compressed payloads. `--quick` simulates
toy models on a few devices: its verdicts say nothing about the claims.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from benchmarks.published_claims.claims import (
    Evidence,
    bytes_fall,
    comparable_to_cloud,
    faster_than_dtfm,
    faster_with_memory,
    fits_small_memory,
    recovers_faster,
    uses_more_devices,
)
from benchmarks.published_claims.verdict import OURS, Claim, paragraphs, table
from cleave.planner.coding import CodingPolicy
from cleave.planner.plan import ElementBytes, PsRates
from cleave.workload.registry import find_model
from simulator.cloud import Cloud
from simulator.method import Method
from simulator.sweep import Cell, Processes, Row, Workers, cells, methods, simulate

BF16: Final = ElementBytes(2, 2)
CARDS_GBPS: Final = (10, 100)
SMALL_BYTES: Final = 512_000_000
ROOMY_BYTES: Final = 32_000_000_000


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


def paper_cells(scope: Scope, coding: CodingPolicy = CodingPolicy.OFF) -> PaperCells:
    """Return the cells to simulate. `coding` applies to Cleave and to the baselines alike."""
    every = list(methods().values())
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
            ps=ps or PsRates(), coding=coding, memory_bytes=memory_bytes,
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


def evidence_of(scope: Scope, planned: PaperCells, workers: Workers) -> Evidence:
    """Simulate all cells and return the results as evidence."""
    rows = iter(simulate(planned.every, workers))

    def found(group: Sequence[Cell]) -> list[Row]:
        return [row for of_cell in islice(rows, len(group)) for row in of_cell]

    by_model = {model: found(group) for model, group in planned.models.items()}
    small = found(planned.small)
    carded = {card: found(group) for card, group in planned.carded.items()}
    layers = {model: find_model(model).layers for model in by_model}
    return Evidence(scope.model, by_model, small, carded, found(planned.roomy), layers)


def claims_on(scope: Scope, evidence: Evidence) -> list[Claim]:
    """Test all claims."""
    return [
        faster_than_dtfm(evidence),
        uses_more_devices(evidence, evidence.layers[scope.model] * scope.batch),
        comparable_to_cloud(evidence),
        recovers_faster(evidence),
        bytes_fall(evidence),
        fits_small_memory(evidence),
        faster_with_memory(evidence),
    ]


def verdicts(claims: Sequence[Claim]) -> list[str]:
    """Return a Markdown table of what each of our methods reaches, and the verdicts."""
    rows = (
        (
            claim.title,
            claim.holds_at,
            *(f"{claim.reached(name)}: {claim.verdict(name).value}" for name in OURS),
        )
        for claim in claims
    )
    return table(("claim", "holds at", *(f"`{name}`" for name in OURS)), rows)


def details(claim: Claim) -> list[str]:
    """Return a Markdown section with all results behind a verdict."""
    found = []
    for name in OURS:
        only_if = claim.only_if(name)
        text = claim.verdict(name).value
        found.append(f"- `{name}`: {text}: {only_if}" if only_if else f"- `{name}`: {text}")
    return paragraphs(f"## {claim.title}", claim.reading, found, table(claim.columns, claim.rows))


def main() -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coding", default="off", help="off, auto or on")
    parser.add_argument("--jobs", type=int, default=1, help="number of simulating processes")
    parser.add_argument("--quick", action="store_true", help="toy models on a few devices")
    options = parser.parse_args()
    scope, by = QUICK if options.quick else FULL, Processes(options.jobs)
    claims = claims_on(scope, evidence_of(scope, paper_cells(scope), by))
    print(*verdicts(claims), sep="\n")
    if (policy := CodingPolicy.of(options.coding)) is not CodingPolicy.OFF:
        coded = claims_on(scope, evidence_of(scope, paper_cells(scope, policy), by))
        print("\nWith compressed payloads for all methods:\n", *verdicts(coded), sep="\n")
    for claim in claims:
        print(*details(claim), sep="\n")


if __name__ == "__main__":
    main()
