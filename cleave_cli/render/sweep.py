"""Output of `cleave simulate`, which compares methods on fleets of several sizes."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Final

import typer

from cleave.planner.stages.prediction import in_seconds
from cleave_cli.options import human_bytes
from cleave_cli.render.text import WIDTH, echo_filled

if TYPE_CHECKING:
    from simulator.method import Outcome
    from simulator.sweep import Row


@dataclass(frozen=True, slots=True)
class Churn:
    """How often each device is lost and how long it takes to detect a loss."""

    losses_per_s: float
    detection_s: float

    def step_s(self, outcome: Outcome) -> float | None:
        """Return the mean step time in seconds with losses; None if not modelled or infinite."""
        from simulator.method import with_losses_s

        found = with_losses_s(outcome, self.losses_per_s, self.detection_s)
        return None if found is None or not math.isfinite(found) else found


_ABOUT_TILES: Final = (
    "cleave, cleave-2d: multiplications run one after another, with attention on devices, and "
    "messages cost the server no time. cleave also combines Linears that share an input. For "
    "times of actual training, use cleave plan. No method includes the server's optimizer."
)


def show_sweep(rows: Sequence[Row], churn: Churn, title: str) -> None:
    """Print simulation results as an 80-column table per fleet size."""
    echo_filled(title)
    for devices, group in groupby(rows, key=lambda row: row.devices):
        heading = "in a cloud" if devices is None else f"{devices:,} devices"
        typer.echo(
            f"\n{heading:<21}{'a step':>10}{'with losses':>13}{'used':>7}{'needs':>10}"
            f"{'down':>9}{'up':>10}"
        )
        for row in group:
            typer.echo("\n".join(_lines(row.outcome, churn)))
    echo_filled(
        f"{_ABOUT_LOSSES.format(churn.losses_per_s * 3600, churn.detection_s)}; used: devices "
        "that compute; needs: memory of the device that needs most; down, up: mean bytes per used "
        "device and step. All columns: --csv.",
        before="\n",
    )
    if any(row.outcome.method in ("cleave", "cleave-2d") for row in rows):
        echo_filled(_ABOUT_TILES)


_ABOUT_LOSSES: Final = (
    "with losses: mean step time if each device is lost {:g} times per hour, and a loss is "
    "detected after {:g} s"
)


def _lines(outcome: Outcome, churn: Churn) -> Iterator[str]:
    step = in_seconds(outcome.step_s) if math.isfinite(outcome.step_s) else "-"
    used = f"{outcome.devices_used:,}"
    needs, down, up = map(
        human_bytes, (outcome.memory_needed_bytes, outcome.download_bytes, outcome.upload_bytes)
    )
    yield (
        f"{outcome.method:<21}{step:>10}{_with_losses(outcome, churn):>13}{used:>7}{needs:>10}"
        f"{down:>9}{up:>10}"
    )
    said = [part for part in (_most(outcome), outcome.setting) if part]
    if outcome.misfit:
        said.insert(0, f"does NOT fit: {outcome.misfit}")
    yield from textwrap.wrap(
        "; ".join(said), WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
    )


def _with_losses(outcome: Outcome, churn: Churn) -> str:
    if outcome.recovery_s is None:
        return "-"
    step_s = churn.step_s(outcome)
    return "never ends" if step_s is None else in_seconds(step_s)


def _most(outcome: Outcome) -> str:
    if not math.isfinite(outcome.step_s):
        return ""
    part = max(outcome.parts, key=lambda p: p.seconds)
    return f"{part.name} {part.seconds / outcome.step_s:.0%}"
