"""Coded arrays over sockets, to and from device processes: the very same losses, fewer bytes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import cleave
from cleave.training.job import JobSpec
from cleave.training.records import StepRecord
from cleave.training.run_folder import RunFolder
from cleave.training.trainer import TrainContext, train
from tests.faults.processes import Processes

pytestmark = pytest.mark.slow

WAIT_S = 120.0


def steps(job: JobSpec, folder: Path, coding: str, devices: int) -> list[StepRecord]:
    """The steps of a job on device processes."""
    found: list[StepRecord] = []
    with (
        cleave.serve(stages_on="any", coding=coding) as server,
        Processes(lambda slot: server.url, devices),
    ):
        until_s = time.monotonic() + WAIT_S
        while server.fleet.device_count < devices:
            assert time.monotonic() < until_s, "the processes do not join"
            time.sleep(0.05)
        context = TrainContext(
            server.fleet,
            lambda record: found.append(record) if isinstance(record, StepRecord) else None,
        )
        train(job, RunFolder(folder), context)
    return found


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("method", "devices", "seq"),
    [("tiles", 2, 64), ("stages", 1, 16)],  # 16 as in other tests, which share the graphs
)
def test_losses_are_the_same_to_the_bit(
    method: str,
    devices: int,
    seq: int,
    dtype: str,
    corpus_file: Path,
    tmp_path: Path,
) -> None:
    job = JobSpec(
        "opt-nano", str(corpus_file), 2, batch=16, seq=seq, method=method, dtype=dtype,
        checkpoint_every=0,
    )  # fmt: skip
    plain = steps(job, tmp_path / "plain", "auto", devices)  # the link is too fast for coding
    coded = steps(job, tmp_path / "coded", "on", devices)
    assert [step.loss for step in coded] == [step.loss for step in plain]
    for step, other in zip(coded, plain, strict=True):
        assert (other.saved.down.total, other.saved.up.total) == (0, 0)
        assert step.saved.down.total > 0
        assert step.saved.up.total > 0
        # What was saved is missing from what travelled, kind by kind.
        if method == "stages":
            for way in ("down", "up"):
                whole = getattr(step.traffic, way) + getattr(step.saved, way)
                before = getattr(other.traffic, way)
                for kind in ("weights", "gradients", "activations"):
                    headers = 0.01 * getattr(before, kind)
                    assert getattr(whole, kind) == pytest.approx(getattr(before, kind), abs=headers)
