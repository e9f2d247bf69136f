"""What all tests share: a cache of their own, and small fixtures."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings

from tests.integration.processes import losses, records, run, training

# Machines that run tests are shared and slow: a deadline would test them, not the code.
settings.register_profile("cleave", deadline=None)
settings.load_profile("cleave")


@pytest.fixture(scope="session", autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests neither read nor fill the user's folders; the tokenizer is trained once per worker."""
    ours = {
        "CLEAVE_CACHE": str(tmp_path_factory.getbasetemp().parent / "cleave-cache"),
        "CLEAVE_STATE": str(tmp_path_factory.mktemp("cleave-state")),
        "CLEAVE_DATA": "none",  # servers forget, but where a test gives them a folder
    }
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small text to train on: enough for a few steps, read in no time."""
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    lines = [f"def step_{i}(a, b):\n    return a * {i} + b - {i % 7}\n" for i in range(3000)]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="session")
def plain_losses(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Ten steps of `training` in plain PyTorch; the first worker that needs them takes them."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    kept = shared / "plain-losses.json"
    with FileLock(shared / "plain-losses.lock"):
        if not kept.exists():
            done = run(*training(corpus_file, 10), "--devices", "0", cwd=own)
            kept.write_text(json.dumps(losses(records(done.stdout))))
    return [float(loss) for loss in json.loads(kept.read_text())]
