"""The device process on the parameter server's own computer."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from cleave.fleet import own_device
from cleave.fleet.own_device import OwnDevice, offered_bytes

GB = 10**9
AUTOGROUP = Path("/proc/self/autogroup")


@pytest.mark.parametrize(
    ("total", "available", "reserved", "offered"),
    [
        (16 * GB, 12 * GB, 2 * GB, 4 * GB),  # a quarter of the computer
        (16 * GB, 7 * GB, 2 * GB, 2.5 * GB),  # half of what training leaves
        (16 * GB, 7 * GB, 8 * GB, 0),
        (None, 7 * GB, 0, 0),
        (16 * GB, None, 0, 0),
    ],
)
def test_training_has_memory_first(
    monkeypatch: pytest.MonkeyPatch,
    total: int | None,
    available: int | None,
    reserved: int,
    offered: int,
) -> None:
    monkeypatch.setattr(own_device, "total_memory_bytes", lambda: total)
    monkeypatch.setattr(own_device, "available_memory_bytes", lambda: available)
    assert offered_bytes(reserved) == offered


def test_the_process_is_told_its_memory_and_ends(tmp_path: Path) -> None:
    said = tmp_path / "said"
    script = f"import sys, time; open({str(said)!r}, 'w').write(sys.argv[2]); time.sleep(600)"
    device = OwnDevice([sys.executable, "-c", script])
    device.stop()
    assert not device.runs
    device.start(3 * GB)
    assert device.runs
    device.start(4 * GB)  # it runs already
    while not (said.exists() and said.read_text()):
        assert device.runs
    assert said.read_text() == "3000"
    device.stop()
    assert not device.runs


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this system weighs no sessions")
def test_the_server_has_the_processor_first() -> None:
    device = OwnDevice([sys.executable, "-c", "import time; time.sleep(600)"])
    device.start(GB)
    assert device._process is not None
    pid = device._process.pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == 10
    assert Path(f"/proc/{pid}/autogroup").read_text().endswith("nice 10\n")
    device.stop()
