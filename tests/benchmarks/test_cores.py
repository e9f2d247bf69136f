"""Processes that may use a part of the cores."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from benchmarks.cores import LimitedCores, limited_cores


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Yield what ends with the test."""
    with ExitStack() as made:
        yield made


@pytest.fixture
def half(stack: ExitStack) -> LimitedCores:
    """Return a group with half a core, where this machine lets tests make one."""
    try:
        return stack.enter_context(limited_cores(f"cleave-test-{os.getpid()}", 0.5))
    except OSError as error:
        pytest.skip(f"no group of processes can be limited here: {error}")


def test_a_process_is_in_the_group_from_its_start(half: LimitedCores) -> None:
    command = half.inside(sys.executable, "-c", "print(open('/proc/self/cgroup').read())")
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"/{half.processes.parent.name}" in said


def test_what_is_left_in_the_group_ends_with_it(half: LimitedCores, stack: ExitStack) -> None:
    with subprocess.Popen(half.inside("sleep", "1000")) as left:
        _await_command(left.pid, "sleep")
        stack.close()
        assert left.wait() < 0
    assert not Path(half.processes).parent.exists()


def _await_command(pid: int, name: str) -> None:
    """Wait until a process, which is started by a shell, runs a command."""
    while psutil.Process(pid).name() != name:
        os.sched_yield()
