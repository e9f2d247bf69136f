"""Compare figures of other benchmarks at an earlier commit and now, on one machine.

    python -m benchmarks.before_after COMMIT [--rounds 2] [--only step_overhead,...] [--json]

Clones the earlier commit into a temporary folder and runs each benchmark there and here in turn, so
that other load on the machine affects both. A figure is the median of its rounds. A ratio above 1
means slower now. Exit code 1 if a ratio is above 1.03.

Later features that change plans are turned off, so that both sides do the same work.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
LIMIT: Final = 1.03
_NUMBER: Final = r"([\d.,]*\d)"


@dataclass(frozen=True)
class Figure:
    """A figure that a benchmark prints.

    Attributes:
        name: name of the figure.
        pattern: regular expression that finds the figure.
        rate: whether larger is better.
    """

    name: str
    pattern: str
    rate: bool = False


BENCHMARKS: Final[dict[str, tuple[tuple[str, ...], tuple[Figure, ...]]]] = {
    "step_overhead": (
        ("--pairs", "3"),
        (
            Figure("fp32 step over plain PyTorch", rf"fp32: {_NUMBER} \("),
            Figure("bf16 step over plain PyTorch", rf"bf16: {_NUMBER} \("),
        ),
    ),
    "loopback_step": (
        ("--pairs", "7", "--soak", "0", "--devices", "2"),
        (
            Figure("step over plain PyTorch", rf"against plain PyTorch: {_NUMBER} \("),
            Figure("a small GEMM, ms", rf"small GEMM: {_NUMBER} ms"),
        ),
    ),
    "websocket_throughput": (
        (),
        (Figure("bytes a second over bare websockets'", rf"moves {_NUMBER} \(", rate=True),),
    ),
    "emulator_scale": (
        (),
        (Figure("events a second", rf"events, {_NUMBER} a second", rate=True),),
    ),
}


SAME_PLANS: Final[dict[str, tuple[str, ...]]] = {"step_overhead": ("--coding", "off")}
"""Options of the current benchmarks that restore the earlier plans."""


@dataclass
class Row:
    """A figure before and after.

    Attributes:
        benchmark, figure: the benchmark and its figure.
        before, after: values of each round.
    """

    benchmark: str
    figure: Figure
    before: list[float]
    after: list[float]

    @property
    def ratio(self) -> float:
        """Return the slowdown; above 1 means slower now."""
        before, after = statistics.median(self.before), statistics.median(self.after)
        return before / after if self.figure.rate else after / before


PARTS: Final = {
    "emulator_scale": "from benchmarks.emulator_scale import events; events('its own strips', None)"
}
"""Code to run instead of the whole benchmark, to skip long parts without a figure."""


def printed(folder: Path, benchmark: str, options: tuple[str, ...]) -> str:
    """Run a benchmark in a checkout and return its output, ignoring the exit code."""
    part = PARTS.get(benchmark)
    program = ["-m", f"benchmarks.{benchmark}"] if part is None else ["-c", part]
    command = [sys.executable, *program, *options]
    return subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True).stdout


def number(figure: Figure, text: str) -> float:
    """Return a figure's value from a benchmark's output.

    Raises:
        RuntimeError: when the figure is missing.
    """
    found = re.search(figure.pattern, text)
    if found is None:
        raise RuntimeError(f"{figure.name} is not in what was printed:\n{text}")
    return float(found[1].replace(",", ""))


def measured(earlier: Path, names: list[str], rounds: int) -> Iterator[Row]:
    """Yield all figures of the named benchmarks."""
    for name in names:
        options, figures = BENCHMARKS[name]
        rows = [Row(name, figure, [], []) for figure in figures]
        for turn in range(rounds):
            sides = ((earlier, "before"), (ROOT, "after"))
            for folder, side in sides if turn % 2 == 0 else reversed(sides):
                same = SAME_PLANS.get(name, ()) if side == "after" else ()
                text = printed(folder, name, (*options, *same))
                for row in rows:
                    getattr(row, side).append(number(row.figure, text))
        yield from rows


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("commit", help="the earlier one")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default=",".join(BENCHMARKS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := [name for name in names if name not in BENCHMARKS]:
        parser.error(f"--only names {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    slower = False
    with tempfile.TemporaryDirectory(prefix="cleave-before-") as folder:
        subprocess.run(["git", "clone", "--quiet", str(ROOT), folder], check=True)
        subprocess.run(["git", "-C", folder, "checkout", "--quiet", options.commit], check=True)
        for row in measured(Path(folder), names, options.rounds):
            slower |= row.ratio > LIMIT
            before, after = (
                " ".join(f"{value:,.3f}" for value in values) for values in (row.before, row.after)
            )
            if options.json:
                values = {"before": row.before, "after": row.after, "ratio": row.ratio}
                print(
                    json.dumps({"figure": f"{row.benchmark}: {row.figure.name}", **values}),
                    flush=True,
                )
            else:
                print(
                    f"{row.benchmark}: {row.figure.name}: before {before}, after {after}; "
                    f"{row.ratio:.3f} times as slow (at most {LIMIT})",
                    flush=True,
                )
    sys.exit(slower)


if __name__ == "__main__":
    main()
