"""Fuzz the codec and the parameter server's state machine.

    python -m benchmarks.fuzz [--inputs N] [--seed S] [--failures FILE]

Fuzzing is property-based with a corpus: an input with a new outcome (message, state, effect,
refusing rule) is kept and mutated further. Line coverage is not measured, because tracing in Python
3.11 takes ten times as long as the codec.

Most inputs go to the codec, which must return a message that encodes to the same bytes, or raise
`ProtocolError`. The others go through the codec into a session manager with several hostile
sessions and an honest device (`tests.fuzzing.Arena`). After every thousand inputs the hostile
sessions go silent, and the honest device must finish all work with the right result. Compressed
arrays have properties of their own (`tests/test_coding.py`).

The exit code is 1 if anything else happens; the inputs that caused it are written to a file.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.fuzzing import Arena, Mutator, decoded

CODEC_SHARE = 0.7
ARENA_INPUTS = 1000
SLOW_S = 2.0
"""Limit of an input in seconds of this thread's CPU time; anything longer is a hang."""


@dataclass
class Report:
    """Counts, failures and the slowest input."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, bytes]] = field(default_factory=list)
    slowest_s: float = 0.0
    slowest: bytes = b""
    done: int = 0

    def timed(self, took_s: float, data: bytes, where: str) -> None:
        """Keep the slowest input; an input that is too slow is a failure."""
        if took_s > self.slowest_s:
            self.slowest_s, self.slowest = took_s, data
        if took_s > SLOW_S:
            self.failures.append((f"{where}: took {took_s:.1f} s of processor time", data))


class Bar:
    """A progress bar that costs almost nothing between its updates."""

    def __init__(self, progress: Progress, name: str, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task(name, total=total)
        self._waiting = 0

    def step(self) -> None:
        """Count a finished input."""
        self._waiting += 1
        if self._waiting == 1000:
            self.flush()

    def flush(self) -> None:
        """Show the inputs counted since the last update."""
        self._progress.advance(self._task, self._waiting)
        self._waiting = 0


def fuzz_codec(inputs: int, seed: int, report: Report, bar: Bar) -> Mutator:
    """Fuzz the codec alone."""
    mutator = Mutator(Random(seed))
    for _ in range(inputs):
        data = mutator.next()
        began_s = time.thread_time()
        try:
            outcome = decoded(data)
        except Exception:  # noqa: BLE001 - what is looked for
            outcome = f"FAILED {traceback.format_exc(limit=-2)}"
            report.failures.append((f"codec: {outcome}", data))
        report.timed(time.thread_time() - began_s, data, "codec")
        report.outcomes[f"codec: {outcome}"] += 1
        mutator.keep(data, outcome)
        bar.step()
    bar.flush()
    return mutator


def fuzz_server(inputs: int, seed: int, mutator: Mutator, report: Report, bar: Bar) -> None:
    """Fuzz hostile sessions of a session manager, in arenas of a thousand inputs."""
    left = inputs
    number = 0
    while left > 0:
        number += 1
        random = Random(seed * 1_000_003 + number)
        arena = Arena(random, thorough=number % 50 == 0)
        mutator.random = random
        arena.mutator = mutator
        inputs_here = min(left, ARENA_INPUTS)
        left -= inputs_here
        try:
            for _ in range(inputs_here):
                began_s = time.thread_time()
                outcome = arena.step()
                report.timed(time.thread_time() - began_s, arena.input, f"arena {number}")
                report.outcomes[f"server: {outcome}"] += 1
                mutator.keep(arena.input, outcome)
                bar.step()
            arena.finish()
        except Exception:  # noqa: BLE001 - what is looked for
            reason = f"arena {number} of seed {seed}: {traceback.format_exc(limit=-4)}"
            report.failures.append((reason, arena.input))
        report.done += arena.done
    bar.flush()


def show(report: Report, inputs: int, took_s: float, most: int = 25) -> None:
    """Print the counts of the most common outcomes."""
    for part in ("codec", "server"):
        counts = [(o, n) for o, n in report.outcomes.most_common() if o.startswith(part)]
        total = sum(n for _, n in counts)
        print(f"\n{part}: {total} inputs, {len(counts)} outcomes")
        for outcome, times in counts[:most]:
            print(f"{times:>9}  {outcome.removeprefix(f'{part}: ')}")
        if len(counts) > most:
            print(f"{sum(n for _, n in counts[most:]):>9}  {len(counts) - most} others")
    print(f"\n{report.done} GEMMs of the honest device's server done, all of them right")
    print(f"slowest input: {report.slowest_s * 1e3:.1f} ms of processor time,")
    print(f"  {len(report.slowest)} bytes, {report.slowest[:40].hex()}...")
    print(f"{inputs} inputs in {took_s:.0f} s; {len(report.failures)} crashes, hangs or faults")


def main() -> int:
    """Parse the command line, run, and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures.txt"))
    options = parser.parse_args()
    report = Report()
    began_s = time.perf_counter()
    for_codec = int(options.inputs * CODEC_SHARE)
    for_server = options.inputs - for_codec
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn()) as progress:
        codec_bar = Bar(progress, "codec", for_codec)
        server_bar = Bar(progress, "server", for_server)
        mutator = fuzz_codec(for_codec, options.seed, report, codec_bar)
        fuzz_server(for_server, options.seed, mutator, report, server_bar)
    show(report, options.inputs, time.perf_counter() - began_s)
    if not report.failures:
        return 0
    lines = [f"{reason}\ninput: {data.hex()}\n" for reason, data in report.failures[:100]]
    options.failures.write_text("\n".join(lines))
    print(f"the inputs are in {options.failures}; the first:\n{report.failures[0][0]}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
