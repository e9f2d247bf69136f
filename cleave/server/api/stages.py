"""Create the part of an overview that describes the current step by stages."""

from __future__ import annotations

from typing import Any, Final

from cleave.scheduler.stages.state import StageView, StepView

MAX_HOLDERS: Final = 2000
"""Maximum number of stage holders that an overview lists, over all stages."""


def stages_answer(view: StepView | None) -> dict[str, Any] | None:
    """Return the state of a step by stages in the protocol's format; None if `view` is None."""
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
