"""A restarted server continues after the last step, although devices have lost their state."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from cleave.planner.stages.resident import Protection
from cleave.training.loop import ps_memory, resident_files, state_files, trainer
from cleave.training.loop.checkpoint import (
    DamagedCheckpointError,
    load_checkpoint,
    save_checkpoint,
    set_aside,
)
from cleave.training.loop.context import TrainContext
from cleave.training.loop.job import JobSpec, MemoryMode
from cleave.training.loop.records import Record
from cleave.training.loop.resident_files import ResidentFiles, load_resident
from cleave.training.loop.run_folder import (
    BEST,
    CHECKPOINTS,
    LAYERS,
    LOG,
    RESIDENT,
    REST,
    RunFolder,
    held_steps,
    resumable_step,
)
from cleave.training.loop.start import train
from cleave.training.loop.state_files import StateFiles, is_mapped
from cleave.training.stages.resident import ResidentState
from cleave.training.stages.stage_plans import StagePlans
from cleave.training.stages.staged import StagedModel
from cleave.training.stages.step_log import LogFolder
from cleave.workload.build import load_folder
from emulator.virtual import emulated
from profiles.fleet_device import FleetDevice
from tests.training.runs import losses, nightly, save_model, steps_of

STEPS = 9

# Devices whose snapshots arrive within a few steps.
DEVICES = [FleetDevice(f"device {n}", 1e9, 1e9, 1e9, 0.0, 2**31) for n in range(2)]


class KilledError(Exception):
    """Ends a run as SIGKILL does: nothing is written afterwards."""


def job_of(corpus_file: Path, **more: Any) -> JobSpec:
    settings: dict[str, Any] = {
        "model": "opt-nano", "data": str(corpus_file), "steps": STEPS, "batch": 2, "seq": 8,
        "method": "stages", "state": "devices", "eval_every": 4, "eval_batches": 1,
        "checkpoint_every": 6, "warmup_steps": 2, **more,
    }  # fmt: skip
    return JobSpec(**settings)


class Killer:
    """Calls functions until the run is killed.

    Args:
        at: number of the call in which the run is killed.
        after: whether the function is called before that.
    """

    def __init__(self, at: int, *, after: bool) -> None:
        self._at, self._after = at, after
        self.calls = 0

    def wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            self.calls += 1
            if self.calls < self._at or (self.calls == self._at and self._after):
                found = function(*args, **named)
                if self.calls < self._at:
                    return found
            raise KilledError

        return call


def run(job: JobSpec, folder: RunFolder, **how: Any) -> list[Record]:
    """Train, or resume, on a fleet of new devices."""
    seen: list[Record] = []
    resume = folder.config_path.exists()
    with (
        emulated(DEVICES) as fleet,
        mock.patch.object(StagePlans, "protection", return_value=Protection(2, 9)),
    ):
        train(job, folder, TrainContext(fleet, seen.append), resume=resume, restart=True, **how)
    return seen


def state_at(position: int, under_way: int | None) -> Any:
    """Return a state on devices with one parameter, `y`, after some updates."""
    return SimpleNamespace(position=position, under_way=under_way, names={"y"})


def recorded(folder: RunFolder, event: str) -> list[int]:
    return [record["step"] for record in folder.records() if record.get("event") == event]


FUNCTIONS = {
    "the log": (LogFolder, "write"),
    "the update": (ResidentState, "add"),
    "a record": (RunFolder, "append"),
    "a snapshot": (resident_files, "save_checkpoint"),
    "a checkpoint": (trainer, "save_checkpoint"),
    "removing": (resident_files, "remove_checkpoints"),
    "an evaluation": (trainer.Trainer, "evaluate"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "at", "after", "head"),
    [
        ("the log", 3, False, True),
        nightly("the log", 5, True, False),
        ("the update", 8, False, False),
        ("a record", 6, False, False),
        ("a snapshot", 4, True, True),
        nightly("a snapshot", 5, False, False),
        ("a checkpoint", 1, False, False),
        ("removing", 3, True, True),
        ("an evaluation", 1, True, False),
        *(
            nightly(function, at, after, head)
            for function in FUNCTIONS
            for at in (1, 2, 7, 8)
            for after in (False, True)
            for head in (False, True)
        ),
    ],
)
def test_no_step_is_lost_or_repeated(
    tmp_path: Path,
    corpus_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    at: int,
    after: bool,
    head: bool,
) -> None:
    """Also if a device has the LM head and the embedding."""
    monkeypatch.setattr(StagedModel, "_head_moves", lambda *_: head)
    job, folder = job_of(corpus_file), RunFolder(tmp_path)
    plain = losses(replace(job, method="local", state="server"), RunFolder(tmp_path / "plain"))
    where, name = FUNCTIONS[function]
    killer = Killer(at, after=after)
    killing = mock.patch.object(where, name, killer.wrapped(getattr(where, name)))
    with killing, contextlib.suppress(KilledError):
        run(job, folder)
    before = recorded(folder, "step")
    reached = resumable_step(folder.path) or 0
    seen = [] if any("steps" in each for each in folder.records()) else run(job, folder)
    assert max(held_steps(folder.path / CHECKPOINTS)) == STEPS
    again = [record.step for record in steps_of(seen)]
    assert recorded(folder, "step") == [*range(1, STEPS + 1)]
    assert recorded(folder, "eval") == [4, 8, 9]
    assert again == [*range((again or [STEPS + 1])[0], STEPS + 1)]
    if function not in ("a snapshot", "removing"):  # their thread does not end the run at once
        assert not again or again[0] > min(len(before), reached or 0)
    found = [r["loss"] for r in folder.records() if r.get("event") == "step"]
    assert found == pytest.approx(plain, rel=1e-5)


def killed(job: JobSpec, folder: RunFolder, at: int) -> None:
    """Kill a run after a step is in the log, and before it is recorded."""
    killer = Killer(at, after=True)
    killing = mock.patch.object(LogFolder, "write", killer.wrapped(LogFolder.write))
    with killing, pytest.raises(KilledError):
        run(job, folder)


@pytest.mark.parametrize(
    "change",
    [{"state": "server"}, {"state": "auto"}, {"steps": STEPS + 1, "schedule": "constant"}, {}],
)
def test_the_log_is_used_only_if_the_run_goes_on_as_before(
    tmp_path: Path, corpus_file: Path, change: dict[str, Any]
) -> None:
    """With other settings, the run resumes from the snapshot and removes the log."""
    first = job_of(corpus_file, checkpoint_every=20, schedule="constant")
    folder = RunFolder(tmp_path)
    killed(first, folder, 6)
    base, job = max(held_steps(folder.path / LAYERS)), replace(first, **change)
    assert base < 6
    seen = run(job, folder)
    plain = replace(job, method="local", state="server")
    again = [record.step for record in steps_of(seen)]
    assert again[0] == (base + 1 if change.get("state") == "server" else 6)
    found = [r["loss"] for r in folder.records() if r.get("event") == "step"]
    assert found == pytest.approx(losses(plain, RunFolder(tmp_path / "plain")), rel=1e-5)
    assert LogFolder(folder.path / LOG).numbers() == []


def test_another_learning_rate_ends_the_log(tmp_path: Path, corpus_file: Path) -> None:
    """More steps give a linear schedule other rates."""
    first = job_of(corpus_file, checkpoint_every=20, schedule="linear")
    folder = RunFolder(tmp_path)
    killed(first, folder, 6)
    base = max(held_steps(folder.path / LAYERS))
    seen = run(replace(first, steps=STEPS + 2, warmup_steps=2), folder)
    assert steps_of(seen)[0].step == base + 1


def test_without_checkpoints_nothing_is_kept(tmp_path: Path, corpus_file: Path) -> None:
    folder = RunFolder(tmp_path)
    run(job_of(corpus_file, checkpoint_every=0), folder)
    assert not (folder.path / RESIDENT).exists()


@pytest.mark.parametrize("head", [False, True])
def test_checkpoints_after_a_time_are_made_of_snapshots_while_devices_work(
    tmp_path: Path, corpus_file: Path, monkeypatch: pytest.MonkeyPatch, head: bool
) -> None:
    """Devices do not stop to return their state, and a run resumes from such a checkpoint."""
    monkeypatch.setattr(StagedModel, "_head_moves", lambda *_: head)
    job = job_of(corpus_file, checkpoint_every="0.001s", save_total_limit=99, eval_every=0)
    plain, folder = RunFolder(tmp_path / "plain"), RunFolder(tmp_path / "run")
    wanted = losses(replace(job, method="local", state="server", checkpoint_every=1), plain)
    fetch = Killer(1, after=False).wrapped(ResidentState.of_fetch)
    monkeypatch.setattr(ResidentState, "of_fetch", fetch)
    with pytest.raises(KilledError):  # when it fetches the state, after the last step
        run(job, folder)
    monkeypatch.undo()
    monkeypatch.setattr(StagedModel, "_head_moves", lambda *_: head)
    found = held_steps(folder.path / CHECKPOINTS)
    assert found
    assert max(found) < STEPS
    for step in found:
        mine, other = (
            load_checkpoint(each.path / CHECKPOINTS / f"step-{step:06d}")
            for each in (folder, plain)
        )
        assert mine.meta["position"] == other.meta["position"]
        assert mine.tensors.keys() == other.tensors.keys()
        for name, tensor in mine.tensors.items():
            torch.testing.assert_close(tensor, other.tensors[name], rtol=1e-3, atol=5e-5)
    shutil.rmtree(folder.path / RESIDENT)
    again = [record.step for record in steps_of(run(job, folder))]
    assert again == [*range(max(found) + 1, STEPS + 1)]
    assert [r["loss"] for r in folder.records() if r.get("event") == "step"] == pytest.approx(
        wanted, rel=1e-5
    )


def test_two_halves_of_a_checkpoint_are_of_one_process(tmp_path: Path) -> None:
    """One half is damaged, and the next process is killed before it has written both halves."""
    here = RunFolder(tmp_path).path
    for name in (LAYERS, REST):
        save_checkpoint(here / name, step=4, tensors={name: torch.ones(3)}, meta={})
    (here / REST / "step-000004" / "tensors.safetensors").write_bytes(b"damaged")
    damaged: list[DamagedCheckpointError] = []
    assert load_resident(here, damaged.append) is None
    set_aside(damaged[0].path)
    files = ResidentFiles(here, None, print)
    files.follow(4, state_at(2, 4), {"model.y": torch.zeros(3), "x": torch.zeros(3)}, {})
    files.close()
    assert held_steps(here / REST) == [4]
    assert load_resident(here, print) is None


def test_the_newer_of_two_folders_for_a_step_is_used(tmp_path: Path) -> None:
    """The older folder could not be removed after it was replaced."""
    for name, value in (("step-000004.replaced", 1.0), ("step-000004", 2.0)):
        made = save_checkpoint(
            tmp_path / "made", step=4, tensors={"x": torch.full((3,), value)}, meta={}
        )
        (tmp_path / REST).mkdir(parents=True, exist_ok=True)
        made.rename(tmp_path / REST / name)
    save_checkpoint(tmp_path / LAYERS, step=4, tensors={"y": torch.ones(3)}, meta={})
    found = load_resident(tmp_path, print)
    assert found is not None
    assert found.tensors["x"][0] == 2.0


def test_snapshots_that_never_arrive_leave_no_files(tmp_path: Path) -> None:
    """The devices that return these snapshots leave."""
    tensors = {"model.y": torch.ones(3), "x": torch.ones(3)}
    files = ResidentFiles(tmp_path, None, print)
    files.follow(0, state_at(0, None), tensors, {})
    for step in range(2, 12, 2):
        files.follow(step, state_at(0, step), tensors, {})
    files.wait()
    assert held_steps(tmp_path / REST) == [10, 0]
    files.follow(12, state_at(10, 12), tensors, {})  # one has arrived, and the next one has begun
    files.close()
    assert held_steps(tmp_path / REST) == [12, 10]
    assert held_steps(tmp_path / LAYERS) == [10]


def test_fewer_steps_than_done_still_leave_a_checkpoint(tmp_path: Path, corpus_file: Path) -> None:
    """Export and `cleave generate` use the folder of checkpoints only."""
    job, folder = job_of(corpus_file, checkpoint_every=20, schedule="constant"), RunFolder(tmp_path)
    killed(job, folder, 6)
    base = max(held_steps(folder.path / LAYERS))
    assert not held_steps(folder.path / CHECKPOINTS)
    run(replace(job, steps=base), folder)
    assert held_steps(folder.path / CHECKPOINTS) == [base]
    assert not held_steps(folder.path / LAYERS)


def test_records_that_a_power_loss_took_are_written_again(
    tmp_path: Path, corpus_file: Path
) -> None:
    job, folder = job_of(corpus_file, checkpoint_every=20), RunFolder(tmp_path)
    killed(job, folder, 6)
    assert max(held_steps(folder.path / LAYERS)) == 4
    lines = folder.metrics_path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if b'"step": 5' not in line]
    folder.metrics_path.write_bytes(b"".join(kept) + b"\0\0\0\n")
    run(job, folder)
    assert recorded(folder, "step") == [*range(1, STEPS + 1)]
    assert recorded(folder, "eval") == [4, 8, 9]


def test_the_best_checkpoint_is_not_lost(tmp_path: Path, corpus_file: Path) -> None:
    """The run is killed between a held-out loss and its checkpoint."""
    job = job_of(corpus_file, checkpoint_every=20, eval_every=20, keep_best=True)
    folder = RunFolder(tmp_path)
    killing = mock.patch.object(trainer, "save_checkpoint", side_effect=KilledError)
    with killing, pytest.raises(KilledError):
        run(job, folder)
    run(job, folder)
    assert recorded(folder, "eval") == [STEPS]
    assert held_steps(folder.path / BEST) == [STEPS]


def test_the_log_is_not_used_with_other_frozen_weights(tmp_path: Path, corpus_file: Path) -> None:
    """With these weights, devices' passes would have other results than those in the log."""
    made = save_model(tmp_path, "llama")
    job = job_of(corpus_file, model=str(made), checkpoint_every=20, lora="r=2")
    folder = RunFolder(tmp_path / "run")
    killed(job, folder, 6)
    base = max(held_steps(folder.path / LAYERS))
    config = (made / "config.json").read_bytes()
    other, _ = load_folder(made)
    with torch.no_grad():
        other.get_parameter("model.layers.1.mlp.up_proj.weight").add_(0.01)
    other.save_pretrained(made)
    (made / "config.json").write_bytes(config)
    seen = run(job, folder, accept_changes=True)
    assert steps_of(seen)[0].step == base + 1


