"""Shortcuts of the search for stages change nothing of what it finds."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cleave.planner.plan import DeviceRates, PsRates
from cleave.planner.stages.estimate import StageTables
from cleave.planner.stages.groupings import groupings
from cleave.planner.stages.model import LayerCost, PlannedStage, PsCompute, StageModel
from cleave.planner.stages.prediction import held_bytes, predict
from cleave.planner.stages.simulated import PIECE_BYTES
from cleave.planner.stages.simulation import StageSimulation
from tests.planner.test_stage_search import (
    HOME,
    OPT_125M,
    PS,
    few,
    fleets,
    models,
)


@few
@given(models(), fleets(30, memory=(27, 31)))
def test_groupings_are_of_different_devices_that_hold_all_layers(
    model: StageModel, fleet: list[DeviceRates]
) -> None:
    tables = StageTables(model)
    memory = np.array([device.memory_bytes for device in fleet], dtype=float)
    for grouping in groupings(tables, fleet, 0):
        assert len(set(grouping.members.tolist())) == len(grouping.members)
        assert all(grouping.devices(fleet))
        assert grouping.least(tables.most_layers(memory)).sum() >= tables.layers


@few
@given(models(), fleets(memory=(28, 31)), st.sampled_from([1e6, 12e6, 125e6]))
def test_pieces_that_pass_in_one_loop_pass_as_events(
    model: StageModel, fleet: list[DeviceRates], rate: float
) -> None:
    ps = PsCompute(PS.flops_per_s, PS.optimizer_s, PsRates(rate, rate))
    by_id = {device.device: device for device in fleet}
    stages = (PlannedStage(0, len(model.layers), tuple(by_id)),)
    assume(all(held_bytes(model, stages[0]) <= device.memory_bytes for device in fleet))
    assume(not model.cuts)
    plan = predict(model, stages, by_id, ps)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(StageSimulation, "_at", _at_as_event)
        assert predict(model, stages, by_id, ps) == plan


def _at_as_event(
    self: StageSimulation, time_s: float, happens: Callable[[float, Any], None], what: Any
) -> None:
    """Add an event that is not known to be a piece's: bound methods are equal, not the same."""
    if happens == self._send_up:
        happens = self._send_up
    heapq.heappush(self._events, (time_s, next(self._numbers), happens, what))


def test_a_message_of_whole_pieces_passes() -> None:
    nbytes = int(3 * PIECE_BYTES)
    layer = LayerCost(0, nbytes, nbytes, nbytes, 57e6, 14e6, 40e3)
    model = StageModel([layer], OPT_125M.loss, 768, 4, [256] * 4)
    ps = PsCompute(100e9, 0.5, PsRates(1e6, 1e6))
    plan = predict(model, (PlannedStage(0, 1, (0,)),), {0: HOME[0]}, ps)
    assert plan.step_s >= plan.downlink_bytes / 1e6
