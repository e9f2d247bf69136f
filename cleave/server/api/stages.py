"""A step by stages as an overview has it."""

from __future__ import annotations

from typing import Any, Final

from cleave.scheduler.stages.view import StageView, StepView

MAX_HOLDERS: Final = 2000
"""Devices that a reply has room for, those of all stages together; see `Overview`."""


def stages_answer(view: StepView | None) -> dict[str, Any] | None:
    """Return the map that the protocol defines; None where there is no step by stages."""
    if view is None:
        return None
    stages, room = [], MAX_HOLDERS
    for stage in view.stages:
        stages.append(_stage(stage, room))
        room = max(0, room - len(stage.holders))
    return {
        "batches": view.batches,
        "ended": view.ended,
        "repeated": view.repeated,
        "stages": stages,
    }


def _stage(stage: StageView, room: int) -> dict[str, Any]:
    return {
        "first": stage.first,
        "stop": stage.stop,
        "loss": stage.loss,
        "slice": None if stage.slice is None else [stage.slice.number, stage.slice.of],
        "forward": stage.forward,
        "backward": stage.backward,
        "landed": stage.landed,
        "devices": len(stage.holders),
        "holders": [
            [holder.device, holder.forward, holder.backward, holder.summed, holder.coming]
            for holder in stage.holders[:room]
        ],
    }
