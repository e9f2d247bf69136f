"""The Android client's classes, compiled once for all."""

from __future__ import annotations

import os

import pytest
from filelock import FileLock

from tests.android.jvm import Classes, compile_core, missing


@pytest.fixture(scope="session")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Classes:
    """The core's classes; the first worker compiles them."""
    if reason := missing():
        pytest.skip(reason)
    own = tmp_path_factory.getbasetemp()
    # Several workers have folders in one of the run's; a single one's lies beside other runs'.
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    folder = shared / "java"
    with FileLock(shared / "java.lock"):
        if not folder.is_dir():
            compile_core(folder)
    return Classes(folder / "core", folder / "tests")
