"""A process that is killed while it writes a checkpoint leaves a whole one, at any line.

A few seeded lines here; `python -m benchmarks.crash` takes all of them, and kills whole runs.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.crash import kill_while_writing


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system forks no processes")
def test_a_writer_that_is_killed_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    kill_while_writing(tmp_path, quick=True, seed=0)
