"""The records of a job say what travelled: as much as was sent, and of which kind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

import cleave
from cleave.protocol import messages
from cleave.scheduler.counters import Traffic
from cleave.training.loop.context import TrainContext
from cleave.training.loop.job import JobSpec
from cleave.training.loop.records import DoneRecord, Record, StepRecord, to_dict
from cleave.training.loop.run_folder import RunFolder
from cleave.training.loop.start import train
from emulator.activity import Activity, Direction, Transfer
from emulator.virtual import VirtualRuntime

pytestmark = pytest.mark.slow

STEPS = 2
DEVICES = 2


@dataclass
class Watched:
    """A job's records, and the messages that had been sent when each came."""

    records: list[tuple[Record, int]]
    sent: list[Transfer]

    @property
    def steps(self) -> list[StepRecord]:
        return [record for record, _ in self.records if isinstance(record, StepRecord)]

    @property
    def done(self) -> tuple[DoneRecord, list[Transfer]]:
        ((record, sent),) = [one for one in self.records if isinstance(one[0], DoneRecord)]
        assert isinstance(record, DoneRecord)
        return record, self.sent[:sent]


def watched(job: JobSpec, folder: Path) -> Watched:
    found = Watched([], [])

    def note(activity: Activity) -> None:
        if isinstance(activity, Transfer):
            found.sent.append(activity)

    with cleave.emulated(DEVICES, seed=1) as fleet:
        assert isinstance(fleet.runtime, VirtualRuntime)
        fleet.runtime.observers.append(note)
        train(
            job,
            RunFolder(folder),
            TrainContext(fleet, lambda record: found.records.append((record, len(found.sent)))),
        )
    return found


def nbytes(sent: list[Transfer], way: Direction, *types: type) -> int:
    """How many bytes messages took, of some types or of all."""
    return sum(
        one.nbytes
        for one in sent
        if one.direction is way and (not types or isinstance(one.message, types))
    )


def total(records: list[StepRecord]) -> Traffic:
    traffic = Traffic()
    for record in records:
        assert record.downlink_bytes == record.traffic.down.total
        assert record.uplink_bytes == record.traffic.up.total
        traffic += record.traffic
    return traffic


def test_a_job_by_stages(corpus_file: Path, tmp_path: Path) -> None:
    job = JobSpec(
        "opt-nano", str(corpus_file), STEPS, batch=4, seq=16, method="stages", checkpoint_every=0
    )
    found = watched(job, tmp_path / "run")
    done, sent = found.done
    traffic = total(found.steps)
    assert done.traffic == traffic
    down, up = traffic.down, traffic.up
    assert down.total == nbytes(sent, Direction.DOWN)
    assert up.total == nbytes(sent, Direction.UP)
    assert down.graphs == nbytes(sent, Direction.DOWN, messages.Graph) > 0
    assert down.weights + down.activations == nbytes(sent, Direction.DOWN, messages.Put)
    assert up.activations + up.gradients == nbytes(sent, Direction.UP, messages.Result)
    # Of each trained layer all parameters go down and all gradients come back, once a device.
    # What of them is long enough travels coded, and records say what that saves.
    last = found.steps[-1]
    assert last.saved.up.gradients > 0
    step = last.traffic + last.saved
    assert step.down.weights == pytest.approx(step.up.gradients, rel=0.02)
    travelled = sum(way.weights + way.activations + way.gradients for way in (step.down, step.up))
    assert last.floor_bytes == pytest.approx(travelled, rel=0.1)
    assert last.floor_bytes < travelled
    activations = 4 * 16 * 64 * 4  # of a batch, at the width of the model, in fp32
    assert step.up.activations >= activations
    assert (down.tiles, up.tiles, down.gradients, up.weights, up.graphs) == (0, 0, 0, 0, 0)
    assert found.steps[-1].traffic.down.graphs == 0  # devices have them since the first step
    assert to_dict(done)["traffic"]["down"]["weights"] == down.weights


def test_a_job_by_tiles(corpus_file: Path, tmp_path: Path) -> None:
    job = JobSpec(
        "opt-nano", str(corpus_file), STEPS, batch=1, seq=16, method="tiles", checkpoint_every=0
    )
    found = watched(job, tmp_path / "run")
    done, sent = found.done
    traffic = total(found.steps)
    assert done.traffic == traffic
    assert traffic.down.total == nbytes(sent, Direction.DOWN)
    assert traffic.down.tiles == nbytes(sent, Direction.DOWN, messages.Put) > 0
    assert traffic.up.tiles == nbytes(sent, Direction.UP, messages.Result) > 0
    assert traffic.down.total == traffic.down.tiles + traffic.down.other
    assert traffic.up.total == traffic.up.tiles + traffic.up.other
