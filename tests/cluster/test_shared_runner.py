"""Jobs that several servers train: what is refused, and what is left of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from cleave.cluster.shared_runner import SharedRunner
from cleave.errors import UsageError


def runner(runs: Path, *, cores: int = 0) -> SharedRunner:
    """Of two servers, in a cluster with so many cores."""
    nodes = [{"Alive": True, "Resources": {"CPU": cores}}]
    ray = SimpleNamespace(nodes=lambda: nodes)
    return SharedRunner(runs, servers=2, ray=ray, fleet_of=lambda ranks: None)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"memory": "sharded", "method": "stages"}, "by stages every server sends"),
        ({"memory": "lean"}, "use sharded"),
    ],
)
def test_a_job_that_several_servers_cannot_do_is_refused_before_it_has_a_folder(
    changed: dict[str, str], said: str, tmp_path: Path
) -> None:
    asked = {"job": {"model": "opt-nano", **changed}}
    with pytest.raises(UsageError, match=said):
        runner(tmp_path).check(asked)
    with pytest.raises(UsageError, match=said):
        runner(tmp_path).run(asked, None, print, lambda: False)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_does_not_begin_leaves_no_folder(tmp_path: Path) -> None:
    asked = {"job": {"model": "opt-nano"}, "name": "mine"}
    with pytest.raises(UsageError, match="has 1 cores"):
        runner(tmp_path, cores=1).run(asked, None, print, lambda: False)
    assert list(tmp_path.iterdir()) == []
