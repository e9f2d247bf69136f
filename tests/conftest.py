"""What all tests share: a cache of their own, and small fixtures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Machines that run tests are shared and slow: a deadline would test them, not the code.
settings.register_profile("cleave", deadline=None)
settings.load_profile("cleave")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests neither read nor fill the user's cache; the tokenizer is trained once per worker."""
    folder = tmp_path_factory.getbasetemp().parent / "cleave-cache"
    before = os.environ.get("CLEAVE_CACHE")
    os.environ["CLEAVE_CACHE"] = str(folder)
    yield
    if before is None:
        del os.environ["CLEAVE_CACHE"]
    else:
        os.environ["CLEAVE_CACHE"] = before


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small text to train on: enough for a few steps, read in no time."""
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    lines = [f"def step_{i}(a, b):\n    return a * {i} + b - {i % 7}\n" for i in range(3000)]
    path.write_text("\n".join(lines))
    return path
