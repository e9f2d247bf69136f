"""The choice of the number of micro-batches for a step by stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from cleave.errors import DeviceMemoryError, PlanError
from cleave.planner.plan import DeviceRates
from cleave.planner.stages.model import PsCompute, StageModel, StagePlan, StagePlanner

_MOST: Final = 64


def micro_batch_counts(rows: int, devices: int) -> list[int]:
    """Return the numbers of micro-batches to try, ascending.

    Args:
        rows: sequences of the batch.
        devices: number of devices in the fleet.
    """
    few = min(rows, max(4, 2 * devices))
    return sorted({min(rows, max(1, devices)), few, min(rows, 2 * few), min(rows, _MOST)})


def plan_batch(
    planner: StagePlanner,
    cut: Callable[[int], StageModel],
    rows: int,
    devices: Sequence[DeviceRates],
    ps: PsCompute,
    in_parts: Callable[[int], StageModel] | None = None,
) -> tuple[StageModel, StagePlan]:
    """Return the batch with the best number of micro-batches, and the plan for it.

    Args:
        cut: returns the model with the batch cut into the given number of micro-batches.
        rows: sequences of the batch.
        in_parts: like `cut`, with layers in parts; used if whole layers do not fit.

    Raises:
        DeviceMemoryError: when devices have too little memory for stages.
        PlanError: when no stages fit these devices, however the batch is cut.
    """
    best: tuple[StageModel, StagePlan] | None = None
    refused: PlanError | None = None
    # Many micro-batches are best most often, so they come first. Ties go to fewer micro-batches.
    for count in reversed(micro_batch_counts(rows, len(devices)) if rows > 0 else ()):
        try:
            model = cut(count)
            plan = planner(model, devices, ps)
        except PlanError as error:
            refused = refused or error
            continue
        if best is None or plan.step_s <= best[1].step_s:
            best = model, plan
    if best is not None:
        return best
    if in_parts is not None and isinstance(refused, DeviceMemoryError):
        return plan_batch(planner, in_parts, rows, devices, ps)
    raise refused or PlanError(f"a batch of {rows} sequences cannot be cut; it needs at least one")
