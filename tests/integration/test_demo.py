"""The demo shows what it says: real devices, of which one is killed, and the same losses."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest

from tests.integration.processes import here

pytestmark = pytest.mark.slow


@pytest.mark.filterwarnings("error::ResourceWarning")  # of a pipe left open
def test_its_losses_are_those_of_plain_pytorch(tmp_path: Path) -> None:
    done = here("demo", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    small, large = found["small"], found["large"]
    assert small["equal"]
    assert small["losses"] == pytest.approx(small["plain_losses"], rel=1e-4)
    assert (small["devices"], small["devices_left"]) == (4, 3)
    assert (Path(small["run_folder"]) / "loss.png").is_file()
    assert large["simulated_step_s"] < large["simulated_alone_s"]
    gc.collect()
