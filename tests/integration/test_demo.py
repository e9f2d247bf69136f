"""The demo shows what it says: real devices, of which one is killed, and the same losses."""

from __future__ import annotations

import gc
import json
import warnings
from pathlib import Path

import pytest

from cleave_cli.commands import demo
from tests.integration.processes import here

pytestmark = pytest.mark.slow

SMALLER = {
    "_DEVICES": 2, "_STEPS": 3, "_KILLED_AFTER": 1, "_MODEL": "opt-nano",
    "_REAL_MODEL": "opt-125m", "_REAL_BATCH": 16, "_REAL_SEQUENCE": 128,
}  # fmt: skip


@pytest.mark.parametrize("changes", [SMALLER, pytest.param({}, marks=pytest.mark.nightly)])
@pytest.mark.filterwarnings("error::ResourceWarning")  # of a pipe left open
def test_its_losses_are_those_of_plain_pytorch(
    changes: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()  # files that earlier tests left open
    for name, value in changes.items():
        monkeypatch.setattr(demo, name, value)
    done = here("demo", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    small, large = found["small"], found["large"]
    assert small["equal"]
    assert small["losses"] == pytest.approx(small["plain_losses"], rel=2e-4)
    devices = changes.get("_DEVICES", 4)
    assert (small["devices"], small["devices"] - small["devices_left"]) == (devices, 1)
    assert Path(small["plot"]).read_bytes().startswith(b"\x89PNG")
    assert large["simulated_step_s"] > 0
    if not changes:
        assert large["simulated_step_s"] < large["simulated_alone_s"]
    gc.collect()
