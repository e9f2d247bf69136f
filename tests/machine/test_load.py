"""Other programs' use of the processors, from a made-up `/proc/stat`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cleave.machine import load
from cleave.machine.load import OtherLoad

TICKS = os.sysconf("SC_CLK_TCK")


def stat(root: Path, *seconds: float) -> None:
    """Write user, low-priority, system, idle, disk-wait, two interrupt and stolen times."""
    (root / "proc").mkdir(exist_ok=True)
    columns = " ".join(str(round(s * TICKS)) for s in (*seconds, 0, 0))
    (root / "proc/stat").write_text(f"cpu  {columns}\ncpu0 {columns}\n")


@pytest.mark.parametrize(
    ("after", "own_s", "share"),
    [
        ((10, 0, 0, 10, 0, 0, 0, 0), 10.0, 0.0),  # this process alone
        ((10, 0, 5, 0, 0, 0, 0, 5), 5.0, 0.75),  # a hypervisor's other machines count
        ((10, 10, 0, 0, 0, 0, 0, 0), 10.0, 0.0),  # low priority gives way
        ((0, 0, 0, 10, 10, 0, 0, 0), 0.0, 0.0),
    ],
)
def test_the_share_of_other_programs(
    after: tuple[int, ...], own_s: float, share: float, tmp_path: Path
) -> None:
    stat(tmp_path, *[0] * 8)
    own = [0.0]
    others = OtherLoad(tmp_path, lambda: own[0])
    stat(tmp_path, *after)
    own[0] = own_s
    assert others.share() == pytest.approx(share)


def test_a_disturbed_measurement_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat(tmp_path, *[0] * 8)
    others = OtherLoad(tmp_path, lambda: 0.0)
    assert others.remark() == ""  # no time has passed
    stat(tmp_path, 12, 0, 0, 8, 0, 0, 0, 0)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(load, "usable_cores", lambda: [0, 1])
    assert others.remark() == "while other programs used 60% of this machine's processors"
    monkeypatch.setattr(os, "cpu_count", lambda: 64)  # 25 of 64 are free, and one is enough
    assert not others.disturbs()


def test_a_system_that_reports_nothing_is_undisturbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "psutil", None)
    others = OtherLoad(tmp_path)
    assert (others.share(), others.disturbs(), others.remark()) == (0.0, False, "")
