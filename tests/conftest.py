"""What all tests share: a cache of their own, and small fixtures."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings

from cleave.machine import backends
from cleave.training.loop.job import JobSpec
from cleave.training.loop.records import Record, StepRecord
from cleave.training.loop.run_folder import RunFolder
from tests.examples import examples, thorough
from tests.log_lines import LogLines, logged
from tests.machine import swiftshader

# Machines that run tests are shared and slow: a deadline would test them, not the code, and so
# would looking how long examples take to draw.
_PATIENT: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("cleave", **_PATIENT, max_examples=examples(100))
settings.load_profile("cleave")

# Torch and its exporter keep a million objects alive; the default looks through them so often that
# it takes a quarter of an export.
gc.set_threshold(100_000)

# A shell that starts the tests in the background makes them ignore Ctrl-C, and with them all
# processes that they start. Some tests interrupt these processes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

NOT_UNIT = (
    "android", "faults", "integration", "web",
    "benchmarks/test_local_losses.py", "training/test_local_updates.py",
    "training/test_resident_resume.py", "training/test_several_servers.py",
)  # fmt: skip
"""Folders and files of tests that need a JVM, a browser, processes or a network, or train long."""

LONGEST = (
    "test_join.py", "test_stages.py", "test_discovery.py", "test_local_updates.py",
    "test_resident_resume.py",
)  # fmt: skip
"""Left for last, these would keep one worker busy while the others have nothing to do."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--unit`."""
    parser.addoption(
        "--unit",
        action="store_true",
        help="only tests that need no browser, JVM, fleet of processes or network, and are not "
        "marked slow; few examples of each property",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Read nothing of the folders and files that `--unit` leaves out."""
    here = Path(__file__).parent
    if config.getoption("--unit") and collection_path in [here / name for name in NOT_UNIT]:
        return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest files first. Leave out nightly tests, and slow tests with `--unit`."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
    left_out = [] if thorough() else ["nightly"]
    if config.getoption("--unit"):
        left_out.append("slow")
    gone = [item for item in items if any(map(item.get_closest_marker, left_out))]
    if len(config.args) == 1 and "::" in config.args[0]:  # one test, asked for by name
        return
    config.hook.pytest_deselected(items=gone)
    items[:] = [item for item in items if item not in set(gone)]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say in one place what this machine cannot test, and what to install for it."""
    missing = [
        f"{what}: install {how}"
        for what, programs, how in (
            ("the Android client", ("javac",), "a JDK (Debian: default-jdk-headless)"),
            ("the web pages in a browser", ("chromium", "chrome", "google-chrome"), "Chromium"),
            ("the web client", ("npm",), "Node.js with npm (Debian: nodejs npm)"),
        )
        if not any(which(program) for program in programs)
    ]
    if find_spec("wandb") is None:
        missing.append("curves in Weights & Biases: pip install 'cleave-train[wandb]'")
    if swiftshader.environment() is None or find_spec("onnxruntime_ep_webgpu") is None:
        how = "Chromium, libvulkan1 and pip install 'cleave-train[gpu]'"
        missing.append(f"graphs through WebGPU: install {how}")
    if missing:
        terminalreporter.section("not tested on this machine")
        for line in missing:
            terminalreporter.write_line(line)


def _shared_caches() -> Path:
    """Return the folder of trained tokenizers and exported graphs, which later runs reuse.

    Its name depends on the code that makes them, and on the versions of the libraries.
    """
    root = Path(__file__).parents[1]
    makers = [root / "constraints.txt", root / "cleave/training/data/tokenizer.py"]
    makers += sorted((root / "cleave/graphs").glob("*.py"))
    digest = hashlib.sha256(" ".join(map(version, ("torch", "onnxscript"))).encode())
    for path in makers:
        digest.update(path.read_bytes())
    return root / "build" / "test-caches" / digest.hexdigest()[:16]


@pytest.fixture(scope="session", autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests neither read nor fill the user's folders; all workers share tokenizers and graphs."""
    caches = _shared_caches()
    ours = {
        "CLEAVE_CACHE": str(caches / "cleave"),
        "XDG_CACHE_HOME": str(caches),  # graphs, also those of the processes that tests start
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


@pytest.fixture(scope="session", autouse=True)
def _short_measurements() -> Iterator[None]:
    """Measure speeds of this machine for a moment only: no test depends on their accuracy."""
    measured = backends._mean_s

    def shortly(run: Callable[[], object], least_s: float, clock: Callable[[], float]) -> float:
        return measured(run, 0.01 if clock is time.perf_counter else least_s, clock)

    with mock.patch.object(backends, "_mean_s", shortly):
        yield


@pytest.fixture(scope="session", autouse=True)
def _draw() -> Iterator[Callable[[RunFolder], Path | None]]:
    """Draw no loss.png after each run, and return what draws it; see `plots`."""
    draw = RunFolder.plot
    with mock.patch.object(RunFolder, "plot", return_value=None):
        yield draw


@pytest.fixture
def plots(_draw: Callable[[RunFolder], Path | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this test's runs draw loss.png, as they do for users."""
    monkeypatch.setattr(RunFolder, "plot", _draw)


@pytest.fixture(autouse=True)
def _same_priority() -> Iterator[None]:
    """Fail a test that lowers the priority of this process, as a device with a policy does.

    All tests that follow in this process, and the processes that they start, would be slow.
    """
    if sys.platform == "win32":
        yield
        return
    before = os.nice(0)
    yield
    assert os.nice(0) == before


@pytest.fixture
def notes() -> Iterator[list[str]]:
    """What Cleave has logged since the test began, as the lines that `cleave serve` prints."""
    handler = LogLines()
    with logged(handler):
        yield handler.lines


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small text to train on: enough for a few steps, read in no time."""
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    lines = [f"def step_{i}(a, b):\n    return a * {i} + b - {i % 7}\n" for i in range(500)]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="session")
def plain_losses(tmp_path_factory: pytest.TempPathFactory) -> Callable[[JobSpec], list[float]]:
    """The losses of a job in plain PyTorch, in this process."""
    from cleave.training.loop.context import TrainContext
    from cleave.training.loop.start import train

    @cache
    def plain(job: JobSpec) -> list[float]:
        seen: list[Record] = []
        train(job, RunFolder(tmp_path_factory.mktemp("plain")), TrainContext(None, seen.append))
        return [record.loss for record in seen if isinstance(record, StepRecord)]

    return plain
