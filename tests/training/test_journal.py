"""The block journal: what a crash leaves of it, what is taken from it, and when it is off."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.crash import OrderedBackend
from cleave.arrays import Buffer, DType, empty
from cleave.errors import UsageError
from cleave.fleet.product import Side
from cleave.machine.backends import NumpyBackend
from cleave.training.loop import journal as j
from cleave.training.loop.context import TrainContext
from cleave.training.loop.disk import Patience
from cleave.training.loop.job import JobSpec
from cleave.training.loop.journal import Journal
from cleave.training.loop.records import DoneRecord, Record, StepRecord
from cleave.training.loop.run_folder import JOURNAL, RunFolder
from cleave.training.loop.start import train
from emulator.virtual import emulated
from tests.training.runs import losses_of, notes_of, trained

SIDES = ((7, 5, 3), (4, 6, 2), (1, 9, 8))  # m, k, n


class Counting(NumpyBackend):
    """Counts the products that a fleet computed."""

    def __init__(self) -> None:
        self.products = 0

    def matmul(self, a: Buffer, b: Buffer, out: Buffer, *, accumulate: bool = False) -> None:
        self.products += 1
        super().matmul(a, b, out, accumulate=accumulate)


class Scene:
    """A fleet, and journals in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.backend = Counting()
        self.fleet = emulated(1, backend=self.backend)
        self.said: list[str] = []
        self.now_s = 0.0
        self.stopping = False
        self.told: list[bool] = []
        self.woken: Callable[[], None] = lambda: None  # called while a full disk is waited for
        self.patience = Patience(
            lambda full, text: self.told.append(full),
            lambda: self.stopping,
            lambda seconds: self.woken(),
        )

    def journal(self, base: int = 0, queue_bytes: int = j.QUEUE_BYTES) -> Journal:
        return Journal(
            self.folder, base, say=self.said.append, clock=lambda: self.now_s,
            patience=self.patience, queue_bytes=queue_bytes,
        )  # fmt: skip

    def step(self, journal: Journal, step: int, seed: int = 0, lasts_s: float = 1.0) -> int:
        """Do some products; returns how many the fleet computed."""
        before = self.backend.products
        journal.begin(step)
        for place, (m, k, n) in enumerate(SIDES):
            rng = np.random.default_rng([step, place, seed])
            a, b = (rng.integers(-9, 9, shape).astype(np.float32) for shape in ((m, k), (k, n)))
            left, right = (Side(self.fleet.operand(Buffer(x, DType.FP32))) for x in (a, b))
            out = journal.multiply(self.fleet, left, right, empty(m, n, DType.FP32)).result()
            np.testing.assert_array_equal(out.array, a @ b)
            out.array[...] += 1  # as a bias is added
        self.now_s += lasts_s
        journal.end()
        return self.backend.products - before


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path / "journal")


def test_what_was_finished_is_taken_from_disk(scene: Scene) -> None:
    first = scene.journal()
    computed = scene.step(first, 0) + scene.step(first, 1)
    assert computed >= 2 * len(SIDES)
    first.close()
    second = scene.journal()
    assert second.held == 2 * len(SIDES)
    assert scene.step(second, 0) == scene.step(second, 1) == 0
    assert scene.step(second, 2) > 0
    done = second.counters
    assert done.taken == 2 * len(SIDES)
    assert done.written_bytes == 4 * sum(m * n for m, _, n in SIDES)
    second.close()
    third = scene.journal()
    assert [scene.step(third, step) for step in range(3)] == [0, 0, 0]
    third.close()


def test_other_operands_are_computed_anew_and_replace_what_was_there(scene: Scene) -> None:
    for seed, reused in ((0, False), (1, False), (1, True), (0, False)):
        journal = scene.journal()
        assert (scene.step(journal, 0, seed) == 0) is reused
        journal.close()


