"""Training that is asked to stop: the last whole step is what remains, wherever it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import cleave
from cleave.errors import UsageError
from cleave.planner.tiles.planner import TilePlanner
from cleave.training.loop.context import TrainContext
from cleave.training.loop.inputs import Dataset, prepare
from cleave.training.loop.job import Interval, JobSpec
from cleave.training.loop.records import DoneRecord, Record
from cleave.training.loop.run_folder import CHECKPOINTS, RunFolder
from cleave.training.loop.start import train
from tests.emulator.fleets import virtual
from tests.examples import thorough
from tests.training.runs import nightly, notes_of, steps_of, trained

STEPS = 3


@pytest.fixture(scope="module")
def planner() -> TilePlanner:
    """One for all fleets of two: they are planned for alike."""
    return TilePlanner()


class Impatient:
    """Asks to stop from some call on; its clock then runs so fast that no step ends in time."""

    def __init__(self, after: int) -> None:
        self.asked = 0
        self._after = after
        self._now_s = 0.0

    def stop(self) -> bool:
        self.asked += 1
        return self.asked > self._after

    def clock(self) -> float:
        self._now_s += 100.0
        return self._now_s


def run(
    job: JobSpec,
    dataset: Dataset,
    planner: TilePlanner,
    folder: Path,
    *,
    resume: bool = False,
    after: int = 10**9,
) -> tuple[list[Record], int]:
    """Train on emulated devices; the records, and how often it was asked whether to stop."""
    seen: list[Record] = []
    impatient = Impatient(after)
    with cleave.emulated(2) as fleet:
        fleet.planner = planner
        context = TrainContext(fleet, seen.append, impatient.stop, impatient.clock)
        train(job, RunFolder(folder), context, resume=resume, dataset=dataset)
        assert not fleet._under_way
        assert virtual(fleet).manager.scheduler.idle
    return seen, impatient.asked


def losses(seen: list[Record]) -> dict[int, float]:
    return {record.step: record.loss for record in steps_of(seen)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory", "clip"), [nightly("plain", 1.0), nightly("lean", 1.0), ("lean", 0.0)]
)
def test_a_step_is_given_up_or_finished_and_never_halved(
    corpus_file: Path, tmp_path: Path, planner: TilePlanner, memory: str, clip: float
) -> None:
    """Stopped at many moments, lean ones within the backward pass that steps included."""
    job = JobSpec(
        "opt-nano", str(corpus_file), STEPS, batch=1, seq=16, memory=memory, clip=clip,
        checkpoint_every=1, method="tiles")  # fmt: skip
    dataset = prepare(job, TrainContext(None, lambda record: None))
    whole, asked = run(job, dataset, planner, tmp_path / "whole")
    expected = losses(whole)
    finished_here = 0
    # The middle is in the backward pass of the second step.
    moments = range(0, asked, max(1, asked // 4)) if thorough() else [asked // 2]
    for moment in moments:
        folder = tmp_path / str(moment)
        first, _ = run(job, dataset, planner, folder, after=moment)
        done = first[-1]
        assert isinstance(done, DoneRecord)
        newest = max(path.name for path in (folder / CHECKPOINTS).iterdir())
        assert newest == f"step-{done.steps:06d}"
        finished_here += done.local_gemms
        again, _ = run(job, dataset, planner, folder, resume=True)
        found = losses(first) | losses(again)
        assert set(losses(first)) & set(losses(again)) == set()
        assert found == {step: pytest.approx(expected[step], rel=1e-4) for step in expected}
    # What was applied in part already is finished by the parameter server itself.
    assert (finished_here > 0) is (memory == "lean")


@pytest.mark.slow
def test_what_a_journal_has_of_a_step_that_is_given_up_is_not_lost(
    corpus_file: Path, tmp_path: Path, planner: TilePlanner
) -> None:
    """Stopped late in a step, after a checkpoint and before the first."""
    job = JobSpec(
        "opt-nano", str(corpus_file), STEPS, batch=1, seq=16, checkpoint_every=1, journal=True,
        method="tiles",
    )  # fmt: skip
    dataset = prepare(job, TrainContext(None, lambda record: None))
    whole, asked = run(job, dataset, planner, tmp_path / "whole")
    expected = losses(whole)
    for steps_done in (0, 1) if thorough() else (1,):
        folder = tmp_path / str(steps_done)
        moment = asked * (2 * steps_done + 1) // (2 * STEPS)  # in the middle of a step
        first, _ = run(job, dataset, planner, folder, after=moment)
        done = first[-1]
        assert isinstance(done, DoneRecord)
        assert (done.steps, done.stopped) == (steps_done, True)
        again, _ = run(job, dataset, planner, folder, resume=True)
        done = again[-1]
        assert isinstance(done, DoneRecord)
        assert done.journal_gemms > 0
        assert losses(first) | losses(again) == pytest.approx(expected, rel=1e-4)


def test_waiting_for_devices_that_never_come_ends_at_once(
    corpus_file: Path, tmp_path: Path
) -> None:
    """A served fleet without a device; the clock stands still."""
    job = JobSpec("opt-nano", str(corpus_file), STEPS, batch=1, seq=16, method="tiles")
    seen: list[Record] = []
    with cleave.serve() as server:

        def stop() -> bool:
            return any(record.EVENT == "fleet" for record in seen)

        context = TrainContext(server.fleet, seen.append, stop, lambda: 0.0)
        done = train(job, RunFolder(tmp_path), context)
        assert (done.steps, done.stopped) == (0, True)
        assert not server.fleet._under_way
    assert [path.name for path in (tmp_path / CHECKPOINTS).iterdir()] == ["step-000000"]
    again = trained(job, RunFolder(tmp_path), resume=True)
    assert list(losses(again)) == [1, 2, 3]


# --- how often ---


@pytest.mark.parametrize(
    ("said", "interval"),
    [
        (500, Interval(steps=500)),
        ("500", Interval(steps=500)),
        (0, Interval()),
        ("0", Interval()),
        ("90s", Interval(seconds=90)),
        ("10min", Interval(seconds=600)),
        ("1.5 h", Interval(seconds=5400)),
    ],
)
def test_intervals_are_steps_or_time(said: int | str, interval: Interval) -> None:
    job = JobSpec.from_dict({"model": "opt-nano", "checkpoint_every": said})
    assert job.interval == interval
    assert bool(interval) is (str(said) != "0")


@pytest.mark.parametrize("said", ["", "often", "-5", -1, "10 m", "0s", "1e3s", "9" * 30, "٣"])
def test_intervals_that_are_none(said: int | str) -> None:
    with pytest.raises(UsageError, match=r"--checkpoint-every is .*10min"):
        JobSpec("opt-nano", checkpoint_every=said)
    for kind in (True, 1.5, None):
        with pytest.raises(UsageError, match="checkpoint_every"):
            JobSpec.from_dict({"model": "opt-nano", "checkpoint_every": kind})


def written(job: JobSpec, folder: Path, clock: Callable[[], float]) -> list[str]:
    """The checkpoints that a run wrote, by their notes."""
    seen: list[Record] = []
    train(job, RunFolder(folder), TrainContext(None, seen.append, clock=clock))
    return [
        note[-6:] for note in notes_of(seen).splitlines() if note.startswith("checkpoint written")
    ]


def test_the_interval_is_a_time(corpus_file: Path, tmp_path: Path) -> None:
    """Steps of six minutes: one every second step. A run that is shorter has one at its end."""
    assert JobSpec("opt-nano", method="tiles").interval == Interval(seconds=600)
    job = JobSpec("opt-nano", str(corpus_file), 5, batch=1, seq=16, method="tiles")
    calls = 0

    def slow() -> float:
        nonlocal calls
        calls += 1
        return calls * 200.0  # asked some times a step, so that each takes minutes

    every = written(job, tmp_path / "slow", slow)
    assert every
    assert every[-1] == "000005"
    assert written(job, tmp_path / "fast", lambda: 0.0) == ["000005"]