@pytest.mark.parametrize("why", ["little memory", "--state-dir"])
@pytest.mark.parametrize("model", ["new weights", "a folder in fp16"])
def test_with_layers_in_files_the_run_is_the_same(
    tmp_path: Path, corpus_file: Path, why: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(corpus_file, checkpoint_every=20)
    if model == "a folder in fp16":
        source = tmp_path / "model"
        save_model(source)
        load_folder(source)[0].half().save_pretrained(source)
        job = replace(job, model=str(source))
    plain = losses(replace(job, method="local", state="server"), RunFolder(tmp_path / "plain"))
    monkeypatch.setattr(state_files, "LEAST_BYTES", 16)
    if why == "little memory":
        monkeypatch.setattr(ps_memory, "_MOST", {MemoryMode.PLAIN: 0.0})
    else:
        job = replace(job, state_dir=str(tmp_path / "state"))
    seen: list[Sequence[bool]] = []

    def placed(self: StateFiles, modules: Sequence[torch.nn.Module]) -> None:
        move(self, modules)
        seen.append([is_mapped(p) for module in modules for p in module.parameters()])

    move = StateFiles.move_parameters
    monkeypatch.setattr(StateFiles, "move_parameters", placed)
    folder = RunFolder(tmp_path / "run")
    killed(job, folder, 5)
    run(job, folder)
    assert len(seen) == 2
    assert all(map(all, seen))
    found = [r["loss"] for r in folder.records() if r.get("event") == "step"]
    assert found == pytest.approx(plain, rel=1e-5)
