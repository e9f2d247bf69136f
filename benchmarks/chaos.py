"""Train under faults: every step finishes, every product is right, no bit of a loss changes.

    python -m benchmarks.chaos [--quick] [--backend torch] [--seed 1]

Trains OPT-tiny for 200 steps on 12 device processes behind a proxy. The proxy delays, duplicates,
truncates, corrupts, reorders and drops messages, and cuts, silences and slows links. Processes are
killed and stopped. Every step loses a tenth of the devices. All faults are drawn from the seed
(`tests/faults`) and logged.

With `--backend invariant` products do not depend on the tiling, and losses must equal those of an
undisturbed run to the last bit. With `torch` or `numpy` every product is compared with its rounding
bound, and the first 20 losses must agree with plain PyTorch within 1e-4.

The check takes most of a step's time, because it computes each product again in fp64.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported
# A dozen processes share the machine; numpy's threads would spin waiting for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import logging
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import cleave
from benchmarks.common import make_trainer, resident_bytes
from cleave.errors import FleetError
from cleave.fleet.fleet import Fleet
from cleave.planner.plan import Planner
from cleave.planner.tiles.planner import TilePlanner
from cleave.server.fleet_server import Server
from cleave.training.loop.job import JobSpec
from cleave.training.loop.trainer import Trainer
from tests.faults.exact import FullDepthPlanner, InvariantBackend
from tests.faults.ledger import Ledger, audit, placements
from tests.faults.plan import LOSSES, OF_MESSAGES, Fault, RandomFaults, losses
from tests.faults.processes import Processes
from tests.faults.proxy import Proxy, Setting
from tests.log_lines import logged

FULL_STEPS: Final = 200
LOST_SHARE: Final = 0.1
FIRST_LOSSES: Final = 20
LOSS_LIMIT: Final = 1e-4
GROWTH_LIMIT: Final = 0.05
GROWTH_STEPS: Final = 150
_WINDOW: Final = 10  # steps per median of memory
_LONGEST_STEP_S: Final = 300.0

LOSS_WEIGHTS: Final = {Fault.KILL: 4.0, Fault.CUT: 4.0, Fault.STOP: 1.0, Fault.SILENCE: 1.0}
"""Weights of faults; losses by kill and cut are noticed at once, the others only by silence."""

CHANCES: Final = {
    Fault.DELAY: 1e-3,
    Fault.REORDER: 1e-3,
    Fault.DUPLICATE: 2e-4,
    Fault.TRUNCATE: 1e-4,
    Fault.CORRUPT_PAYLOAD: 4e-4,
    Fault.CORRUPT_HEADER: 1e-4,
    Fault.DROP: 1e-4,
    Fault.SLOW: 5e-5,
}
"""Probability of each fault per message; a step has some thousand messages."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a run."""

    steps: int
    devices: int
    seed: int
    backend: str
    without: frozenset[Fault]
    log: Path


@dataclass
class Outcome:
    """The outcome of a run under faults.

    Attributes:
        losses: losses of the finished steps.
        error: why the run ended early; empty if it did not.
        ps_bytes: resident memory of the parameter server after each step.
        faults: number of occurrences of each fault.
        blocks: number of results that the scheduler accepted.
        reissued, late: counts as in `FleetCounters`.
        wall_s, slowest_s: seconds of all steps together, and of the slowest.
    """

    losses: list[float] = field(default_factory=list)
    error: str = ""
    ps_bytes: list[int] = field(default_factory=list)
    faults: Counter[Fault] = field(default_factory=Counter)
    blocks: int = 0
    reissued: int = 0
    late: int = 0
    wall_s: float = 0.0
    slowest_s: float = 0.0


class Verdicts:
    """Prints each result with its limit, and records whether all limits were met."""

    def __init__(self) -> None:
        self.met = True

    def say(self, text: str, met: bool) -> None:
        self.met &= met
        print(f"  {text}: {'met' if met else 'NOT met'}", flush=True)


