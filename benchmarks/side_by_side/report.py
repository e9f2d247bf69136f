"""Write the report on a file of rows: `docs/side-by-side.md` with its plots.

    python -m benchmarks.side_by_side.report docs/side-by-side.json [--out docs]

All figures on the page come from the rows and from the results of `carrying`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks.side_by_side.carrying import Carried, read
from benchmarks.side_by_side.method import Method, Way
from benchmarks.side_by_side.order import default_order
from benchmarks.side_by_side.plots import draw, summarize
from benchmarks.side_by_side.results import Results
from benchmarks.side_by_side.row import Key, Row
from benchmarks.side_by_side.setting import Fault, Setting
from benchmarks.side_by_side.simulated import LIMIT, pairs
from benchmarks.side_by_side.tables import difference, heading, named, other, reference_of, title
from benchmarks.side_by_side.tables import settings_of as settings
from benchmarks.side_by_side.verdicts import disturbed, goals, short, survival, winners

PAGE: Final = "side-by-side.md"
PLOT: Final = "images/side-by-side.svg"
LINKS: Final = "side-by-side-links.json"
"""File next to the page with the cost of links on the machines of its rows."""
SUMMARY: Final = "images/side-by-side-summary.svg"
"""The plot in the README."""

_ABOUT: Final = """\
# Side by side

This page compares Cleave with the usual alternatives on the same work: the same model, batches,
dtype, optimizer and losses, on four processes with one thread each, behind the same links. It is
generated from [the rows](side-by-side.json) by:

```sh
python -m benchmarks.side_by_side.hivemind_environment
python -m benchmarks.side_by_side --json docs/side-by-side.json --keep
python -m benchmarks.side_by_side.carrying --json docs/side-by-side-links.json
python -m benchmarks.side_by_side.carrying --link 100/20 --mb 50 --json docs/side-by-side-links.json
python -m benchmarks.side_by_side.report docs/side-by-side.json
```

Each device is a network namespace behind a link with the rates in the table, and a round trip of
20 ms to this machine. Devices reach one another through this machine: over the uplink of one and
the downlink of the other. If a table states no cores, all processes share the cores of one machine.
A step's arithmetic then takes as long on four devices as on one, and a device that waits leaves its
share of the cores to others. If a table states cores, each device has its own share. Cleave's
server is a fifth process, without a link.

Seconds are the median of the steps after the first, or one such step if a step takes two minutes.
With *, the first step took four minutes and is the one that counts: it includes seconds of other
work, and *off* says less, because no update precedes it. For `stages`, which plans in the first
step, the first step never counts. Bytes are those of the busiest device, counted at its interface.
Memory is the peak resident memory after the first step, of the largest device with all its
processes; memory that processes share counts once. *Off* is the largest relative difference between
a step's loss and that of plain PyTorch in fp32.
"""

_MEANING: Final = (
    "`plain` is one process on all cores. `ddp` is DDP over gloo; with `halved`, gradients are "
    "bf16. `fsdp` is FSDP2. `pipeline` is `torch.distributed.pipelining`. `hivemind` is "
    "hivemind's optimizer, which averages gradients in every step; `fp16` and `8bit` are its "
    "compressions. `stages` and `tiles` are Cleave; `off` means without compression. `resident` is "
    "`stages` with the trained state on devices; with `apart`, the server's own computer computes "
    "no layers. *Links* is the time that the busiest device's link needs for its bytes, down and "
    "then up."
)

_WHY: Final = """
The duration of a step is the time for its arithmetic, plus the transfers that do not overlap with
it. Behind slow links, the amount of traffic decides which method is the fastest. DDP and hivemind
exchange the gradients of the whole model, and FSDP2 its weights as well, whatever the batch size. A
pipeline sends activations between stages, and its devices keep their layers permanently. Stages
send these activations too, and in each step also the weights and gradients of each device's layers,
because a device stores nothing that would be lost with it. Adapters are small. With adapters, each
device has all layers for some of the sequences, and activations travel to the server, which
computes the loss, and back. Tiles send every operand of every product. Where links limit a step,
Cleave may leave devices out, and give all layers to a device on the server's own computer.
"""

_CARRYING: Final = """
The links are emulated: the cores that compute also carry the packets. A sum over gloo, without
other work, takes this long (`python -m benchmarks.side_by_side.carrying`):

{table}

