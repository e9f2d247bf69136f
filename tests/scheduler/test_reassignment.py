"""Who takes over, who helps, and that undone blocks cut anew give the same product."""

from __future__ import annotations

import math
from itertools import pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from cleave.gemm import Block, Gemm, Span
from cleave.planner.plan import DeviceRates, ElementBytes
from cleave.scheduler.tiles.gemm_job import GemmJob, MatrixRef
from cleave.scheduler.tiles.reassignment import WORTH_HELPING, reassign, speculate
from cleave.scheduler.tiles.scheduler import Scheduler
from cleave.scheduler.tiles.tasks import GemmTask, Task
from tests.scheduler.test_scheduler import BoxPlanner

seconds = st.floats(0.0, 10.0)
ONE = Span(0, 1)
DETAIL = GemmTask(Block(ONE, ONE, (ONE,)), 0, False, False, False, "fp32")


def _tasks(count: int) -> list[Task]:
    return [Task(1, (), 1, 1, DETAIL) for _ in range(count)]


@given(st.dictionaries(st.integers(0, 40), seconds, min_size=1), st.integers(0, 60), seconds)
def test_what_is_taken_over_ends_as_early_as_it_can(
    busy_s: dict[int, float], count: int, task_s: float
) -> None:
    tasks = _tasks(count)
    found = reassign(tasks, busy_s, lambda _d, _u: True, lambda _d, _u: task_s)
    assert [task for _, task in found.assigned] == tasks
    assert not found.unassigned
    ends = dict(busy_s)
    for device, _ in found.assigned:
        ends[device] += task_s
    taken = {device for device, _ in found.assigned}
    assert found.finish_s == max((ends[d] for d in taken), default=0.0)
    # Nobody who got something could have left it to another and be better off.
    for device in taken:
        assert all(ends[other] + task_s >= ends[device] - 1e-9 for other in ends)


def test_who_may_not_take_a_unit_does_not_get_it() -> None:
    first, second = _tasks(2)
    found = reassign([first, second], {1: 0.0, 2: 5.0}, lambda d, u: d == 2 and u is first, _1s)
    assert found.assigned == [(2, first)]
    assert found.unassigned == [second]


def _1s(device: int, task: Task) -> float:
    return 1.0


@given(
    st.dictionaries(st.integers(0, 9), st.tuples(st.integers(0, 8), seconds), min_size=1),
    st.dictionaries(st.integers(10, 19), seconds),
)
def test_help_is_given_only_where_it_pays(
    late: dict[int, tuple[int, float]], helpers: dict[int, float]
) -> None:
    tasks = {device: _tasks(count) for device, (count, _) in late.items()}
    needs_s = {device: need for device, (_, need) in late.items()}
    found = speculate(tasks, needs_s, helpers, lambda _d, _u: True, _1s)
    busy_s = dict(helpers)
    given_away: dict[int, list[Task]] = {}
    for device, helper, task in found:
        busy_s[helper] += 1.0
        helped = given_away.setdefault(device, [])
        share_s = needs_s[device] / len(tasks[device])
        assert busy_s[helper] <= WORTH_HELPING * (needs_s[device] - share_s * len(helped)) + 1e-9
        helped.append(task)
    for device, helped in given_away.items():  # the last first
        assert helped == tasks[device][::-1][: len(helped)]


def test_all_that_a_silent_device_was_asked_is_given_to_others() -> None:
    found = speculate({1: _tasks(5)}, {1: math.inf}, {2: 3.0, 3: 0.0}, lambda _d, _u: True, _1s)
    assert len(found) == 5
    assert [helper for _, helper, _ in found].count(3) == 4


# --- cut anew ---

RATES = [DeviceRates(number, 1e6, 1e5, 1e9) for number in range(4)]


def test_partial_sums_are_added_in_the_order_of_k_after_a_loss_too() -> None:
    for seed in range(60):
        random = Random(seed)
        job = GemmJob(
            1, Gemm(4, 4, 8), MatrixRef(1, False), MatrixRef(2, False), ElementBytes(4, 4),
            "fp32", "fp32", BoxPlanner(seed),
        )  # fmt: skip
        device_memory = Scheduler().device_memory
        undone = [task for _, task in job.assign(RATES, device_memory)]
        lost = random.sample(undone, (len(undone) + 1) // 2)
        anew = job.repartition(lost, RATES, dict.fromkeys(range(4), 0.0), device_memory)
        assert anew is not None
        others = [task for _, task in anew[0]]
        job.replace(lost, others)
        undone = [task for task in undone if task not in lost] + others
        random.shuffle(undone)
        placed: list[Task] = []
        for task in undone:
            placed += [u for u, _ in job.arrived(task, None)]
        depths: dict[tuple[int, int], list[int]] = {}
        for task in placed:
            block = task.gemm.block
            for row in range(*block.m):
                for column in range(*block.n):
                    depths.setdefault((row, column), []).append(block.k.start)
        assert len(depths) == 16
        assert all(x < y for each in depths.values() for x, y in pairwise(each))
