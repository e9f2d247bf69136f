"""The Android client's core and coded arrays: the very same losses, fewer bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

import cleave
from cleave.training.loop.records import StepRecord
from tests.android.jvm import Classes
from tests.coded_runs import AlikePlanner, check_saving, steps_on
from tests.integration.processes import printing, training_job, wait_for_event

STEPS = 2


@pytest.mark.nightly
def test_losses_are_the_same_to_the_bit(
    classes: Classes, corpus_file: Path, tmp_path: Path
) -> None:
    def steps(coding: str) -> list[StepRecord]:
        with cleave.serve(coding=coding, planner=AlikePlanner()) as server:
            device = classes.command("--threads", "1", "--state", str(tmp_path / "jvm"), server.url)
            with printing(device) as (_, said):
                wait_for_event(said, "working")
                return steps_on(server.fleet, training_job(corpus_file, STEPS), tmp_path / coding)

    plain, coded = steps("off"), steps("on")
    assert len(plain) == STEPS
    check_saving(coded, plain)