If that is longer than at the links' rate, the methods that send most would be faster on real
network cards than in these rows. The simulator does not model this cost, so it is not compared with
those methods.
"""


def page(rows: Sequence[Row], sums: Sequence[Carried] = ()) -> str:
    """Return the report on rows.

    Args:
        rows: the measured rows.
        sums: cost of links; sums from machines without rows are ignored.
    """
    parts = [_ABOUT, "\n".join([*_measured(rows), *_missing(rows)])]
    if short_of := [*goals(rows)]:
        parts += ["## The goals", "\n".join(f"- {text}" for text in short_of)]
    if won := [*winners(rows)]:
        parts += [
            "## Which method is the fastest, and why",
            _WHY,
            "\n".join(f"- {text}" for text in won),
        ]
        machines = {row.machine for row in rows}
        if here := [one for one in sums if one.machine in machines]:
            parts.append(_CARRYING.format(table="\n".join(_sums(here))))
        parts.append(f"![Seconds a step by method and link]({PLOT})")
    if any(row.setting.fault is not Fault.NONE for row in rows):
        parts += ["## One device is stopped, or killed", *_faults(rows)]
    parts += ["## All figures", _MEANING]
    for setting in settings(rows):
        if setting.fault is Fault.NONE:
            parts += [f"### {title(setting)}", heading(setting) + ".", _table(setting, rows)]
    if found := pairs(rows):
        lines = [
            f"| {named(pair.row.key)} | {pair.row.step_s:.1f} | {pair.step_s:.1f} | "
            f"{pair.off:+.0%} | {'yes' if pair.right else '**no**'} |"
            for pair in found
        ]
        parts += [
            "## Compared with the simulator",
            "\n".join(
                [
                    f"| row | measured, s | simulated, s | off | within {LIMIT:.0%} |",
                    "| --- | ---: | ---: | ---: | --- |",
                    *lines,
                ]
            ),
        ]
    parts += ["## How each was run", "\n".join(_best(rows))]
    if failed := [*_failed(rows)]:
        parts += ["## Rows that did not finish", "\n".join(failed)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _sums(sums: Sequence[Carried]) -> Iterator[str]:
    yield "| links | MB summed | s | s at their rate | s of all cores |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for one in sums:
        yield (
            f"| {one.link} | {one.mb} | {one.took_s:.1f} | {one.rate_s:.1f} | {one.cores_s:.1f} |"
        )


def _measured(rows: Sequence[Row]) -> Iterator[str]:
    for machine in dict.fromkeys(row.machine for row in rows):
        mine = [row for row in rows if row.machine == machine]
        dates = sorted(row.date[:10] for row in mine)
        commits = ", ".join(f"`{commit}`" for commit in dict.fromkeys(row.commit for row in mine))
        when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
        yield f"Measured on {machine}, {when}, commit {commits}: {len(mine)} rows."


def _missing(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a sentence on the number of missing rows, if any."""
    there = {row.key for row in rows}
    wanted = default_order()
    if missing := [key for key in wanted if key not in there]:
        yield (
            f"**{len(missing)} of the {len(wanted)} rows are not measured yet.** "
            f"The same command continues with them, the most important ones first."
        )


def _table(setting: Setting, rows: Sequence[Row]) -> str:
    lines = [
        "| method | s per step | of `plain` | links, s | MB down | MB up | server, MB | device, MB "
        "| off |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    mine = [row for row in rows if row.setting == setting]
    for row in sorted(mine, key=lambda row: row.step_s if row.measured else float("inf")):
        alone = other(row, rows, Method(Way.PLAIN, row.method.dtype))
        reference = reference_of(row, rows)
        cells = [
            f"`{row.method.name}`",
            f"{row.step_s:.1f}{'*' if row.counts_first else ''}"
            if row.measured
            else row.ending.value,
            f"{row.step_s / alone.step_s:.2f}" if row.measured and alone else "",
            f"{row.links_s:.1f}" if row.links_s else "",
            _mb(max(row.down_bytes, default=0)),
            _mb(max(row.up_bytes, default=0)),
            _mb(row.server_peak_bytes),
            _mb(row.device_peak_bytes),
            f"{difference(row, reference):.0e}" if reference and row.losses else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.0f}" if nbytes >= 1e7 else f"{nbytes / 1e6:.1f}" if nbytes else ""


def _faults(rows: Sequence[Row]) -> Iterator[str]:
    by_key = {row.key: row for row in rows}
    for setting, methods in disturbed(rows):
        lines = ["| method | stopped for a minute | killed |", "| --- | --- | --- |"]
        for method in methods:
            told = (
                survival(by_key.get(Key(method, replace(setting, fault=fault))), rows)
                for fault in (Fault.STOP, Fault.KILL)
            )
            lines.append(f"| `{method.name}` | {' | '.join(told)} |")
        yield (
            f"{heading(setting)}. The last of four devices is stopped or killed in the middle of a "
            f"step. One whole step follows. Cleave's server, and the first device of the other "
            f"methods, are not disturbed."
        )
        yield "\n".join(lines)


def _best(rows: Sequence[Row]) -> Iterator[str]:
    said: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.best:
            faults = ", stopped or killed" if row.setting.fault is not Fault.NONE else ""
            where = said.setdefault((row.method.name, row.best), [])
            where.append(f"{title(row.setting)}{faults}")
    methods = [method for method, _ in said]
    for (method, best), where in said.items():
        # A method with the same settings everywhere needs no list of places.
        places = "; ".join(dict.fromkeys(where)) if methods.count(method) > 1 else ""
        yield f"- `{method}`: {best}{f' ({places})' if places else ''}."
    limits = sorted({row.limit_s for row in rows})
    yield f"- The time limit for each row was {' or '.join(f'{limit:g} s' for limit in limits)}."


def _failed(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if not row.whole and row.setting.fault is Fault.NONE:
            yield (
                f"- {named(row.key)}: {row.ending.value} after {row.took_s:.0f} s: "
                f"{short(row.reason)}"
            )


def main() -> None:
    """Write the page and the plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    options = parser.parse_args()
    rows = Results(options.rows).rows
    if not rows:
        parser.error(f"{os.fspath(options.rows)!r} has no rows; measure some first")
    (options.out / "images").mkdir(parents=True, exist_ok=True)
    (options.out / PAGE).write_text(page(rows, read(options.out / LINKS)))
    draw(rows, options.out / PLOT)
    summarize(rows, options.out / SUMMARY)


if __name__ == "__main__":
    main()
