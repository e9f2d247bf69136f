"""Trains with the lowest or the newest versions of the libraries that pyproject.toml allows.

    python -m tools.try_versions lowest
    python -m tools.try_versions newest
    python -m tools.try_versions newest torch==2.11.0 transformers==5.17.0

uv makes a fresh environment with the project, adapters, and these versions; further words are
requirements of their own. In it the tests of graphs run, and `cleave train` trains by stages, by
tiles, and adapters. Losses are compared with those of plain PyTorch. Exit code 1 at the first thing
that is not so.

Where an index has builds of torch for CPUs alone, `UV_TORCH_BACKEND=cpu` takes those and saves
gigabytes.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Final

from tools.try_package import ROOT, run, steps_of

PRINTED: Final = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime", "peft", "numpy")
TESTS: Final = (
    "tests/graphs/test_loss_slices.py",
    "tests/graphs/test_graph_cache.py",
)
METHODS: Final = ("stages", "tiles")
TRAININGS: Final = (
    ("--model", "opt-nano"),
    ("--model", "llama-nano"),
    ("--model", "llama-nano", "--lora", "r=4"),
)
MOST_OFF: Final = 1e-4
"""A loss may be off by this much, relative to plain PyTorch's."""


class Versions(Enum):
    """Which of the versions that pyproject.toml allows, by uv's name of the choice."""

    LOWEST = "lowest-direct"
    NEWEST = "highest"


def main() -> None:
    """Install and try."""
    names = [kind.name.lower() for kind in Versions]
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        raise SystemExit(f"say which versions: {' or '.join(names)}")
    versions = Versions[sys.argv[1].upper()]
    # Bytecode is kept, or each of the many processes would compile torch again.
    os.environ["PYTHONDONTWRITEBYTECODE"] = ""
    with tempfile.TemporaryDirectory(prefix="cleave-versions-") as name:
        environment = Path(name) / "venv"
        install(environment, versions, sys.argv[2:])
        test(environment)
        train(environment / "bin" / "cleave", Path(name) / "runs")


def install(environment: Path, versions: Versions, more: Sequence[str]) -> None:
    """Make an environment with the project, its libraries in these versions, and pytest.

    Args:
        environment: its folder.
        versions: which versions of what the project names itself.
        more: further requirements.
    """
    run("uv", "venv", "--quiet", "--python", sys.executable, str(environment))
    python = str(environment / "bin" / "python")
    pip = ("uv", "pip", "install", "--quiet", "--compile-bytecode", "--python", python)
    run(*pip, "--resolution", versions.value, f"{ROOT}[train,lora]", *more)
    run(*pip, "pytest", "pytest-timeout", "hypothesis", "msgpack")
    listed = run("uv", "pip", "freeze", "--python", python).splitlines()
    print(*(line for line in listed if line.partition("==")[0] in PRINTED), flush=True)


def test(environment: Path) -> None:
    """Run the tests of what depends most on versions."""
    run(str(environment / "bin" / "python"), "-m", "pytest", "-q", *(str(ROOT / t) for t in TESTS))
    print("the tests of graphs pass", flush=True)


def train(cleave: Path, runs: Path) -> None:
    """Train by each method, and compare losses with those of plain PyTorch."""
    for training in TRAININGS:
        how = (*training, "--runs", str(runs))
        expected = [step["loss"] for step in steps_of(cleave, *how, "--devices", "0")]
        for method in METHODS:
            found = steps_of(cleave, *how, "--devices", "4", "--method", method)
            losses = [step["loss"] for step in found]
            off = max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))
            what = f"{' '.join(training)} by {method}: losses {losses}, off by {off:.1e}"
            if not off <= MOST_OFF:
                raise SystemExit(f"{what}, which is more than {MOST_OFF}")
            print(what, flush=True)


if __name__ == "__main__":
    main()