def undisturbed(job: JobSpec, options: Options) -> list[float]:
    """Return the losses of the same training without faults."""
    if options.backend != "invariant":  # plain PyTorch
        return run_steps(make_trainer(job, None), min(options.steps, FIRST_LOSSES))
    with cleave.emulated(1, backend=InvariantBackend()) as fleet:
        fleet.planner = FullDepthPlanner()
        return run_steps(make_trainer(job, fleet), options.steps)


def run_steps(trainer: Trainer, steps: int) -> list[float]:
    return [trainer.train_step().loss for _ in range(steps)]


def among_faults(job: JobSpec, options: Options, ledger: Ledger) -> Outcome:
    """Train under all faults that the options allow."""
    outcome = Outcome()
    chances = {fault: p for fault, p in CHANCES.items() if fault not in options.without}
    weights = {fault: w for fault, w in LOSS_WEIGHTS.items() if fault not in options.without}
    invariant = options.backend == "invariant"
    planner: Planner = FullDepthPlanner() if invariant else TilePlanner()
    with (
        placements(ledger),
        options.log.open("w") as log,
        logged(logging.StreamHandler(log)),
        cleave.serve() as served,
        Proxy(
            served.url,
            lambda slot, connection: RandomFaults(options.seed, connection, chances),
            Setting(options.seed),
            lambda slot, fault: processes.strike(slot, fault),
            lambda slot: processes.gone(slot),
        ) as proxy,
        Processes(
            proxy.url, options.devices, ("--backend", options.backend, "--probe")
        ) as processes,
    ):
        audit(served.live, ledger, InvariantBackend() if invariant else None)
        trainer = make_trainer(job, Fleet(served.live, planner))
        messages = 0  # approximate number per device and step
        try:
            for step in range(options.steps):
                before, told = proxy.passed.total(), len(proxy.happened)
                for loss in losses(
                    options.seed, step, options.devices, LOST_SHARE, weights, messages
                ):
                    proxy.arm(loss)
                with watched(served, step + 1):
                    record = trainer.train_step()
                messages = (proxy.passed.total() - before) // options.devices
                outcome.losses.append(record.loss)
                outcome.ps_bytes.append(resident_bytes(os.getpid()))
                outcome.wall_s += record.wall_s
                outcome.slowest_s = max(outcome.slowest_s, record.wall_s)
                for happening in proxy.happened[told:]:
                    print(f"step {step + 1}: {happening}", file=log)
                print(
                    f"step {step + 1}: loss {record.loss!r}, {record.wall_s:.1f} s, "
                    f"{record.reissued} reissued, {served.fleet.device_count} devices, "
                    f"{outcome.ps_bytes[-1] / 1e6:.0f} MB",
                    file=log,
                    flush=True,
                )
        except FleetError as error:
            outcome.error = f"step {step + 1} did not finish: {error}"
        finally:
            outcome.faults = proxy.counts()
            spent = served.fleet.counters()
            outcome.blocks, outcome.reissued, outcome.late = (
                spent.blocks,
                spent.reissued,
                spent.late,
            )
    return outcome


class watched:  # noqa: N801 - reads as a statement
    """Close a fleet that does not finish in time, which ends everything waiting for it.

    Args:
        served: the fleet.
        step: number of the current step, for the message.
    """

    def __init__(self, served: Server, step: int) -> None:
        self._served = served
        self._timer = threading.Timer(_LONGEST_STEP_S, self._end)
        self._step = step

    def _end(self) -> None:
        print(f"step {self._step} took longer than {_LONGEST_STEP_S:.0f} s", flush=True)
        self._served.close()

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()


def growth(ps_bytes: list[int]) -> float:
    """Return the share by which the PS's memory grew over the last `GROWTH_STEPS` steps."""
    last = ps_bytes[-GROWTH_STEPS:]
    return statistics.median(last[-_WINDOW:]) / statistics.median(last[:_WINDOW]) - 1


