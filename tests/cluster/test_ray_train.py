"""Jobs that several servers train: what is refused, and what is left of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cleave.cluster import ray_train
from cleave.cluster.ray_train import SharedRunner
from cleave.errors import CleaveError, UsageError


def runner(runs: Path) -> SharedRunner:
    """Of two servers."""
    return SharedRunner(runs, servers=2, ray=None, fleet_of=lambda ranks: None)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"memory": "sharded", "method": "stages"}, "by stages each server sends"),
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


def test_a_run_that_does_not_begin_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def starts_nothing(*_: object) -> None:
        raise CleaveError("the Ray cluster starts nothing")

    monkeypatch.setattr(ray_train, "train_together", starts_nothing)
    asked = {"job": {"model": "opt-nano"}, "name": "mine"}
    with pytest.raises(CleaveError, match="starts nothing"):
        runner(tmp_path).run(asked, None, print, lambda: False)
    assert list(tmp_path.iterdir()) == []
