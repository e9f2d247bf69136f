"""Training among faults of every kind: every step finishes, and no bit of any loss changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import cleave
from benchmarks.common import make_trainer
from cleave.fleet.fleet import Fleet
from tests.faults.exact import FullDepthPlanner, InvariantBackend
from tests.faults.ledger import Ledger, audit, placements
from tests.faults.plan import Direction, Fault, Script, Seen
from tests.faults.processes import Processes
from tests.faults.proxy import Proxy, Setting
from tests.integration.processes import training_job

LEAST_STEPS, MOST_STEPS = 3, 200
PROBING = 48
"""Messages each way at most while a device is probed."""


def of(kind: str, direction: Direction = Direction.DOWN) -> Callable[[Seen], bool]:
    """Messages of this type, once the device is at work."""
    return lambda seen: seen.index > PROBING and seen.kind == kind and seen.direction is direction


PUT, RUN, RESULT = of("put"), of("run"), of("result", Direction.UP)

SCRIPTS: dict[int, list[tuple[Fault, Callable[[Seen], bool]]]] = {
    # By device, over all of its sessions.
    0: [
        (Fault.DELAY, RUN),
        (Fault.REORDER, RUN),
        (Fault.DUPLICATE, RESULT),
        (Fault.CORRUPT_PAYLOAD, RESULT),
        (Fault.CORRUPT_PAYLOAD, PUT),
        (Fault.TRUNCATE, RESULT),
    ],
    1: [
        (Fault.SLOW, PUT),
        (Fault.DROP, PUT),
        (Fault.DROP, RESULT),
        (Fault.DROP, RUN),
        (Fault.DUPLICATE, RUN),
        (Fault.KILL, RESULT),
        (Fault.CORRUPT_HEADER, PUT),
        (Fault.TRUNCATE, PUT),
    ],
    2: [(Fault.DUPLICATE, PUT), (Fault.STOP, RUN)],
    3: [(Fault.CUT, RESULT), (Fault.SILENCE, RESULT)],
}


def test_every_kind_of_fault_changes_no_bit_of_any_loss(
    corpus_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A device that says nothing is waited for so long; what it is here changes no outcome.
    monkeypatch.setattr("cleave.protocol.limits.SILENCE_S", 3.0)
    monkeypatch.setattr("cleave.protocol.limits.HEARTBEAT_S", 0.3)
    job = replace(training_job(corpus_file, MOST_STEPS, "opt-nano"), batch=2, seq=32)
    scripts = {slot: Script(lines) for slot, lines in SCRIPTS.items()}
    expected = {fault for lines in SCRIPTS.values() for fault, _ in lines}
    assert expected == set(Fault)

    ledger = Ledger()
    ours: list[float] = []
    with (
        placements(ledger),
        cleave.serve() as served,
        Proxy(
            served.url,
            lambda slot, connection: scripts[slot],
            Setting(longest_delay_s=0.05),
            lambda slot, fault: processes.strike(slot, fault),
            lambda slot: processes.gone(slot),
        ) as proxy,
        Processes(proxy.url, len(SCRIPTS)) as processes,
    ):
        audit(served.live, ledger, InvariantBackend())
        trainer = make_trainer(job, Fleet(served.live, FullDepthPlanner()))
        while trainer.step < (MOST_STEPS if expected - set(proxy.counts()) else LEAST_STEPS):
            # Steps are short beside a restart: without this they all could pass during one.
            served.fleet.wait_for(len(SCRIPTS), timeout=120)
            ours.append(trainer.train_step().loss)
        blocks = served.fleet.counters().blocks
        reissued = served.fleet.counters().reissued

    assert set(proxy.counts()) == expected
    assert reissued > 0
    assert ledger.gemms > 0
    assert (ledger.miscounted, ledger.beyond, ledger.different) == (0, 0, 0)
    assert ledger.placed == blocks

    undisturbed = cleave.emulated(1, backend=InvariantBackend())
    undisturbed.planner = FullDepthPlanner()
    reference = make_trainer(job, undisturbed)
    assert ours == [reference.train_step().loss for _ in ours]
