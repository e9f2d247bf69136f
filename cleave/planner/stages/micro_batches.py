"""The search for the fastest number of micro-batches in a step by stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from cleave.errors import DeviceMemoryError, PlanError
from cleave.planner.plan import DeviceRates
from cleave.planner.stages.model import PsCompute, StageModel, StagePlan, StagePlanner

_MOST: Final = 64


def micro_batch_counts(rows: int, devices: int) -> list[int]:
    """Return the numbers of micro-batches to try, in ascending order.

    Args:
        rows: sequences in the batch.
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
    """Return the model with its batch cut into the best number of micro-batches, and the plan.

    Args:
        planner: function that plans stages for a given number of micro-batches.
        cut: function from a number of micro-batches to the model with its batch cut into that many
            micro-batches.
        rows: sequences in the batch.
        devices: devices of the fleet.
        ps: throughput of the parameter server.
        in_parts: like `cut`, but each layer is divided into attention and MLP. It is used if the
            devices have too little memory for whole layers.

    Raises:
        DeviceMemoryError: when the devices have too little memory for stages.
        PlanError: when no number of micro-batches allows stages on these devices.
    """
    best: tuple[StageModel, StagePlan] | None = None
    refused: PlanError | None = None
    # A large number of micro-batches is usually best, so large numbers are tried first. Of two
    # equally fast numbers, the smaller number is chosen.
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
