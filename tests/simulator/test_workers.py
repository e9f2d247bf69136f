"""What computes simulations: equal results by any number of processes, errors that arrive."""

from __future__ import annotations

import os
import signal

import pytest

from cleave.errors import CleaveError, UsageError
from cleave.planner.plan import ElementBytes, PsRates
from cleave.workload.registry import find_model
from simulator.catalogue import methods
from simulator.sweep import Cell, cells, simulate
from simulator.workers import run_tasks

pytestmark = pytest.mark.slow

BOTH = pytest.mark.parametrize("processes", [1, 2])


def squared(number: int) -> int:
    return number * number


def refused(number: int) -> int:
    raise UsageError(f"{number} is not what was asked for")


def ended(number: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return number


def tiny(*names: str) -> list[Cell]:
    known = methods()
    of = [known[name] for name in names]
    element = ElementBytes(2, 2)
    spec = find_model("opt-tiny")
    return cells(spec, 8, 128, "paper", [4, 8], of, element=element, ps=PsRates())


@BOTH
def test_every_task_is_done_once(processes: int) -> None:
    assert sorted(run_tasks(squared, [5, 3, 4], processes)) == [(0, 25), (1, 9), (2, 16)]
    assert list(run_tasks(squared, [], processes)) == []


@BOTH
def test_an_error_arrives_as_it_was_raised(processes: int) -> None:
    with pytest.raises(UsageError, match="7 is not what was asked for"):
        list(run_tasks(refused, [7], processes))


def test_a_process_that_is_ended_is_said() -> None:
    with pytest.raises(CleaveError, match="fewer --jobs"):
        list(run_tasks(ended, [1, 2, 3], 2))


@pytest.mark.nightly
def test_rows_do_not_depend_on_who_computes_them() -> None:
    every, done = tiny("cleave", "cleave-stages", "dtfm", "cloud-1xa100"), list[str]()
    alone = simulate(every)
    shared = simulate(every, 2, lambda cell: done.append(cell.name))
    assert shared == alone
    assert [rows[0].outcome.method for rows in alone[:2]] == ["cleave", "cleave-stages"]
    assert [rows[0].devices for rows in alone] == [4, 4, 4, 8, 8, 8, None]
    assert sorted(done) == sorted(cell.name for cell in every)
