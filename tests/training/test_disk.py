"""A full disk: a run waits for space and loses nothing. Real file systems, really full."""

from __future__ import annotations

import errno
import resource
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

import cleave
from cleave.errors import CleaveError
from cleave.training.loop import journal
from cleave.training.loop.checkpoint import load_latest
from cleave.training.loop.context import TrainContext
from cleave.training.loop.disk import (
    FIRST_RETRY_S,
    MOST_RETRY_S,
    STOPPING_S,
    DiskFullError,
    Patience,
    cannot_write,
)
from cleave.training.loop.job import JobSpec
from cleave.training.loop.records import DiskRecord, Record, StepRecord
from cleave.training.loop.run_folder import CHECKPOINTS, RunFolder
from cleave.training.loop.start import train
from tests.disks import Disk, small_disk
from tests.training.runs import losses_of, nightly, trained
from tests.training.test_checkpoint import full_disk

pytestmark = pytest.mark.slow

STEPS = 3


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with small_disk(tmp_path) as disk:
        yield disk


def job(corpus_file: Path, *, journal: bool = False) -> JobSpec:
    return JobSpec(
        "opt-nano", str(corpus_file), STEPS, batch=1, seq=16, checkpoint_every=1, journal=journal,
        method="tiles",
    )  # fmt: skip


def said(seen: list[Record]) -> list[str]:
    return [record.state for record in seen if isinstance(record, DiskRecord)]


class Run:
    """A run that is told when to fill its disk, and frees it after some seconds of waiting."""

    def __init__(self, disk: Disk, left_bytes: int, after_step: int) -> None:
        self.seen: list[Record] = []
        self.slept_s = 0.0
        self._disk = disk
        self._left_bytes = left_bytes
        self._after_step = after_step

    def report(self, record: Record) -> None:
        self.seen.append(record)
        if isinstance(record, StepRecord) and record.step == self._after_step:
            self._disk.fill(self._left_bytes)

    def sleep(self, seconds: float) -> None:
        self.slept_s += seconds
        if self.slept_s >= 10:
            self._disk.free()


@pytest.mark.parametrize(
    ("kind", "left_bytes"), [nightly("plain", 0), ("journal", 0), nightly("fleet", 200_000)]
)
def test_a_run_waits_for_space_and_goes_on(
    corpus_file: Path,
    tmp_path: Path,
    disk: Disk,
    plain_losses: Callable[[JobSpec], list[float]],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    left_bytes: int,
) -> None:
    monkeypatch.setattr(journal, "_RETRY_S", 0.001)
    run = Run(disk, left_bytes, after_step=2)
    folder = RunFolder(disk.path / "run")
    folder.path.mkdir()
    fleet = cleave.emulated(2) if kind != "plain" else None
    context = TrainContext(fleet, run.report, clock=lambda: 0.0, sleep=run.sleep)
    train(job(corpus_file, journal=kind == "journal"), folder, context)
    if fleet is not None:
        fleet.close()
    assert losses_of(run.seen) == pytest.approx(plain_losses(job(corpus_file)), rel=1e-4)
    assert said(run.seen) in (["full", "free"], ["full", "free"] * 2)
    written = [r["loss"] for r in folder.records() if r["event"] == "step"]
    assert written == losses_of(run.seen)
    found = load_latest(folder.path / CHECKPOINTS)
    assert found is not None
    assert found.step == STEPS
    assert not list(folder.path.rglob(".*"))  # no half of anything


def test_a_run_begins_when_there_is_space(corpus_file: Path, disk: Disk) -> None:
    run = Run(disk, 0, after_step=-1)
    folder = RunFolder(disk.path / "run")
    folder.path.mkdir()
    disk.fill(0)
    train(job(corpus_file), folder, TrainContext(None, run.report, sleep=run.sleep))
    assert said(run.seen) == ["full", "free"]
    assert len(losses_of(run.seen)) == STEPS


def test_a_run_that_is_to_stop_does_not_wait_for_ever(corpus_file: Path, tmp_path: Path) -> None:
    """And what it had written is whole. A limit on files in place of a full disk."""
    seen: list[Record] = []
    folder = RunFolder(tmp_path)
    slept: list[float] = []

    def report(record: Record) -> None:
        seen.append(record)
        if isinstance(record, StepRecord) and record.step == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))

    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with (
        full_disk(resource.RLIM_INFINITY if hard == resource.RLIM_INFINITY else hard),
        pytest.raises(DiskFullError, match=r"step-000003.*earlier checkpoints are unchanged"),
    ):
        train(
            job(corpus_file),
            folder,
            TrainContext(None, report, lambda: bool(slept), sleep=slept.append),
        )
    assert said(seen) == ["full"]
    found = load_latest(tmp_path / CHECKPOINTS)
    assert found is not None
    assert found.step == 2
    again = trained(job(corpus_file), folder, resume=True)
    assert losses_of(again)[0] == losses_of(seen)[2]


def test_a_record_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append({"step": 1})
    before = folder.metrics_path.read_bytes()
    with (
        full_disk(len(before) + 5),
        pytest.raises(DiskFullError, match=r"metrics\.jsonl.*free some space"),
    ):
        folder.append({"step": 2})
    assert folder.metrics_path.read_bytes() == before
    folder.append({"step": 2})
    assert [record["step"] for record in folder.records()] == [1, 2]


# --- patience ---


def test_it_waits_twice_as_long_each_time_and_says_it_once() -> None:
    told: list[bool] = []
    tries: list[float] = []
    slept: list[float] = []

    def write() -> str:
        tries.append(sum(slept))
        if sum(slept) < 300:
            raise DiskFullError("no space")
        return "written"

    patience = Patience(lambda full, text: told.append(full), lambda: False, slept.append)
    assert patience.insist(write) == "written"
    assert told == [True, False]
    pauses = [b - a for a, b in pairwise(tries)]
    assert pauses[:4] == [FIRST_RETRY_S * 2**n for n in range(4)]
    assert max(pauses) == MOST_RETRY_S
    assert patience.waited_s == sum(slept)
    assert patience.insist(lambda: 1) == 1
    assert told == [True, False]


def test_other_errors_are_not_waited_for(tmp_path: Path) -> None:
    patience = Patience(lambda full, text: None, lambda: False, lambda seconds: None)
    for number, full in ((errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EIO, False)):
        error = cannot_write(tmp_path, OSError(number, "said"))
        assert isinstance(error, DiskFullError) is full

    def broken() -> None:
        raise cannot_write(tmp_path, OSError(errno.EIO, "said"))

    with pytest.raises(CleaveError, match="said"):
        patience.insist(broken)
    assert patience.waited_s == 0


def test_stopping_ends_it_in_time() -> None:
    slept: list[float] = []

    def write() -> None:
        raise DiskFullError("no space")

    patience = Patience(lambda full, text: None, lambda: sum(slept) > 1000, slept.append)
    with pytest.raises(DiskFullError):
        patience.insist(write)
    assert 1000 + STOPPING_S <= sum(slept) <= 1000 + STOPPING_S + 2 * FIRST_RETRY_S