def test_a_torn_tail_is_cut_off_wherever_it_tears(scene: Scene) -> None:
    journal = scene.journal()
    scene.step(journal, 0)
    journal.close()
    (file,) = scene.folder.iterdir()
    whole = file.read_bytes()
    ends = [8]  # of the records: after the magic
    for m, _, n in SIDES:
        ends.append(ends[-1] + j._RECORD_BYTES + 4 * m * n)
    assert ends[-1] == len(whole)
    for length in {*range(0, len(whole), 5), *ends, *(end - 1 for end in ends)}:
        file.write_bytes(whole[:length])
        journal = scene.journal()
        expected = sum(end <= length for end in ends[1:])
        assert journal.held == expected
        assert file.stat().st_size == max(8, ends[expected] if length >= 8 else 0)
        journal._writer.close()
        journal._file.close()
    file.write_bytes(whole[: ends[2] + 5])
    journal = scene.journal()
    assert scene.step(journal, 0) > 0
    journal.close()
    assert file.read_bytes()[: ends[2]] == whole[: ends[2]]
    journal = scene.journal()
    assert scene.step(journal, 0) == 0
    journal.close()


def test_no_flipped_bit_is_used(scene: Scene) -> None:
    journal = scene.journal()
    scene.step(journal, 0)
    journal.close()
    (file,) = scene.folder.iterdir()
    whole = file.read_bytes()
    for place in range(0, len(whole), 11):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << (place % 8)
        file.write_bytes(damaged)
        journal = scene.journal()
        assert scene.step(journal, 0) > 0  # and the products are right: `step` looks
        journal.close()
        journal = scene.journal()
        assert scene.step(journal, 0) == 0
        journal.close()
        file.write_bytes(whole)


def test_a_newer_checkpoint_covers_it(scene: Scene) -> None:
    journal = scene.journal()
    scene.step(journal, 0)
    journal.covered(1)
    assert [path.name for path in scene.folder.iterdir()] == ["step-000001.blocks"]
    scene.step(journal, 1)
    journal.close()
    journal = scene.journal(base=1)
    assert journal.held == len(SIDES)
    journal.covered(2)
    journal.close()
    assert not scene.folder.exists()  # it holds nothing
    (scene.folder).mkdir()
    for name in ("step-000004.blocks", "step-000009.blocks", "notes.txt"):
        (scene.folder / name).touch()
    scene.journal(base=4).close()  # killed between the checkpoint and the removal
    assert [path.name for path in scene.folder.iterdir()] == ["notes.txt"]


