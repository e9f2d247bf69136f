"""`cleave footprint study`: test the claims of arXiv 2507.01803 in its simulated setup."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cleave.errors import UsageError, not_installed
from cleave.files import writable_folder, write_output
from cleave_cli.simulating import Jobs, RayAddress, simulation_progress


def study(
    out: Annotated[Path, typer.Option(help="Folder for the report and its figures.")] = Path(
        "footprint-report"
    ),
    seed: Annotated[int, typer.Option(min=0, help="Of every search.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only very small models, to try it out.")
    ] = False,
    jobs: Jobs = 1,
    ray: RayAddress = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Hold the claims of arXiv 2507.01803 against its simulated set-up, and write a report.

    Laptops and phones that train OPT-125M and OPT-1.3B against an NVIDIA A5000, alone, by DT-FM and
    by Cleave: energy, carbon in both views, and under which conditions which claim holds.

    Examples:

      cleave footprint study --out footprint-report

      cleave footprint study --jobs 4 --json > study.json
    """
    from cleave.energy.assumptions import load_assumptions
    from cleave.energy.typical import load_typical
    from simulator.paper import marked_quick
    from simulator.study.inputs import inputs
    from simulator.study.report import document, report
    from simulator.study.setups import published
    from simulator.study.setups import quick as small
    from simulator.study.study import steps_of
    from simulator.study.study import study as found_of
    from simulator.workers import workers

    try:
        from simulator.study.figures import save_all, tornado_files
    except ImportError:
        raise not_installed("a report with figures", "matplotlib", "train") from None
    by = workers(jobs, ray)
    try:
        writable_folder(out)  # report an error before the simulations start
    except OSError as error:
        raise UsageError(f"cannot write into {out}: {error.strerror}") from None
    scope = small() if quick else published()
    with simulation_progress(steps_of(scope)) as progress:
        found = found_of(scope, seed, by, progress.done)
        figures = inputs(scope, load_assumptions(), load_typical())
        progress.say("drawing")
        try:
            save_all(out, found)
            text = report(found, figures, (name for name, _, _ in tornado_files(found)))
            text = marked_quick(text) if quick else text
            write_output(out / "report.md", text.encode())
        except OSError as error:
            raise UsageError(f"cannot write into {out}: {error.strerror}") from None
    if as_json:
        typer.echo(json.dumps({**document(found, figures), "report": str(out / "report.md")}))
        return
    for each in found:
        best = each.best
        claims = ", ".join(
            f"{name} {held.verdict.value} ({held.central:.2g})"
            for name, held in (
                ("energy", best.found.energy),
                ("carbon attributed", best.found.attributed),
                ("sunk cost", best.found.sunk_cost),
            )
        )
        typer.echo(f"{each.setup.name}, {best.row.name}: {claims}")
    typer.echo(str(out / "report.md"))
