"""The report that tests the Cleave paper's claims against simulated results.

The claims and their conditions are from arXiv 2512.22142. Where the paper does not state a
condition, the report has results for several values of the condition.
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
from simulator.report import marked_quick, report, sweep_reading
from simulator.sweep import Cell, Row, cells, simulate
from simulator.verdict import OURS, Claim
from simulator.workers import Workers

BF16: Final = ElementBytes(2, 2)
CARDS_GBPS: Final = (10, 100)
SMALL_BYTES: Final = 512_000_000
ROOMY_BYTES: Final = 32_000_000_000
Save = Callable[[Path, Sequence[Row], str], None]


@dataclass(frozen=True, slots=True)
class Scope:
    """The models, device counts and batch for which a report has results.

    Attributes:
        model: name of the main model, which is simulated with all device counts in `counts`.
        others: names of the other models, which are simulated with the device counts in `few`.
        small_memory: device counts for the simulations with 512 MB per device.
        carded: device counts for the simulations with the limited PS network cards in
            `CARDS_GBPS`, with Cleave's methods only.
        roomy: device count for the simulation with 32 GB per device.
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
    """The cells (methods under given conditions) of a report; the attributes are as in `Evidence`.

    Attributes:
        models: maps a model name to its cells with an unlimited PS network card.
        small: cells for devices with 512 MB.
        carded: maps the name of a limited PS network card to its cells.
        roomy: cells for devices with 32 GB.
    """

    models: Mapping[str, Sequence[Cell]]
    small: Sequence[Cell]
    carded: Mapping[str, Sequence[Cell]]
    roomy: Sequence[Cell]

    @property
    def every(self) -> list[Cell]:
        """Return the cells of all groups in one list."""
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
        scope: models, device counts and batch.
        seed: random seed of all searches.
        thorough: True to run searches without a time limit.
        coding: policy that decides on which links payloads are compressed. It applies to Cleave
            and to the baselines alike.
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
        models={
            model: on_paper_fleet(model, of_model, every) for model, of_model in counts.items()
        },
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
        scope: scope from which `planned` was created.
        planned: cells to simulate.
        workers: workers that simulate the cells; None means this process.
        done: function that is called with each cell once it is simulated.
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
    """Test all claims of the paper, and return the claims in the order of the report."""
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
        folder: existing folder for the report.
        scope: scope of the simulation.
        evidence: simulated results with uncompressed payloads.
        save_sweep, save_recovery: functions that draw results into a file, such as those in
            `simulator.plots`.
        coded: simulated results with compressed payloads, which get verdicts of their own; None if
            not simulated.

    Raises:
        OSError: when a file cannot be written.
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
