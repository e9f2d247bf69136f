"""Ray is asked for where it is needed, and nothing else is taken for it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from cleave.errors import UsageError, to_install
from cleave.ray_cluster import need_ray


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which Python imports first, where Ray itself was not imported yet."""
    for name in [name for name in sys.modules if name.split(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def test_ray_that_is_not_installed_is_asked_for(elsewhere: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(to_install("ray"))):
        need_ray("--servers")


@pytest.mark.parametrize("file", ["ray/__init__.py", "ray/notes.txt", "ray.py"])
def test_something_else_that_is_called_ray_is_not_taken_for_it(elsewhere: Path, file: str) -> None:
    (elsewhere / file).parent.mkdir(exist_ok=True)
    (elsewhere / file).write_text("raise SystemExit('this must not run')")
    with pytest.raises(UsageError) as refused:
        need_ray("--servers")
    assert str(elsewhere / Path(file).parts[0]) in str(refused.value)
    assert "which is not Ray" in str(refused.value)


def test_ray_is_known_by_its_core(elsewhere: Path) -> None:
    (elsewhere / "ray").mkdir()
    (elsewhere / "ray" / "__init__.py").touch()
    (elsewhere / "ray" / "_raylet.py").touch()
    need_ray("--servers")