def report(options: Options, plain: list[float], outcome: Outcome, ledger: Ledger) -> bool:
    """Print every result; return whether all limits were met."""
    verdicts = Verdicts()
    done = len(outcome.losses)
    if outcome.error:
        print(f"  {outcome.error}")
    happened = ", ".join(f"{fault.value} {n}" for fault, n in outcome.faults.most_common())
    lost = sum(n for fault, n in outcome.faults.items() if fault in LOSSES)
    print(f"  faults: {outcome.faults.total()} ({happened}); {lost} devices lost on purpose")
    print(
        f"  {outcome.reissued} units reissued, {outcome.late} late answers; a step took "
        f"{outcome.wall_s / max(1, done):.1f} s, the slowest {outcome.slowest_s:.1f} s"
    )
    verdicts.say(f"{done} of {options.steps} steps finished", done == options.steps)
    if options.backend == "invariant":
        same = sum(a == b for a, b in zip(outcome.losses, plain, strict=False))
        text = f"{same} of {done} losses bit-equal with the undisturbed run"
        verdicts.say(text, 0 < same == done)
        text = f"{ledger.different} elements of {ledger.gemms} GEMMs differ from one whole product"
        verdicts.say(text, ledger.different == 0)
    else:
        pairs = list(zip(outcome.losses, plain, strict=False))
        worst = max((abs(a - b) / abs(b) for a, b in pairs), default=float("inf"))
        text = f"first {len(pairs)} losses within {worst:.1e} of plain PyTorch"
        verdicts.say(f"{text} (at most {LOSS_LIMIT:g})", worst <= LOSS_LIMIT)
    verdicts.say(
        f"{ledger.beyond} elements of {ledger.gemms} GEMMs beyond their rounding bound; the worst "
        f"error is {ledger.worst:.2%} of it",
        ledger.beyond == 0,
    )
    verdicts.say(
        f"{ledger.miscounted} elements lost or counted twice; {ledger.placed} results placed, "
        f"{outcome.blocks} accepted",
        ledger.miscounted == 0 and ledger.placed == outcome.blocks,
    )
    if done > GROWTH_STEPS:
        grown = growth(outcome.ps_bytes)
        text = f"PS memory {grown:+.2%} over the last {GROWTH_STEPS} steps"
        verdicts.say(f"{text} (below {GROWTH_LIMIT:.0%})", grown < GROWTH_LIMIT)
    else:
        print(f"  PS memory: not judged, it needs more than {GROWTH_STEPS} steps")
    return verdicts.met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=FULL_STEPS)
    parser.add_argument("--devices", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=("invariant", "torch", "numpy"), default="invariant")
    parser.add_argument("--quick", action="store_true", help="12 steps, 6 devices")
    names = [fault.value for fault in (*OF_MESSAGES, Fault.SLOW, *LOSSES)]
    parser.add_argument("--without", choices=names, nargs="+", default=[], help="leave faults out")
    parser.add_argument("--log", type=Path, help="where every fault and step is written")
    given = parser.parse_args()
    log = given.log or Path(tempfile.mkdtemp(prefix="cleave-chaos-")) / "log.txt"
    steps, devices = (12, 6) if given.quick else (given.steps, given.devices)
    without = frozenset(Fault(name) for name in given.without)
    options = Options(steps, devices, given.seed, given.backend, without, log)

    # Short runs use the full run's schedule, because its warm-up is a tenth of the steps.
    planned = max(steps, FULL_STEPS)
    # Bits are compared on small batches because exact products are slow. With so few tokens,
    # rounding alone changes losses by 3e-4 within 20 steps; with a usual batch by 2e-5.
    batch, seq = (1, 64) if options.backend == "invariant" else (4, 128)
    job = JobSpec(
        "opt-tiny", steps=planned, batch=batch, seq=seq, checkpoint_every=0, method="tiles"
    )
    print(
        f"opt-tiny, {steps} steps of {batch} x {seq} tokens, {devices} device processes, "
        f"backend {options.backend}, seed {options.seed}; log: {log}",
        flush=True,
    )
    began_s = time.perf_counter()
    plain = undisturbed(job, options)
    print(f"  undisturbed: {len(plain)} steps in {time.perf_counter() - began_s:.0f} s", flush=True)
    ledger = Ledger()
    outcome = among_faults(job, options, ledger)
    sys.exit(0 if report(options, plain, outcome, ledger) else 1)


if __name__ == "__main__":
    main()
