"""Models that were downloaded from the Hugging Face Hub."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from typer.testing import CliRunner

from cleave.errors import UsageError
from cleave.training.loop.context import TrainContext
from cleave.training.loop.job import JobSpec
from cleave.training.loop.run_folder import RunFolder
from cleave.training.loop.start import train
from cleave.training.results.trained import open_trained
from cleave.workload.models.build import resolve_model
from cleave_cli.main import app
from tests.training.runs import save_model

pytestmark = pytest.mark.slow

NAME = "somebody/small-llama"
REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which `hf download` stores models. It has one model, `NAME`."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    folder = cache / "models--somebody--small-llama"
    save_model(folder / "snapshots" / REVISION)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(REVISION)
    return cache


def test_a_downloaded_model_has_its_name_on_the_hub(downloads: Path) -> None:
    source = resolve_model(NAME)
    assert source.spec.name == "small-llama"
    assert source.folder is not None
    assert source.folder.name == REVISION
    shutil.rmtree(downloads)
    with pytest.raises(UsageError, match=rf"fetch it with `hf download {NAME}`, and give the name"):
        resolve_model(NAME)


@pytest.mark.parametrize("name", ["a b/c d", "../x", "~/y", "a/b/c", "/x"])
def test_what_is_no_name_on_the_hub_is_not_looked_up(downloads: Path, name: str) -> None:
    with pytest.raises(UsageError, match="no folder"):
        resolve_model(name)


def adapted(tmp_path: Path, corpus_file: Path, model: str) -> RunFolder:
    run = RunFolder.create(tmp_path / "runs", "adapted")
    job = JobSpec(model, str(corpus_file), 1, batch=2, seq=16, method="local", lora="r=2")
    train(job, run, TrainContext(None, lambda record: None))
    return run


@pytest.mark.usefixtures("downloads")
def test_exported_adapters_name_their_model_on_the_hub(tmp_path: Path, corpus_file: Path) -> None:
    """`peft` then finds it on any machine. Here they load with the downloaded model."""
    run = adapted(tmp_path, corpus_file, NAME)
    command = ["export", str(run.path), str(tmp_path / "out")]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert "public name" not in done.stderr  # nothing needs to be changed
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == NAME
    assert f"base_model: {NAME}\n" in (tmp_path / "out" / "README.md").read_text()
    opened: Any = open_trained(tmp_path / "out").model
    assert opened.config.vocab_size == 300
