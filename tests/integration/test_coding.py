"""Coded arrays over sockets, to and from device processes: the very same losses, fewer bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

import cleave
from cleave.training.loop.job import JobSpec
from cleave.training.loop.records import StepRecord
from tests.coded_runs import AlikePlanner, check_saving, steps_on
from tests.faults.processes import Processes
from tests.integration.processes import until
from tests.training.test_staged import EvenStages

pytestmark = pytest.mark.slow


def steps(job: JobSpec, folder: Path, coding: str, devices: int) -> list[StepRecord]:
    """The steps of a job on device processes."""
    with (
        cleave.serve(stages_on="any", coding=coding, planner=AlikePlanner()) as server,
        Processes(lambda slot: server.url, devices),
    ):
        until(lambda: server.fleet.device_count == devices)
        return steps_on(server.fleet, job, folder)


@pytest.mark.parametrize(
    ("method", "devices", "seq", "dtype"),
    [
        pytest.param("tiles", 2, 64, "fp32", marks=pytest.mark.nightly),
        ("stages", 1, 16, "bf16"),  # 16 as in other tests, which share the graphs
        pytest.param("tiles", 2, 64, "bf16", marks=pytest.mark.nightly),
        pytest.param("stages", 1, 16, "fp32", marks=pytest.mark.nightly),
    ],
)
def test_losses_are_the_same_to_the_bit(
    method: str,
    devices: int,
    seq: int,
    dtype: str,
    corpus_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Where the loss is computed changes rounding, and depends on measured speeds.
    monkeypatch.setattr("cleave.training.stages.stage_setup.plan_stages", EvenStages(loss=True))
    job = JobSpec(
        "opt-nano", str(corpus_file), 2, batch=16, seq=seq, method=method, dtype=dtype,
        checkpoint_every=0,
    )  # fmt: skip
    plain = steps(job, tmp_path / "plain", "auto", devices)  # the link is too fast for coding
    coded = steps(job, tmp_path / "coded", "on", devices)
    check_saving(coded, plain)
    if method == "stages":  # what was saved is missing from what travelled, kind by kind
        for step, other in zip(coded, plain, strict=True):
            for way in ("down", "up"):
                whole = getattr(step.traffic, way) + getattr(step.saved, way)
                before = getattr(other.traffic, way)
                for kind in ("weights", "gradients", "activations"):
                    headers = 0.01 * getattr(before, kind)
                    assert getattr(whole, kind) == pytest.approx(getattr(before, kind), abs=headers)
