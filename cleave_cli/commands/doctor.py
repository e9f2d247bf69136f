"""`cleave doctor`: check this machine's requirements, and whether a model fits in memory."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cleave.errors import CleaveError, UsageError
from cleave_cli.options import human_bytes
from cleave_cli.render.narrow import WIDTH
from cleave_cli.render.say import printable

if TYPE_CHECKING:
    from cleave_cli.fitting import Fit
    from cleave_cli.machine_checks import Check

_ELEMENT_BYTES = {"bf16": 2, "fp32": 4}
_ANY_FLOPS_PER_S = 1e12  # throughput of the server; any value, because only memory is checked
_CHECKPOINTS = 3  # on disk at once: two retained checkpoints, and the next during its write


def doctor(
    model: Annotated[
        str, typer.Option(help="Whether this model fits: a name, as opt-1.3b, or a folder.")
    ] = "",
    fleet: Annotated[
        str, typer.Option(help="On these devices: paper-N, home-mix-N, ..., or a TOML file.")
    ] = "home-mix-9",
    batch: Annotated[int, typer.Option(help="Sequences per step.")] = 8,
    seq: Annotated[int, typer.Option(help="Tokens per sequence.")] = 512,
    dtype: Annotated[str, typer.Option(help="bf16 or fp32.")] = "bf16",
    lora: Annotated[int, typer.Option(help="Rank of adapters; 0: the whole model.")] = 0,
    lora_bits: Annotated[
        int, typer.Option(help="Width of the elements of frozen weights, 4 or 8; 0: as --dtype.")
    ] = 0,
    server_memory: Annotated[
        float, typer.Option(help="GB of the server's memory; 0: that of this machine.")
    ] = 0.0,
    runs: Annotated[Path, typer.Option(help="Folder for run folders.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Say what this machine lacks, and what a model needs of a server and its devices.

    Ends with 1 where something that Cleave needs is missing, or the model does not fit.

    Examples:

      cleave doctor

      cleave doctor --model opt-1.3b --fleet home-mix-9 --batch 8 --seq 512

      cleave doctor --model llama2-7b --fleet phones.toml --lora 8 --lora-bits 4
    """
    from cleave_cli.machine_checks import Verdict, machine_checks

    checks = list(machine_checks(runs))
    good = all(check.verdict is not Verdict.FAILED for check in checks)
    document: dict[str, Any] = {"checks": [_as_json(check) for check in checks]}
    if not as_json:
        for check in checks:
            _show(check)
    if model:
        fits, disk = _fits(model, fleet, batch, seq, dtype, lora, lora_bits, server_memory, runs)
        document |= {"fits": [_fit_json(each) for each in fits], "disk": _as_json(disk)}
        good &= any(each.fits for each in fits) and disk.verdict is Verdict.OK
        if not as_json:
            _show_fits(f"{model}, {batch} x {seq} tokens in {dtype}, on {fleet}", fits)
            _show(disk)
    if as_json:
        typer.echo(json.dumps(document | {"good": good}))
    if not good:
        raise typer.Exit(1)


def _fits(
    model: str,
    fleet: str,
    batch: int,
    seq: int,
    dtype: str,
    lora: int,
    lora_bits: int,
    server_memory: float,
    runs: Path,
) -> tuple[list[Fit], Check]:
    """Check whether a step by each method fits in memory, and whether checkpoints fit on disk.

    Raises:
        UsageError: when the model, the fleet or a number is invalid.
    """
    from cleave.machine.sensors import total_memory_bytes
    from cleave.planner.coding import CodingPolicy, payload_rates
    from cleave.planner.plan import ElementBytes, Method, PsRates
    from cleave.planner.stages.model import PsCompute
    from cleave.planner.tiles.planner import TilePlanner
    from cleave.workload.models.build import resolve_model
    from cleave.workload.stages import StageSizes
    from cleave.workload.step import step_gemms
    from cleave_cli.fitting import checkpoint_bytes, fit
    from cleave_cli.plan_question import PlanQuestion, adapters_of, fleet_devices, rates_of

    if dtype not in _ELEMENT_BYTES:
        raise UsageError(f"--dtype is {dtype!r}; use one of {', '.join(_ELEMENT_BYTES)}")
    if not 0 <= server_memory < float("inf"):
        raise UsageError(f"--server-memory is {server_memory}; give GB, 0 or more")
    memory_bytes = round(server_memory * 1e9) or total_memory_bytes()
    if memory_bytes is None:
        raise CleaveError("this system does not tell its memory; give --server-memory GB")
    spec, sent, card = resolve_model(model).spec, _ELEMENT_BYTES[dtype], PsRates()
    gemms = step_gemms(spec, batch, seq, fused_siblings=True)
    sizes = StageSizes(spec, seq, sent, sent, adapters_of(lora, lora_bits))
    devices, in_fp32 = (
        rates_of(fleet_devices(fleet, 0.0, each), CodingPolicy.OFF, card)
        for each in (dtype, "fp32")
    )
    question = PlanQuestion(
        sizes,
        batch,
        dtype,
        gemms,
        TilePlanner(card),
        ElementBytes(sent, sent),
        payload_rates(devices, dtype),
        in_fp32,
        PsCompute(_ANY_FLOPS_PER_S, 0.0, card),
    )
    forecasts = question.choose(Method.AUTO).forecasts
    fits = [fit(each, sizes, batch, sent, memory_bytes) for each in forecasts]
    return fits, _room(checkpoint_bytes(sizes), runs)


def _room(one_bytes: int, runs: Path) -> Check:
    from cleave_cli.machine_checks import Check, Verdict, free_bytes

    free, needed = free_bytes(runs), _CHECKPOINTS * one_bytes
    what = (
        f"checkpoints of {human_bytes(one_bytes)} need {human_bytes(needed)} in {str(runs)!r} "
        f"while the third is written; {human_bytes(free)} are free"
    )
    if free >= needed:
        return Check(Verdict.OK, what)
    return Check(Verdict.FAILED, what, "free some space, give --runs, or --save-total-limit 1")


def _show(check: Check) -> None:
    first = f"{check.verdict.value:<9}"
    typer.echo(
        textwrap.fill(
            printable(check.what), WIDTH, initial_indent=first, subsequent_indent=" " * len(first)
        )
    )
    if check.advice:
        typer.echo(textwrap.indent(textwrap.fill(check.advice, WIDTH - len(first)), " " * 9))


def _show_fits(title: str, fits: list[Fit]) -> None:
    typer.echo("\n" + textwrap.fill(printable(title), WIDTH))
    typer.echo(f"{'':<9}{'device':>11}{'server':>11}")
    for each in fits:
        numbers = [human_bytes(n) if n else "-" for n in (each.device_bytes, each.server_bytes)]
        said = "does not fit" if not each.fits else "fits"
        if each.fits and each.options:
            said += f" with {' and '.join(each.options)}"
        typer.echo(f"{each.method.value:<9}" + "".join(f"{n:>11}" for n in numbers) + f"  {said}")
        if each.reason:
            typer.echo(textwrap.indent(textwrap.fill(each.reason, WIDTH - 9), " " * 9))
    typer.echo(
        textwrap.fill(
            "device, server: memory of the device that needs most, and of the server; "
            "`cleave plan` says how long a step takes.",
            WIDTH,
        )
    )


def _as_json(check: Check) -> dict[str, Any]:
    return asdict(check) | {"verdict": check.verdict.value}


def _fit_json(each: Fit) -> dict[str, Any]:
    return asdict(each) | {"method": each.method.value}
