"""`cleave doctor`: check this machine, and whether a model fits in memory."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from cleave.training.loop.job import DEFAULT_BATCH, DEFAULT_SEQ
from cleave_cli.options import Json, human_bytes
from cleave_cli.render.text import WIDTH, echo_filled, printable

if TYPE_CHECKING:
    from cleave_cli.machine_checks import Check, Fit


def doctor(
    model: Annotated[str, Option(help="Model: a name such as opt-1.3b, or a folder.")] = "",
    fleet: Annotated[
        str, Option(help="Fleet: paper-N, home-mix-N, ..., or a TOML file.")
    ] = "home-mix-9",
    batch: Annotated[int, Option(help="Sequences per step.")] = DEFAULT_BATCH,
    seq: Annotated[int, Option(help="Tokens per sequence.")] = DEFAULT_SEQ,
    dtype: Annotated[str, Option(help="Dtype: bf16 or fp32.")] = "fp32",
    lora: Annotated[int, Option(help="Rank of adapters; 0 trains the whole model.")] = 0,
    lora_bits: Annotated[int, Option(help="Bits per frozen weight, 4 or 8; 0 uses --dtype.")] = 0,
    server_memory: Annotated[
        float, Option(help="Server's memory in GB; 0 uses this machine's.")
    ] = 0.0,
    runs: Annotated[Path, Option(help="Folder for run folders.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """Check this machine, and how much memory a model needs on a server and its devices.

    The exit status is 1 if a requirement is missing or the model does not fit.

    Examples:

      cleave doctor

      cleave doctor --model opt-1.3b --fleet home-mix-9 --batch 8 --seq 512

      cleave doctor --model llama2-7b --fleet phones.toml --lora 8 --lora-bits 4
    """
    from cleave_cli.machine_checks import Verdict, machine_checks, model_fits

    fits: list[Fit] = []
    if model:  # first, to report invalid options before the checks, which take seconds
        fits, disk = model_fits(
            model, fleet, batch, seq, dtype, lora, lora_bits, server_memory, runs
        )
    checks = list(machine_checks(runs))
    good = all(check.verdict is not Verdict.FAILED for check in checks)
    document: dict[str, Any] = {"checks": [_as_json(check) for check in checks]}
    if not as_json:
        for check in checks:
            _show(check)
    if model:
        document["fits"] = [asdict(each) | {"method": each.method.value} for each in fits]
        document["disk"] = _as_json(disk)
        good &= any(each.fits for each in fits) and disk.verdict is Verdict.OK
        if not as_json:
            _show_fits(f"{model}, {batch} x {seq} tokens in {dtype}, on {fleet}", fits)
            _show(disk)
    if as_json:
        typer.echo(json.dumps(document | {"good": good}))
    if not good:
        raise typer.Exit(1)


def _show(check: Check) -> None:
    text, indent = printable(check.what), " " * 9
    first = f"{check.verdict.value:<9}"
    typer.echo(textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=indent))
    if check.advice:
        typer.echo(textwrap.indent(textwrap.fill(check.advice, WIDTH - 9), indent))


def _show_fits(title: str, fits: list[Fit]) -> None:
    echo_filled(printable(title), before="\n")
    typer.echo(f"{'':<9}{'device':>11}{'server':>11}")
    for each in fits:
        numbers = [human_bytes(n) if n else "-" for n in (each.device_bytes, each.server_bytes)]
        said = "fits" if each.fits else "does not fit" if each.server_bytes else "not possible"
        if each.fits and each.options:
            said += f" with {' and '.join(each.options)}"
        typer.echo(f"{each.method.value:<9}" + "".join(f"{n:>11}" for n in numbers) + f"  {said}")
        if each.reason:
            typer.echo(textwrap.indent(textwrap.fill(each.reason, WIDTH - 9), " " * 9))
    echo_filled(
        "device, server: memory of the device that needs most, and of the server; "
        "`cleave plan` predicts the time of a step."
    )


def _as_json(check: Check) -> dict[str, Any]:
    return asdict(check) | {"verdict": check.verdict.value}
