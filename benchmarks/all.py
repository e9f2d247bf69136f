"""Run every benchmark behind a published claim, and write one page of results.

    python -m benchmarks.all [--quick] [--only NAMES] [--out build/results.md] [--list]

Runs the benchmarks one after another, each with a time limit. The page states the machine, commit
and date, how each benchmark ended, and its last lines of output. Results are kept next to the page
(`.json`), so a benchmark that finished at the same commit with the same options is not run again.
`--quick` runs each benchmark's short form. The exit code is 1 if a benchmark failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from benchmarks.common import machine
from benchmarks.side_by_side.results import measured_commit, saved
from cleave.files import write_atomically

_TAIL: Final = 40  # lines of a benchmark's output on the page
_END_S: Final = 60.0
_ROOT: Final = Path(__file__).parents[1]


@dataclass(frozen=True)
class Benchmark:
    """A benchmark behind a published claim.

    Attributes:
        name: name of the module in `benchmarks`.
        limit_min: time limit in minutes.
        options: command-line options.
        quick: options of the short form; None means the same as `options`.
        left_out: why the benchmark is not run unattended; empty if it is.
    """

    name: str
    limit_min: int
    options: tuple[str, ...] = ()
    quick: tuple[str, ...] | None = None
    left_out: str = ""


_QUICK: Final = ("--quick",)
_FIGURELESS: Final = "makes pictures and has no figures"

BENCHMARKS: Final = (
    Benchmark("same_losses", 30),
    Benchmark("overview", 10),
    Benchmark("step_overhead", 30),
    Benchmark("websocket_throughput", 20),
    Benchmark("loopback_step", 30),
    Benchmark("light_guest", 10),
    Benchmark("first_minute", 30),
    Benchmark("large_model", 60),
    Benchmark("planner_gap", 30, quick=_QUICK),
    Benchmark("simulation", 90, quick=_QUICK),
    Benchmark("published_claims", 30, ("--jobs", "2"), quick=_QUICK),
    Benchmark("footprint_study", 10),
    Benchmark("emulator_fidelity", 60),
    Benchmark("servers", 60),
    Benchmark("server_memory", 30),
    Benchmark("servers_virtual", 60),
    Benchmark("stage_exact", 90, quick=_QUICK),
    Benchmark("resident_exact", 15, quick=_QUICK),
    Benchmark("resident_server", 6, quick=_QUICK),
    Benchmark("stage_fleets", 90),
    Benchmark("qlora", 45, quick=("--skip-real",)),
    Benchmark("trainer_options", 30),
    Benchmark("stage_audits", 90, quick=_QUICK),
    Benchmark("model_changes", 600, quick=("--sequences", "20", "--emulated")),
    Benchmark("stage_overhead", 45, quick=_QUICK),
    Benchmark("stage_costs", 60, quick=_QUICK),
    Benchmark("layer_memory", 20, quick=_QUICK),
    Benchmark("layer_graphs", 30, quick=_QUICK),
    Benchmark("gpu", 60, quick=("--models", "opt-125m")),
    Benchmark("emulator_scale", 60, quick=_QUICK),
    Benchmark("crash", 60, quick=_QUICK),
    Benchmark("exports", 30),
    Benchmark("verification", 90, quick=_QUICK),
    Benchmark("false_alarms", 120, quick=_QUICK),
    Benchmark("backend_devices", 20),
    Benchmark("recovery", 60),
    Benchmark("stragglers", 30),
    Benchmark("resident_churn", 30, quick=_QUICK),
    Benchmark("local_losses", 60, quick=(*_QUICK, "--steps", "40", "--every", "10")),
    Benchmark("local_updates", 60),
    Benchmark("chaos", 60, quick=_QUICK),
    Benchmark("coding", 90),
    Benchmark("fuzz", 60, quick=("--inputs", "20000")),
    Benchmark("dashboard", 20),
    Benchmark("knocking", 45, quick=_QUICK),
    Benchmark("hostile", 45, quick=_QUICK),
    Benchmark("between_homes", 15),
    Benchmark("web_kernels", 15),
    Benchmark("web_graphs", 20),
    Benchmark("android_kernels", 15),
    Benchmark(
        "real_fleet", 120,
        quick=("--devices", "2", "--link", "1000/1000", "--", "--model", "opt-tiny", "--batch", "4",
               "--seq", "64", "--dtype", "fp32", "--method", "stages"),
    ),
    Benchmark(
        "side_by_side", 1800, ("--json", "docs/side-by-side.json"),
        quick=("--model", "opt-tiny", "--links", "1000/1000", "--tokens", "512", "--seq", "64",
               "--methods", "plain:fp32,stages:fp32,ddp:fp32,pipeline:fp32"),
    ),
    Benchmark("smollm2", 60, left_out="needs the folder of the real model, which is not here"),
    Benchmark("dashboard_states", 20, left_out=_FIGURELESS),
    Benchmark("join_states", 60, left_out=_FIGURELESS),
    Benchmark("screenshots", 20, left_out=_FIGURELESS),
)  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """How a benchmark ended.

    Attributes:
        name: name of the module.
        command: command line, without the interpreter.
        code: exit code; None if the time limit was exceeded.
        took_s: duration in seconds.
        output: last lines of output.
        commit, date, machine: commit, date and machine of the run.
    """

    name: str
    command: str
    code: int | None
    took_s: float
    output: str
    commit: str
    date: str
    machine: str

    @property
    def good(self) -> bool:
        """Return whether the benchmark met all its limits."""
        return self.code == 0

    @property
    def how(self) -> str:
        """Return the outcome as text."""
        if self.code is None:
            return f"took longer than its limit, {self.took_s / 60:.0f} minutes"
        return "whole" if self.good else f"ended with {self.code}"


def run(benchmark: Benchmark, *, quick: bool, commit: str) -> Ended:
    """Run a benchmark until it ends or exceeds its time limit."""
    options = command_of(benchmark, quick=quick)
    began_s = time.monotonic()
    date = datetime.now(UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryFile("w+") as written:
        process = subprocess.Popen(
            [sys.executable, "-m", *options],
            stdout=written,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            cwd=_ROOT,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = process.wait(benchmark.limit_min * 60)
        except subprocess.TimeoutExpired:
            _end(process)
        except BaseException:
            _end(process)
            raise
        written.seek(0)
        output = written.read()
    shown = "\n".join(output.splitlines()[-_TAIL:])
    took_s = time.monotonic() - began_s
    command = f"python -m {' '.join(options)}"
    return Ended(benchmark.name, command, code, took_s, shown, commit, date, machine())


def _end(process: subprocess.Popen[str]) -> None:
    """End a benchmark; kill it and its children if it does not end in time."""
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def command_of(benchmark: Benchmark, *, quick: bool) -> list[str]:
    """Return a benchmark's module and options."""
    short = benchmark.quick if quick else None
    return [f"benchmarks.{benchmark.name}", *(benchmark.options if short is None else short)]


