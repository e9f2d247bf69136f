"""The folder of a run: names, configuration, metrics that survive crashes, the curve."""

import json
import math
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.errors import CleaveError, UsageError
from cleave.files import write_atomically
from cleave.training.loop.run_folder import RunFolder

NOW = datetime(2026, 5, 9, 4, 5, 6)


def test_folders_are_named_by_time_and_never_shared(tmp_path: Path) -> None:
    folders = [RunFolder.create(tmp_path / "runs", now=NOW).path for _ in range(3)]
    assert [folder.name for folder in folders] == [
        "20260509-040506",
        "20260509-040506-2",
        "20260509-040506-3",
    ]
    assert all(folder.is_dir() for folder in folders)


def test_a_given_name_is_kept_and_may_not_be_taken(tmp_path: Path) -> None:
    assert RunFolder.create(tmp_path, "first").path == tmp_path / "first"
    with pytest.raises(UsageError, match=r"first.*already exists"):
        RunFolder.create(tmp_path, "first")


@pytest.mark.parametrize("name", ["", "..", "a/b", "a\\b", "a\n", "a\udcff"])
def test_a_name_is_not_a_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"--name must have visible characters and no slashes"):
        RunFolder.create(tmp_path, name)


def test_a_root_that_is_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CleaveError, match="cannot be written"):
        RunFolder.create(tmp_path / "file", "run")


def test_config_comes_back_without_its_nones(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path)
    run.write_config({"seed": 1, "data": None, "model": {"id": "opt", "path": Path("/m")}})
    assert run.read_config() == {"seed": 1, "model": {"id": "opt", "path": "/m"}}
    assert [path.name for path in run.path.iterdir()] == ["config.toml"]


def test_a_missing_or_damaged_config_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunFolder(tmp_path / "one" / "run")
    with pytest.raises(UsageError, match=r"there is no run folder .*; there are none yet"):
        run.read_config()
    run.path.mkdir(parents=True)
    for name in ("a", "b"):
        RunFolder.create(tmp_path / "runs", name).write_config({"seed": 1})
    with pytest.raises(UsageError, match=r"no run folder '.*/c'; use one of .*runs/a, .*runs/b"):
        RunFolder(tmp_path / "runs" / "c").read_config()
    run.config_path.write_text("seed = = 1")
    with pytest.raises(UsageError, match="damaged"):
        run.read_config()


def test_records_come_back_as_plain_json(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert list(run.records()) == []
    run.append({"step": 1, "loss": np.float32(0.5), "tokens": torch.tensor(7), "up": math.inf})
    run.append({"step": 2, "loss": math.nan, "plan": {"sides": (1, 2)}})
    expected = [
        {"step": 1, "loss": 0.5, "tokens": 7, "up": None},
        {"step": 2, "loss": None, "plan": {"sides": [1, 2]}},
    ]
    assert list(run.records()) == expected
    assert [json.loads(line) for line in run.metrics_path.read_text().splitlines()] == expected


@settings(deadline=None)  # files take as long as they take
@given(steps=st.integers(1, 8), cut=st.integers(0, 200), resumed=st.integers(0, 9))
def test_a_rewound_run_reads_as_if_nothing_had_happened(
    tmp_path_factory: pytest.TempPathFactory, steps: int, cut: int, resumed: int
) -> None:
    """However many bytes of the last lines a crash takes, repeating the lost steps heals it."""
    run = RunFolder.create(tmp_path_factory.mktemp("runs"))
    written = [{"step": step, "loss": 1 / step} for step in range(1, steps + 1)]
    for record in written:
        run.append(record)
    data = run.metrics_path.read_bytes()
    run.metrics_path.write_bytes(data[: max(0, len(data) - cut)])

    run.rewind(resumed)
    survivors = list(run.records())
    assert survivors == written[: min(resumed, len(survivors))]
    for record in written[len(survivors) :]:
        run.append(record)
    assert run.metrics_path.read_bytes() == data


def test_a_half_line_is_not_a_record_and_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.metrics_path.write_text('{"step": 1}\n{"st')
    assert list(run.records()) == [{"step": 1}]
    run.metrics_path.write_text('{"step": 1}\n\0\0\0\n{"step": 2}\n{"event": "resumed"}\n')
    with pytest.raises(CleaveError, match="line 2"):
        list(run.records())
    run.rewind(2)
    assert list(run.records()) == [{"step": 1}, {"step": 2}, {"event": "resumed"}]


def test_a_crash_after_the_first_byte_is_healed(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.metrics_path.write_text("{")
    run.rewind(0)
    assert list(run.records()) == []


def test_rewinding_a_run_without_metrics_writes_nothing(tmp_path: Path) -> None:
    RunFolder(tmp_path).rewind(5)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("plots")
def test_plot_draws_what_was_recorded(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.append({"event": "started"})
    assert run.plot() is None
    for step in range(1, 4):
        run.append({"step": step, "loss": math.nan if step == 2 else 1 / step})
    run.append({"step": 3, "eval_loss": 0.4})
    path = run.plot()
    assert path == tmp_path / "loss.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_an_atomic_write_that_fails_leaves_the_old_file_alone(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()  # a folder cannot be replaced by a file
    with pytest.raises(OSError, match="directory"):
        write_atomically(target, b"new")
    assert list(tmp_path.iterdir()) == [target]
