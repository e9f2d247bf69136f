"""`cleave simulate`: compare training methods by simulation."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from cleave.errors import UsageError
from cleave_cli.options import Json, check_plot, writes
from cleave_cli.render.sweep import Churn, show_sweep
from cleave_cli.render.text import Csv, Form, form_of, write_csv

if TYPE_CHECKING:
    from simulator.sweep import Row

_ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def simulate(
    model: Annotated[str, Option(help="Model name, such as opt-13b.")] = "opt-13b",
    devices: Annotated[
        str, Option(help="Device counts: 256, a list 32,256, or 32..8192 (doubling).")
    ] = "32..8192",
    methods: Annotated[
        str,
        Option(help="Methods, separated by commas. `cloud` means all clouds, `all` all methods."),
    ] = "all",
    fleet: Annotated[
        str, Option(help="Built-in fleet without its size, or a TOML file.")
    ] = "paper",
    batch: Annotated[int, Option(help="Sequences per step.")] = 128,
    seq: Annotated[int, Option(help="Tokens per sequence.")] = 1024,
    dtype: Annotated[str, Option(help="Dtype: bf16, fp16 or fp32.")] = "bf16",
    stragglers: Annotated[
        float, Option(help="Share of devices slowed to a tenth of their speed.")
    ] = 0.0,
    ps_gbit: Annotated[
        float, Option(help="Speed of the PS's network card each way in Gbit/s; 0 means unlimited.")
    ] = 0.0,
    ps_gflops: Annotated[
        float, Option(help="GFLOP/s of the PS, for a loss that no device computes.")
    ] = 500.0,
    coding: Annotated[
        str, Option(help="Count payloads as compressed, for all methods: auto, on, off.")
    ] = "off",
    losses_per_hour: Annotated[
        float, Option(help="Device losses per device and hour, for the step time with losses.")
    ] = 0.1,
    detection_s: Annotated[
        float, Option("--detection-s", help="Seconds until a lost device is noticed.")
    ] = 5.0,
    utilisation: Annotated[float, Option(help="Share of its peak that a cloud GPU reaches.")] = 0.5,
    seed: Annotated[int, Option(min=0, help="Random seed for all searches.")] = 0,
    thorough: Annotated[
        bool,
        Option(
            "--thorough", help="Run all trials of DT-FM's search, instead of stopping after 20 s."
        ),
    ] = False,
    jobs: Annotated[
        int, Option("--jobs", "-j", min=1, help="Number of processes on this machine.")
    ] = 1,
    ray: Annotated[
        str | None,
        Option(
            help="Simulate on the Ray cluster at this host:port; `auto` uses this node's cluster."
        ),
    ] = None,
    plot: Annotated[Path | None, Option(help="Plot the step times (PNG, SVG or PDF).")] = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Compare the simulated step times of several training methods.

    Examples:

      cleave simulate --model opt-13b --devices 32..8192

      cleave simulate --model llama2-7b --devices 256 --methods cleave,cleave-2d,cloud --json

      cleave simulate --model opt-13b --devices 1024 --ps-gbit 10 --csv
    """
    from cleave.planner.coding import CodingPolicy, coded_ratio
    from cleave.planner.plan import ElementBytes, PsRates
    from cleave.workload.registry import find_model
    from simulator.sweep import cells, chosen, workers
    from simulator.sweep import methods as known_methods
    from simulator.sweep import simulate as rows_of

    if dtype not in _ELEMENT_BYTES:
        raise UsageError(f"--dtype is {dtype!r}; use one of {', '.join(_ELEMENT_BYTES)}")
    form = form_of(as_json=as_json, as_csv=as_csv)
    if not ps_gbit >= 0:
        raise UsageError(f"--ps-gbit must be 0 (unlimited) or more, not {ps_gbit}")
    if not 0 < ps_gflops < math.inf:
        raise UsageError(f"--ps-gflops must be more than 0 GFLOP/s, not {ps_gflops}")
    for option, amount in (("--losses-per-hour", losses_per_hour), ("--detection-s", detection_s)):
        if not 0 <= amount < math.inf:
            raise UsageError(f"{option} must be 0 or more, not {amount}")
    if not 0 < utilisation <= 1:
        raise UsageError(f"--utilisation must be more than 0 and at most 1, not {utilisation}")
    if plot is not None:
        check_plot(plot)
    policy = CodingPolicy.of(coding)
    card = ps_gbit * 1e9 / 8 or math.inf
    known = known_methods(utilisation, thorough=thorough)
    by = workers(jobs, ray)
    every = cells(
        find_model(model),
        batch,
        seq,
        fleet,
        counts(devices),
        list(known.values()) if methods == "all" else chosen(methods, known),
        element=ElementBytes(_ELEMENT_BYTES[dtype], _ELEMENT_BYTES[dtype]),
        ps=PsRates(card, card),
        dtype=dtype,
        stragglers=stragglers,
        seed=seed,
        ps_flops_per_s=ps_gflops * 1e9,
        coding=policy,
    )
    with _progress(len(every)) as done:
        found = rows_of(every, by, lambda cell: done(cell.name))
    rows = [row for of_cell in found for row in of_cell]
    churn = Churn(losses_per_hour / 3600, detection_s)
    conditions = [
        f"{model}, batch {batch}, {seq} tokens, {dtype}, {fleet} fleet"
        f"{', 1-3 GB each' if fleet == 'paper' else ''}",
        f"PS card {f'{ps_gbit:g} Gbit/s' if ps_gbit else 'unlimited'}",
    ]
    if policy is not CodingPolicy.OFF:
        conditions.append(f"coding {policy.value}: {coded_ratio(dtype):g} of the bytes")
    if stragglers:
        conditions.append(f"{stragglers:.0%} stragglers")
    if any(row.devices is None for row in rows):
        conditions.append(f"clouds at {utilisation:.0%} of peak")
    title = ", ".join(conditions)
    if form is Form.JSON:
        document = {
            "model": model, "batch": batch, "seq": seq, "dtype": dtype, "fleet": fleet,
            "stragglers": stragglers, "ps_bytes_per_s": None if math.isinf(card) else card,
            "ps_flops_per_s": ps_gflops * 1e9, "coding": policy.value,
            "coded_ratio": coded_ratio(dtype), "seed": seed, "thorough": thorough,
            "losses_per_s": churn.losses_per_s, "detection_s": detection_s,
            "rows": [_record(row, churn) for row in rows],
        }  # fmt: skip
        typer.echo(json.dumps(document))
    elif form is Form.CSV:
        write_csv([_record(row, churn) for row in rows])
    else:
        show_sweep(rows, churn, title)
    if plot is not None:
        from cleave_cli.render.plots import save_sweep

        with writes(plot):
            save_sweep(plot, rows, title)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """Show a progress bar until the block ends. Call the result with each simulation's name."""
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=16),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("simulating", total=total)
        yield lambda name: bar.update(task, advance=1, description=name)


