"""Output of forecasts for each method, of stage plans, and of crossings.

A crossing is the batch size from which a step by stages is faster than a step without devices.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from cleave.planner.plan import Method
from cleave.planner.stages.prediction import in_seconds
from cleave_cli.options import human_bytes
from cleave_cli.render.narrow import WIDTH

if TYPE_CHECKING:
    from cleave.planner.forecast import Crossing, CrossingPoint, Forecast, MethodChoice
    from cleave.planner.stages.model import StageModel, StagePlan


def show_methods(title: str, found: MethodChoice) -> None:
    """Print the forecast of each method as a table, and the chosen method."""
    typer.echo(textwrap.fill(title, WIDTH))
    typer.echo(f"\n{'':<8}{'a step':>9}{'down':>11}{'up':>11}{'device':>11}{'server':>11}")
    for each in found.forecasts:
        typer.echo("\n".join(_lines(each)))
    typer.echo(
        textwrap.fill(
            "A step is forward and backward pass: attention and loss are counted, the optimizer is "
            "not. down, up: what the server sends and gets; device, server: memory of the device "
            "that needs most, and of the server.",
            WIDTH,
        )
    )
    typer.echo("\n" + textwrap.fill(found.why, WIDTH))


def _lines(each: Forecast) -> Iterator[str]:
    if each.refused:
        yield f"{each.method.value:<8}{'-':>9}"
        yield from _indented(f"refused: {each.refused}")
        return
    remote = each.method is not Method.LOCAL
    numbers = [
        human_bytes(nbytes) if remote else "-"
        for nbytes in (each.downlink_bytes, each.uplink_bytes, each.device_bytes)
    ]
    numbers.append(human_bytes(each.server_bytes))
    yield f"{each.method.value:<8}{in_seconds(each.step_s):>9}" + "".join(
        f"{n:>11}" for n in numbers
    )
    yield from _indented(each.bottleneck)


def _indented(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  ")


def show_stages(model: StageModel, plan: StagePlan, names: Sequence[str]) -> None:
    """Print the layers and devices of each stage.

    Args:
        model: the planner's model, with the tokens of each micro-batch.
        plan: the plan of the stages.
        names: list of device names, indexed by device number.
    """
    said = (
        f"Stages: {len(model.tokens)} micro-batches of up to {max(model.tokens):,} tokens; each "
        f"device keeps what goes into its layers for as many of them as it has memory for; the "
        f"loss is computed {plan.where_loss}."
    )
    if model.in_parts:
        said += " No device holds a whole layer: each is two parts, its attention and its MLP."
    typer.echo("\n" + textwrap.fill(said, WIDTH))
    typer.echo(f"\n{'stage':>5}{'parts' if model.in_parts else 'layers':>10}{'devices':>9}  which")
    for number, stage in enumerate(plan.planned, 1):
        part = stage.slice
        layers = f"{stage.first + 1}-{stage.stop}" if part is None else f"loss {part.number + 1}"
        which = ", ".join(names[device] for device in stage.devices)
        which = textwrap.shorten(which, WIDTH - 26, placeholder=" ...")
        typer.echo(f"{number:>5}{layers:>10}{len(stage.devices):>9}  {which}")


def methods_json(found: MethodChoice) -> dict[str, Any]:
    """Return the forecasts of all methods as JSON."""
    return {
        "methods": [
            {
                "method": each.method.value,
                "step_s": None if each.refused else each.step_s,
                "downlink_bytes": each.downlink_bytes,
                "uplink_bytes": each.uplink_bytes,
                "bound_by": each.bottleneck,
                "device_memory_bytes": each.device_bytes,
                "server_memory_bytes": each.server_bytes,
                "refused": each.refused,
            }
            for each in found.forecasts
        ],
        "chosen": found.chosen.method.value,
        "why": found.why,
    }


def stages_json(model: StageModel, plan: StagePlan, names: Sequence[str]) -> dict[str, Any]:
    """Return a plan of stages as JSON. See `show_stages` for the arguments."""
    return {
        "micro_batches": list(model.tokens),
        "kept_batches": {names[device]: asdict(kept) for device, kept in plan.kept_batches.items()},
        "step_s": plan.step_s,
        "bound_by": plan.reason,
        "in_parts": model.in_parts,
        "stages": [
            {
                "first_layer": stage.first,
                "stop_layer": stage.stop,
                "loss": stage.loss,
                "slice": None if stage.slice is None else asdict(stage.slice),
                "devices": [
                    {"id": d, "name": names[d], "memory_bytes": plan.memory_bytes[d]}
                    for d in stage.devices
                ],
            }
            for stage in plan.planned
        ],
    }


def show_crossing(found: Crossing, sequence: int) -> None:
    """Print the step times for each batch size, and from which batch size stages are faster.

    Args:
        found: the crossing and the batch sizes that were tried.
        sequence: number of tokens in a sequence.
    """
    typer.echo(f"\n{'sequences':>9}{'tokens':>10}{'stages s':>10}{'alone s':>10}")
    for point in found.points:
        stages = "-" if point.stages_s == float("inf") else f"{point.stages_s:.4g}"
        tokens = f"{point.rows * sequence:,}"
        typer.echo(f"{point.rows:>9}{tokens:>10}{stages:>10}{point.local_s:>10.4g}")
    typer.echo(textwrap.fill(crossing_text(found, sequence), WIDTH))


def crossing_text(found: Crossing, sequence: int) -> str:
    """Return a sentence that states from how many tokens per step stages are faster.

    Stages are compared with a step on the server without devices.
    """

    def tokens(point: CrossingPoint) -> str:
        return f"{point.rows * sequence:,}"

    if found.above is None:
        most = found.points[-1]
        return f"Up to {tokens(most)} tokens a step the server alone is faster than stages."
    if found.below is None:
        return f"Stages beat the server alone from {tokens(found.above)} tokens a step on."
    return (
        f"Stages beat the server alone from about {tokens(found.above)} tokens a step on; with "
        f"{tokens(found.below)} the server alone is faster."
    )


def crossing_json(found: Crossing, sequence: int) -> dict[str, Any]:
    """Return a crossing as JSON, with the batch sizes that were tried."""
    above, below = found.above, found.below
    return {
        "from_tokens": above.rows * sequence if above is not None else None,
        "not_with_tokens": below.rows * sequence if below is not None else None,
        "points": [
            {
                "sequences": point.rows,
                "tokens": point.rows * sequence,
                "stages_s": point.stages_s if point.stages_s < float("inf") else None,
                "local_s": point.local_s,
            }
            for point in found.points
        ],
    }
