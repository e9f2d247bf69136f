"""What computes simulations: equal results by any number of processes, errors that arrive."""

from __future__ import annotations

import os
import signal
import sys
from types import ModuleType

import pytest
from typer.testing import CliRunner

from cleave.errors import CleaveError, UsageError
from cleave.planner.plan import ElementBytes, PsRates
from cleave.workload.registry import find_model
from cleave_cli.main import app
from simulator.sweep import Cell, Processes, RayCluster, Workers, cells, methods, simulate

pytestmark = pytest.mark.slow

BOTH = pytest.mark.parametrize("workers", [Processes(1), Processes(2)], ids=["here", "two"])


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
def test_every_task_is_done_once(workers: Workers) -> None:
    assert sorted(workers.run(squared, [5, 3, 4])) == [(0, 25), (1, 9), (2, 16)]
    assert list(workers.run(squared, [])) == []


@BOTH
def test_an_error_arrives_as_it_was_raised(workers: Workers) -> None:
    with pytest.raises(UsageError, match="7 is not what was asked for"):
        list(workers.run(refused, [7]))


def test_a_process_that_is_ended_is_said() -> None:
    with pytest.raises(CleaveError, match="fewer --jobs"):
        list(Processes(2).run(ended, [1, 2, 3]))


@pytest.mark.nightly
def test_rows_do_not_depend_on_who_computes_them() -> None:
    every, done = tiny("cleave", "cleave-stages", "dtfm", "cloud-1xa100"), list[str]()
    alone = simulate(every)
    shared = simulate(every, Processes(2), lambda cell: done.append(cell.name))
    assert shared == alone
    assert [rows[0].outcome.method for rows in alone[:2]] == ["cleave", "cleave-stages"]
    assert [rows[0].devices for rows in alone] == [4, 4, 4, 8, 8, 8, None]
    assert sorted(done) == sorted(cell.name for cell in every)


@pytest.mark.nightly
@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "127.0.0.1:many"])
def test_where_no_cluster_is_that_is_said_at_once(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))  # which is not asked
    with pytest.raises(UsageError, match="no Ray cluster answers at"):
        list(RayCluster(address).run(squared, [1]))


def test_jobs_and_a_cluster_are_not_given_together() -> None:
    done = CliRunner().invoke(app, ["simulate", "--jobs", "2", "--ray", "auto"])
    assert isinstance(done.exception, UsageError)
    assert "cannot be combined with --ray" in str(done.exception)
