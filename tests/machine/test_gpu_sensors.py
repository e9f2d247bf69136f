"""What GPUs do for others, from what `nvidia-smi` and the kernel print."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from cleave.machine.gpu_sensors import (
    GpuSensors,
    drm_busy,
    drm_use,
    is_own_process,
    nvidia_temperatures_c,
    nvidia_use,
)

# As drivers print it: an older one, and one with engines for JPEG and optical flow.
OLD = """\
# gpu        pid  type    sm   mem   enc   dec   command
# Idx          #   C/G     %     %     %     %   name
    0       1032     G     6     1     -     -   Xorg
    0       8617     C    61    30     -     -   python
    1          -     -     -     -     -     -   -
"""
NEW = """\
# gpu         pid   type     sm    mem    enc    dec    jpg    ofa    command
# Idx           #    C/G      %      %      %      %      %      %    name
    0       2211     G      3      1      -      -      -      -    gnome-shell
    0       4242   C+G     12      4     47      -      -      -    a call
"""
I915 = """\
pos:\t0
flags:\t02100002
drm-driver:\ti915
drm-client-id:\t{client}
drm-pdev:\t0000:00:02.0
drm-engine-render:\t{render} ns
drm-engine-copy:\t0 ns
drm-engine-video:\t0 ns
drm-engine-capacity-video:\t2
"""
XE = """\
drm-driver:\txe
drm-client-id:\t42
drm-pdev:\t0000:03:00.0
drm-cycles-rcs:\t{render}
drm-total-cycles-rcs:\t{total}
drm-engine-capacity-vcs:\t2
"""
PANTHOR = """\
drm-driver:\tpanthor
drm-client-id:\t10
drm-engine-panthor:\t{busy} ns
drm-cycles-panthor:\t94439687187
"""


def nobody(pid: int) -> bool:
    return False


@pytest.mark.parametrize(
    ("text", "own", "share"),
    [
        (OLD, {8617}, 0.06),
        (OLD, set(), 0.67),
        (NEW, set(), 0.5),
        (OLD.replace("61", "-"), {1032}, 0.0),
        ("", set(), None),
        ("Insufficient Permissions\n", set(), None),
        ("Not supported on the device(s)\n", set(), None),
    ],
)
def test_the_use_by_other_programs(text: str, own: set[int], share: float | None) -> None:
    assert nvidia_use(text, own.__contains__) == pytest.approx(share)


def test_temperatures_of_nvidia() -> None:
    assert nvidia_temperatures_c("45\n71\n") == [45, 71]
    assert nvidia_temperatures_c("[N/A]\n62\n") == [62]
    assert nvidia_temperatures_c("NVIDIA-SMI has failed because it couldn't communicate\n") == []


def test_use_that_the_kernel_counts() -> None:
    """A client's files count once. A client that is new, or has closed its files, counts as 0."""
    before = drm_busy([I915.format(client=26, render=1_000_000_000)] * 2)
    assert before["0000:00:02.0", "26", "render"] == (1_000_000_000, 0)
    now = drm_busy([
        I915.format(client=26, render=2_500_000_000),
        I915.format(client=26, render=2_500_000_000),
        I915.format(client=27, render=9_000_000_000),
    ])  # fmt: skip
    assert drm_use(before, now, 5.0) == pytest.approx(0.3)
    assert drm_use(now, {}, 5.0) == 0
    assert drm_busy(["pos:\t0\nflags:\t02\n"]) == {}


def test_a_driver_that_counts_cycles() -> None:
    before = drm_busy([XE.format(render=500, total=10_000)])
    now = drm_busy([XE.format(render=1_100, total=12_000)])
    assert drm_use(before, now, 5.0) == pytest.approx(0.3)
    before = drm_busy([PANTHOR.format(busy=1_000_000_000)])  # both ns and cycles
    now = drm_busy([PANTHOR.format(busy=3_000_000_000)])
    assert drm_use(before, now, 5.0) == pytest.approx(0.4)


def process(root: Path, pid: int, client: int, render_ns: int) -> None:
    folder = root / "proc" / str(pid)
    for name in ("fd", "fdinfo"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for number, target in ((3, "/dev/dri/renderD128"), (4, "/dev/null")):
        if not (folder / "fd" / str(number)).is_symlink():
            os.symlink(target, folder / "fd" / str(number))
        text = I915.format(client=client, render=render_ns) if number == 3 else "pos:\t0\n"
        (folder / "fdinfo" / str(number)).write_text(text)


def test_time_since_a_gpu_was_in_use(tmp_path: Path) -> None:
    now = [100.0]
    found = GpuSensors(
        lambda command: None, tmp_path, lambda: now[0], lambda pid: pid == 7, has_nvidia=False
    )
    assert found.use_by_others() is None
    process(tmp_path, 7, client=1, render_ns=0)
    process(tmp_path, 8, client=2, render_ns=0)
    assert found.idle_s() is None
    now[0] += 5
    process(tmp_path, 7, client=1, render_ns=5_000_000_000)  # this program's own
    process(tmp_path, 8, client=2, render_ns=500_000_000)  # a desktop
    assert found.idle_s() is None
    now[0] += 5
    process(tmp_path, 8, client=2, render_ns=4_500_000_000)  # a game
    assert found.idle_s() == 0
    now[0] += 5
    assert found.idle_s() == 5


def test_sensors_of_nvidia_and_of_the_kernel_together(tmp_path: Path) -> None:
    """Without either, nothing is known."""
    answers = {"--query-gpu=temperature.gpu": "64\n", "pmon": OLD}

    def run(command: Sequence[str]) -> str | None:
        assert command[0] == "nvidia-smi"
        return answers.get(command[1])

    found = GpuSensors(run, tmp_path, is_own=nobody, has_nvidia=True)
    assert found.temperature_c() == 64
    assert found.use_by_others() == pytest.approx(0.67)
    hwmon = tmp_path / "sys/class/hwmon/hwmon3"
    hwmon.mkdir(parents=True)
    (hwmon / "name").write_text("amdgpu\n")
    (hwmon / "temp1_input").write_text("71000\n")
    assert found.temperature_c() == 71
    assert GpuSensors(run, tmp_path / "none", has_nvidia=False).temperature_c() is None


def test_processes_of_this_program_do_not_count() -> None:
    assert is_own_process(os.getpid())
    assert not is_own_process(1)
