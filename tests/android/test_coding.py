"""The Android client's core and coded arrays: the very same losses, fewer bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.android.jvm import Classes
from tests.integration.processes import (
    PATIENCE_S,
    printing,
    server,
    started,
    training,
    wait_for_event,
)

STEPS = 2
Steps = Callable[[str], list[dict[str, Any]]]


@pytest.fixture
def steps(classes: Classes, corpus_file: Path, tmp_path: Path) -> Steps:
    """Trains on the core alone; the records of the steps."""

    def trained(coding: str) -> list[dict[str, Any]]:
        folder = tmp_path / coding
        folder.mkdir()
        with server(folder, "--coding", coding) as place:
            device = classes.command("--threads", "1", "--state", str(folder), place["url"])
            with printing(device) as (_, said):
                wait_for_event(said, "working")
                command = (*training(corpus_file, STEPS), "--server", place["operator_url"])
                with started(*command) as (trainer, lines):
                    found = [line for line in lines if line["event"] == "step"]
                    assert trainer.wait(PATIENCE_S) == 0
        return found

    return trained


def test_losses_are_the_same_to_the_bit(steps: Steps) -> None:
    plain, coded = steps("off"), steps("on")
    assert len(plain) == STEPS
    assert [step["loss"] for step in coded] == [step["loss"] for step in plain]
    for step, other in zip(coded, plain, strict=True):
        for way in ("down", "up"):
            assert sum(other["saved"][way].values()) == 0
            assert sum(step["saved"][way].values()) > 0