def test_it_asks_for_a_checkpoint_when_it_is_larger_than_one(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(j, "LEAST_BYTES", 0)
    journal = scene.journal()
    scene.step(journal, 0)
    written = journal.counters.written_bytes
    assert journal.outgrown(written)
    assert not journal.outgrown(2 * written + 1000)
    journal.close()
    journal = scene.journal()
    assert not journal.outgrown(0)  # a checkpoint now would throw away what is to be taken
    scene.step(journal, 0)
    assert journal.outgrown(0)
    journal.close()


def test_it_is_off_when_steps_are_shorter_than_its_cost(scene: Scene) -> None:
    journal = scene.journal()
    for step in range(6):
        scene.step(journal, step)
    assert journal.on
    journal._writer.write_s += 40.0  # a slow disk
    scene.step(journal, 6)
    journal._writer.write_s += 40.0
    scene.step(journal, 7)
    assert not journal.on
    assert len(scene.said) == 1
    assert "the journal is off: it adds" in scene.said[0]
    written = journal.counters.written_bytes
    assert scene.step(journal, 8) > 0
    assert journal.counters.written_bytes == written
    journal.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("queue_bytes", [1, j.QUEUE_BYTES])
def test_a_full_disk_is_waited_for(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, queue_bytes: int
) -> None:
    """Whether what is to be written fits into memory or not."""
    monkeypatch.setattr(j, "_RETRY_S", 0.001)
    journal = scene.journal(queue_bytes=queue_bytes)
    assert scene.step(journal, 0, lasts_s=0.0) > 0
    journal._writer.drain()  # or its thread could fsync /dev/full, which fails for good
    with open("/dev/full", "r+b", buffering=0) as full:
        file, journal._writer.file = journal._writer.file, full

        def space() -> None:
            journal._writer.file = file

        scene.woken = space
        for place in range(1, 4):
            # No time passes: a thread that is slow between two looks at the clock costs nothing.
            assert scene.step(journal, place, lasts_s=0.0) > 0
        while journal._writer.file is full:  # the thread came to it after the last step
            scene.patience.insist(journal._writer.check)
    times = len(scene.told) // 2  # as often as the thread came to it before there was space
    assert times
    assert scene.told == [True, False] * times
    assert journal.on
    journal.close()
    assert scene.said == []
    assert scene.journal().held == 4 * len(SIDES)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk_switches_it_off_when_training_is_to_stop(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(j, "_RETRY_S", 0.001)
    journal = scene.journal(queue_bytes=1)
    scene.stopping = True
    with open("/dev/full", "r+b", buffering=0) as full:
        journal._writer.file = full
        assert scene.step(journal, 0) > 0
        assert not journal.on
        assert "No space left" in scene.said[0]
        assert scene.step(journal, 1) > 0
        journal.close()
    assert len(scene.said) == 1


# --- in training ---


def run(
    job: JobSpec, folder: Path, backend: NumpyBackend, *, resume: bool = False
) -> tuple[list[float], list[Record]]:
    """Train on emulated devices and return losses and records."""
    seen: list[Record] = []
    with emulated(2, backend=backend) as fleet:
        context = TrainContext(fleet, seen.append, clock=lambda: 0.0)
        train(job, RunFolder(folder), context, resume=resume)
    return losses_of(seen), seen


class Snapshots(OrderedBackend, NumpyBackend):
    """Copies the run's folder at some products: what a SIGKILL at that moment leaves."""

    def __init__(self, at: tuple[int, ...], copy: Callable[[int], None]) -> None:
        self._at = at
        self._copy = copy
        self._seen = 0

    def matmul(self, a: Buffer, b: Buffer, out: Buffer, *, accumulate: bool = False) -> None:
        if self._seen in self._at:
            self._copy(self._seen)
        self._seen += 1
        super().matmul(a, b, out, accumulate=accumulate)


@pytest.mark.slow
def test_a_run_that_was_cut_inside_a_step_goes_on_inside_it(
    corpus_file: Path, tmp_path: Path
) -> None:
    job = JobSpec(
        "opt-nano", str(corpus_file), 3, batch=1, seq=8, checkpoint_every=2, method="tiles"
    )
    with pytest.raises(UsageError, match="--checkpoint-every"):
        replace(job, journal=True, checkpoint_every=0)
    whole, _ = run(job, tmp_path / "whole", Snapshots((), lambda _: None))
    job = replace(job, journal=True)
    at = tuple(int(place) for place in np.random.default_rng(0).integers(60, 250, 2))

    def copy(place: int) -> None:
        shutil.copytree(tmp_path / "run", tmp_path / f"cut-{place}")

    journaled, seen = run(job, tmp_path / "run", Snapshots(at, copy))
    assert journaled == whole
    assert all(r.journal_bytes > 0 for r in seen if isinstance(r, StepRecord))
    assert not (tmp_path / "run" / JOURNAL).exists()  # the last checkpoint covers everything
    taken = 0
    again = tmp_path / "again"
    cuts = sorted(tmp_path.glob("cut-*"))
    assert cuts
    shutil.copytree(cuts[0], again)
    for cut in cuts:
        run(job, cut, Snapshots((), lambda _: None), resume=True)
        steps = [r for r in RunFolder(cut).records() if r["event"] == "step"]
        assert [r["loss"] for r in steps] == whole, cut
        assert {r["method"] for r in steps} == {"tiles"}  # of a first step, all is in the journal
        (done,) = [r for r in RunFolder(cut).records() if r["event"] == "done"]
        taken += done["journal_gemms"]
    assert taken > 0
    _, seen = run(replace(job, journal=False), again, Snapshots((), lambda _: None), resume=True)
    assert isinstance(seen[-1], DoneRecord)


def test_without_a_fleet_there_is_nothing_to_keep(corpus_file: Path, tmp_path: Path) -> None:
    job = JobSpec(
        model="opt-nano", data=str(corpus_file), steps=1, batch=1, seq=8, journal=True,
        method="tiles",
    )  # fmt: skip
    assert "journal is off" in notes_of(trained(job, RunFolder(tmp_path / "run")))
