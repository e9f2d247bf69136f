"""Compare Cleave with its alternatives, on four processes behind the same links.

    python -m benchmarks.side_by_side --json docs/side-by-side.json            # the whole report
    python -m benchmarks.side_by_side --list                                   # list its rows
    python -m benchmarks.side_by_side --links 100/20 --tokens 1024 \\
        --methods plain:fp32,stages:fp32,ddp:fp32 [--lora 16] [--faults none,stop,kill]

Methods train the same model with the same batches, dtype and optimizer, one method after another.
Each device is a process with one thread (hivemind: with its helpers) in its own network namespace,
behind a link with limited rates and a 20 ms round trip (root, Linux). Devices reach one another
through this machine, over the sender's uplink and the receiver's downlink. They share all cores or,
with `--cores`, have a fixed part each, like separate machines. `--methods` takes the methods of
`benchmarks.side_by_side.method`. SmolLM2-135M is a model of that size with random weights.

The first step does not count: it plans, makes graphs, threads and groups, and sends data that then
stays. One counted step is enough if it takes two minutes. If the first step took four minutes, it
counts itself, except for Cleave. Bytes are counted by interfaces, including headers. Memory is the
peak resident memory after the first step, of a device with all its processes. A fault (`stop`:
SIGSTOP for a minute; `kill`: SIGKILL) hits the last device in the middle of the third step; one
more step follows. Losses must match `plain:fp32` of the same setting: within 1e-4 in fp32, 2e-2 in
bf16.

With `--json` rows are kept in a file. Rows from the same commit (the last that changed Cleave, or
for other methods the last that changed how they are run) are not measured again; with `--keep` rows
of any commit are kept. A method that does not install, fails, or exceeds `--limit-s` gets a row
with the reason. `python -m benchmarks.side_by_side.report FILE` makes the report's tables and
plots. Ends with 1 if an undisturbed row has other losses or failed.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NoReturn

from benchmarks.links import limited_namespace, namespaces_missing
from benchmarks.side_by_side.measure import measure
from benchmarks.side_by_side.method import Method, Way
from benchmarks.side_by_side.order import OPT, default_order
from benchmarks.side_by_side.results import Results, measured_commit, measured_with
from benchmarks.side_by_side.row import Key, Row
from benchmarks.side_by_side.setting import Fault, Link, Setting, usual_seq
from benchmarks.side_by_side.tables import agrees, named, reference_of, show

_ROOT = Path(__file__).parents[2]


@contextmanager
def _log_folder(given: Path | None) -> Iterator[Path]:
    """Yield a folder for logs: a new one in the given folder, or a temporary one."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield Path(tempfile.mkdtemp(prefix="side-by-side-", dir=given.absolute()))
        return
    made = Path(tempfile.mkdtemp(prefix="cleave-benchmark-"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _ending(number: int, _: object) -> NoReturn:
    """End all started processes, ignoring further signals."""
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    raise SystemExit(128 + number)


def chosen(options: argparse.Namespace) -> list[Key]:
    """Return the rows that the command line asks for, in order.

    Raises:
        ValueError: when the command line asks for an unknown method or setting.
    """
    if not options.methods:
        return default_order()
    methods = [Method.of(text) for text in options.methods.split(",")]
    seq = options.seq or usual_seq(options.tokens, options.devices)
    settings = [
        Setting(
            options.model,
            options.tokens,
            seq,
            Link.of(link),
            options.lora,
            Fault(fault),
            options.devices,
            options.round_trip_ms,
            options.memory,
            options.cores,
        )
        for link in options.links.split(",")
        for fault in options.faults.split(",")
    ]
    return [Key(method, setting) for setting in settings for method in methods]


def sensible(key: Key) -> bool:
    """Return whether a row can be measured: a fault needs a device process."""
    return key.setting.fault is Fault.NONE or key.method.way.needs_links


def _read_arguments() -> tuple[argparse.Namespace, list[Key]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default="", help="none for the whole report")
    parser.add_argument("--links", default="100/20", help="Mbit/s down/up, separated by commas")
    parser.add_argument("--model", default=OPT, help="of the registry, or smollm2-135m")
    parser.add_argument("--tokens", type=int, default=1024, help="a step")
    parser.add_argument("--seq", type=int, help="tokens of a sequence; 256, or 512 of many")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters alone")
    parser.add_argument("--faults", default="none", help="none, stop, kill")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--round-trip-ms", type=float, default=20.0)
    parser.add_argument("--memory", default="2GB", help="what each device offers to Cleave")
    parser.add_argument("--cores", type=float, default=0.0, help="for each device; 0: all share")
    parser.add_argument("--steps", type=int, default=2, help="that are counted")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="for each row")
    parser.add_argument("--json", type=Path, help="the file that rows are kept in")
    parser.add_argument("--keep", action="store_true", help="keep rows of other commits as well")
    parser.add_argument("--again", action="store_true", help="also measure rows that are there")
    parser.add_argument("--retry", action="store_true", help="measure rows again that failed")
    parser.add_argument("--list", action="store_true", help="print which rows there are, and end")
    parser.add_argument("--logs", type=Path, help="a folder in which all output is kept")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps is {options.steps}; give 1 or more")
    try:
        keys = [key for key in chosen(options) if sensible(key)]
    except ValueError as error:
        parser.error(str(error))
    return options, keys


def _measured(
    keys: Sequence[Key], options: argparse.Namespace, results: Results, logs: Path
) -> Iterator[Row]:
    """Yield each row, from the file or newly measured."""
    commits = {way: measured_commit(_ROOT, measured_with(way)) for way in Way}
    for number, key in enumerate(keys, 1):
        commit = commits[key.method.way]
        row = None if options.again else results.find(key, None if options.keep else commit)
        if row is not None and not (options.retry and not row.whole):
            yield row
            continue
        folder = logs / f"{number}-{key.method.name.replace(':', '-')}"
        folder.mkdir()
        with ExitStack() as stack:
            setting = key.setting
            count = setting.devices if key.method.way.needs_links else 0
            delay_s = setting.round_trip_ms / 2000
            namespaces = [
                stack.enter_context(
                    limited_namespace(
                        device, setting.link.down, setting.link.up, delay_s, setting.cores
                    )
                )
                for device in range(count)
            ]
            row = measure(
                key,
                namespaces,
                counted=options.steps,
                limit_s=options.limit_s,
                logs=folder,
                commit=commit,
            )
        results.add(row)
        how = f"{row.step_s:.2f} s a step" if row.measured else "no step"
        ended = "" if row.whole else f", {row.ending.value}: {row.reason}"
        print(f"{named(key)}: {how}{ended}, {row.took_s:.0f} s in all", file=sys.stderr, flush=True)
        if row.output:
            print(row.output, file=sys.stderr, flush=True)
        yield row


def main() -> None:
    """Run the benchmark; see the module's docstring."""
    options, keys = _read_arguments()
    if options.list:
        print("\n".join(named(key) for key in keys))
        return
    if any(key.method.way.needs_links for key in keys) and (missing := namespaces_missing()):
        sys.exit(f"there are no rate-limited links here: {missing}; only plain and virtual work")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _ending)
    results = Results(options.json)
    with ExitStack() as stack:
        logs = stack.enter_context(_log_folder(options.logs))
        rows = [*_measured(keys, options, results, logs)]
    show(rows)
    calm = [row for row in rows if row.setting.fault is Fault.NONE]
    right = all(row.whole and agrees(row, reference_of(row, rows)) for row in calm)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
