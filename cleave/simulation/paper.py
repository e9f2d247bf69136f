"""The published claims, each held against what is simulated, written as a report.

The claims and the conditions known of them are those of the Cleave paper (arXiv 2512.22142). Where
a condition is not known, several are tried, and the report says what each gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from cleave.planner.plan import ElementBytes, PsRates
from cleave.simulation.catalogue import methods
from cleave.simulation.claims import (
    Claim,
    Evidence,
    bytes_fall,
    comparable_to_cloud,
    faster_than_dtfm,
    fits_small_memory,
    recovers_faster,
    uses_more_devices,
)
from cleave.simulation.method import Conditions
from cleave.simulation.sweep import Row, fleet_rates, sweep
from cleave.workload.registry import find_model

BF16: Final = ElementBytes(2, 2)
Save = Callable[[Path, Sequence[Row], str], None]


@dataclass(frozen=True, slots=True)
class Scope:
    """What is simulated for a report.

    Attributes:
        model: swept over all `counts`.
        others: simulated with `few` devices only.
        small_memory: numbers of devices of 512 MB each.
    """

    model: str
    counts: tuple[int, ...]
    others: tuple[str, ...]
    few: tuple[int, ...]
    small_memory: tuple[int, ...]
    batch: int = 128
    seq: int = 1024


FULL: Final = Scope(
    "opt-13b",
    (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
    ("opt-1.3b", "opt-6.7b", "opt-30b", "opt-66b", "llama2-7b", "llama2-13b", "llama2-70b"),
    (256, 1024),
    (256, 1024, 8192),
)
QUICK: Final = Scope("opt-tiny", (8, 16), ("opt-nano",), (8,), (16,), batch=8, seq=128)


def write(
    folder: Path, scope: Scope, seed: int, save_sweep: Save, save_recovery: Save,
    say: Callable[[str], object], *, thorough: bool = False,
) -> list[Claim]:  # fmt: skip
    """Simulate everything and write `report.md` and its figures.

    Args:
        folder: which is there.
        save_sweep, save_recovery: draw rows into a file.
        say: is told what is being done.
        thorough: searches take as long as they take.

    Raises:
        OSError: when the folder cannot be written to.
    """
    every = list(methods(thorough=thorough).values())
    found: dict[str, list[Row]] = {}
    for model, counts in (
        (scope.model, scope.counts),
        *((model, scope.few) for model in scope.others),
    ):
        say(f"{model} on {', '.join(map(str, counts))} devices")
        found[model] = sweep(
            find_model(model), scope.batch, scope.seq, "paper", counts, every,
            element=BF16, ps=PsRates(), seed=seed,
        )  # fmt: skip
    say("devices of 512 MB")
    small = [
        Row(count, outcome)
        for count in scope.small_memory
        for outcome in methods()["cleave"].outcomes(_small(scope, count, seed))
    ]
    evidence = Evidence(scope.model, found, small)
    claims = [
        faster_than_dtfm(evidence),
        uses_more_devices(evidence, find_model(scope.model).layers * scope.batch),
        comparable_to_cloud(evidence),
        recovers_faster(evidence),
        bytes_fall(evidence),
        fits_small_memory(evidence),
    ]
    rows = found[scope.model]
    last = scope.few[-1]
    title = f"{scope.model}, batch {scope.batch}, {scope.seq} tokens, bf16, paper fleet"
    save_sweep(folder / "sweep.png", rows, title)
    save_recovery(
        folder / "recovery.png", [row for row in rows if row.devices == last],
        f"{title}, {last} devices",
    )  # fmt: skip
    (folder / "report.md").write_text(_report(scope, claims, last), encoding="utf-8")
    return claims


def _small(scope: Scope, count: int, seed: int) -> Conditions:
    rates = fleet_rates("paper", count, dtype="bf16")
    devices = [replace(device, memory_bytes=512_000_000) for device in rates]
    return Conditions(find_model(scope.model), scope.batch, scope.seq, devices, BF16, seed=seed)


def _report(scope: Scope, claims: Sequence[Claim], last: int) -> str:
    lines = [
        "# Published claims, simulated",
        "",
        f"One training step of {scope.batch} sequences of {scope.seq} tokens in bf16. Devices are "
        "those of the paper's fleet: 5-7 TFLOP/s, 10-100 MB/s down, 5-10 MB/s up, 1-3 GB of "
        "memory, no latency; the parameter server's network card is unlimited. Cloud GPUs reach "
        "50 % of their bf16 peak. A method *fits* when every device holds what it must; times of "
        "methods that do not fit are what they would take with memory enough.",
        "",
        "| claim | verdict |",
        "| --- | --- |",
        *(f"| {claim.title} | {claim.verdict.value} |" for claim in claims),
    ]
    for number, claim in enumerate(claims, 1):
        lines += ["", f"## {number}. {claim.title}", "", f"**{claim.verdict.value}.** "]
        lines[-1] += claim.reading
        lines += ["", "| " + " | ".join(claim.columns) + " |", "| --- " * len(claim.columns) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in claim.rows]
    lines += [
        "",
        "## Figures",
        "",
        f"![{scope.model}: time, bytes and PS bandwidth against devices](sweep.png)",
        "",
        "Seconds, bytes of a device and the PS's bandwidth for one step, against the number of "
        "devices. Hollow points do not fit the devices' memory.",
        "",
        f"![{scope.model}: recovery](recovery.png)",
        "",
        f"Seconds that losing one of {last} devices adds to a step, from when that is noticed.",
        "",
    ]
    return "\n".join(lines)
