"""A report on the published claims, each checked against simulated rows.

The claims and their known conditions are those of the Cleave paper (arXiv 2512.22142). Where a
condition is not known, several are tried, and the report gives the result of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

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
from simulator.method import Conditions
from simulator.report import marked_quick, report, sweep_reading
from simulator.sweep import Row, fleet_rates, sweep
from simulator.verdict import Claim

BF16: Final = ElementBytes(2, 2)
CARDS_GBPS: Final = (10, 100)
Save = Callable[[Path, Sequence[Row], str], None]


@dataclass(frozen=True, slots=True)
class Scope:
    """What is simulated for a report.

    Attributes:
        model: the model that is simulated with all `counts` of devices.
        others: models that are simulated with `few` devices only.
        small_memory: numbers of devices of 512 MB each.
        carded: numbers of devices behind each of `CARDS_GBPS`, by tiles and by stages.
        roomy: number of devices of 32 GB each.
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


def write(
    folder: Path, scope: Scope, seed: int, save_sweep: Save, save_recovery: Save,
    say: Callable[[str], object], *, thorough: bool = False,
) -> list[Claim]:  # fmt: skip
    """Simulate everything, and write `report.md` and its figures.

    Args:
        folder: an existing folder.
        save_sweep, save_recovery: functions that draw rows into a file.
        say: function that is called with a description of each part of the work.
        thorough: searches have no time limit.

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
    built = [methods()[name] for name in ("cleave", "cleave-stages")]
    carded = {}
    for gbps in CARDS_GBPS:
        say(f"{scope.model} behind {gbps} Gbit/s")
        card = gbps * 1e9 / 8
        carded[f"{gbps} Gbit/s"] = sweep(
            find_model(scope.model), scope.batch, scope.seq, "paper", scope.carded, built,
            element=BF16, ps=PsRates(card, card), seed=seed,
        )  # fmt: skip
    say("devices of 512 MB, devices of 32 GB")
    small = [
        Row(count, outcome)
        for count in scope.small_memory
        for method in built
        for outcome in method.outcomes(_with_memory(scope, count, 512_000_000, seed))
    ]
    much = _with_memory(scope, scope.roomy, 32_000_000_000, seed)
    roomy = [
        Row(scope.roomy, outcome)
        for method in every
        if not isinstance(method, Cloud)
        for outcome in method.outcomes(much)
    ]
    layers = {model: find_model(model).layers for model in found}
    evidence = Evidence(scope.model, found, small, carded, roomy, layers)
    claims = [
        faster_than_dtfm(evidence),
        uses_more_devices(evidence, layers[scope.model] * scope.batch),
        comparable_to_cloud(evidence),
        recovers_faster(evidence),
        bytes_fall(evidence),
        fits_small_memory(evidence),
        faster_with_memory(evidence),
    ]
    rows = found[scope.model]
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
    text = report("Published claims, simulated", _conditions(scope), claims, figures)
    if scope is QUICK:
        text = marked_quick(text)
    (folder / "report.md").write_text(text, encoding="utf-8")
    return claims


def _with_memory(scope: Scope, count: int, memory_bytes: int, seed: int) -> Conditions:
    rates = fleet_rates("paper", count, dtype="bf16")
    devices = [replace(device, memory_bytes=memory_bytes) for device in rates]
    return Conditions(find_model(scope.model), scope.batch, scope.seq, devices, BF16, seed=seed)


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