def counts(text: str) -> list[int]:
    """Parse `--devices`, such as `32,256` or `32..8192`; return the sorted numbers of devices.

    A range contains its first number, the repeated doublings of it, and its last number. For
    example, `32..100` means 32, 64 and 100.
    """
    found: list[int] = []
    try:
        for part in text.split(","):
            first, dots, last = part.partition("..")
            count = int(first)
            if dots and int(last) < count:
                raise ValueError
            found.append(count)
            while dots and count < int(last):
                count = min(2 * count, int(last))
                found.append(count)
        if min(found) < 1:
            raise ValueError
    except ValueError:
        raise UsageError(
            f"--devices is {text!r}; use a number, a list (32,256), or a range (32..8192)"
        ) from None
    return sorted(set(found))


def _record(row: Row, churn: Churn) -> dict[str, Any]:
    outcome = row.outcome
    return {
        "devices": row.devices,
        "method": outcome.method,
        "setting": outcome.setting,
        "devices_used": outcome.devices_used,
        "step_s": _number(outcome.step_s),
        "parts_s": {part.name: _number(part.seconds) for part in outcome.parts},
        "download_bytes": outcome.download_bytes,
        "upload_bytes": outcome.upload_bytes,
        "fits": outcome.fits,
        "misfit": outcome.misfit,
        "memory_offered_bytes": outcome.memory_offered_bytes,
        "memory_needed_bytes": outcome.memory_needed_bytes,
        "recovery_s": outcome.recovery_s,
        "recovery_parts_s": {part.name: part.seconds for part in outcome.recovery},
        "step_with_losses_s": churn.step_s(outcome),
        "ps_egress_bytes_per_s": outcome.ps_egress_bytes_per_s,
        "ps_ingress_bytes_per_s": outcome.ps_ingress_bytes_per_s,
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
