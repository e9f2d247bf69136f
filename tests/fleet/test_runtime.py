"""How far a training step is, as a fleet says it."""

from __future__ import annotations

import numpy as np

import cleave
from cleave.fleet.fleet import Fleet
from cleave.fleet.product import Side
from cleave.scheduler.counters import StepProgress


def multiply(fleet: Fleet, times: int) -> None:
    for _ in range(times):
        a, out = fleet.operand(matrix()), matrix()
        fleet.submit(Side(a), Side(a, True), out).result()


def matrix() -> cleave.arrays.Buffer:
    return cleave.arrays.Buffer(np.ones((4, 4), np.float32), cleave.arrays.DType.FP32)


def test_tasks_of_a_step_are_counted_against_those_of_the_step_before() -> None:
    with cleave.emulated(2) as fleet:
        runtime = fleet.runtime
        multiply(fleet, 1)
        assert runtime.progress() is None  # no step is under way
        with runtime.counting_tasks():
            assert runtime.progress() is None
            multiply(fleet, 3)
            assert runtime.progress() == StepProgress(3, 0)
        assert runtime.progress() is None
        multiply(fleet, 2)  # of an evaluation, say
        with runtime.counting_tasks():
            multiply(fleet, 1)
            assert runtime.progress() == StepProgress(1, 3)
            multiply(fleet, 3)
            assert runtime.progress() == StepProgress(4, 0)  # more than before: nobody knows