def page(ended: Sequence[Ended]) -> str:
    """Return the page of results."""
    lines = ["# Results", ""]
    for where in dict.fromkeys((one.machine, one.commit) for one in ended):
        dates = sorted(one.date[:10] for one in ended if (one.machine, one.commit) == where)
        when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
        lines.append(f"Measured on {where[0]}, commit `{where[1]}`, {when}.")
    lines += ["", "| benchmark | ended | minutes |", "| --- | --- | ---: |"]
    lines += [f"| `{one.command}` | {one.how} | {one.took_s / 60:.1f} |" for one in ended]
    for one in ended:
        lines += ["", f"## {one.name}", "", "```text", f"$ {one.command}", one.output, "```"]
    return "\n".join(lines) + "\n"


def _kept(path: Path) -> list[Ended]:
    return [Ended(**one) for one in json.loads(path.read_text())] if path.exists() else []


def main() -> None:
    """Run the benchmarks and write the page; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="short forms")
    parser.add_argument("--only", default="", help="names of benchmarks, separated by commas")
    parser.add_argument("--out", type=Path, default=Path("build/results.md"))
    parser.add_argument("--list", action="store_true", help="print what would run, and end")
    options = parser.parse_args()
    names = [name for name in options.only.split(",") if name]
    known = {benchmark.name for benchmark in BENCHMARKS}
    if unknown := [name for name in names if name not in known]:
        parser.error(f"--only {', '.join(unknown)}: there is no such benchmark; see --list")
    chosen = [
        benchmark
        for benchmark in BENCHMARKS
        if (benchmark.name in names if names else not benchmark.left_out)
    ]
    if options.list:
        for benchmark in chosen:
            print(f"python -m {' '.join(command_of(benchmark, quick=options.quick))}")
        return
    commit = measured_commit(_ROOT)
    record = options.out.with_suffix(".json")
    record.parent.mkdir(parents=True, exist_ok=True)
    kept = [one for one in _kept(record) if one.commit == commit and saved(commit)]
    for benchmark in chosen:
        command = f"python -m {' '.join(command_of(benchmark, quick=options.quick))}"
        if any(one.command == command and one.good for one in kept):
            continue
        kept = [one for one in kept if one.command != command]
        kept.append(run(benchmark, quick=options.quick, commit=commit))
        print(f"{command}: {kept[-1].how}, {kept[-1].took_s:.0f} s", file=sys.stderr, flush=True)
        write_atomically(record, json.dumps([asdict(one) for one in kept], indent=1).encode())
        options.out.write_text(page(kept))
    options.out.write_text(page(kept))
    sys.exit(0 if all(one.good for one in kept) else 1)


if __name__ == "__main__":
    main()
