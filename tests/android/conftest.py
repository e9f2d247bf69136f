"""The Android client's classes, compiled once for all."""

from __future__ import annotations

import os

import pytest
from filelock import FileLock

from tests.android.jvm import (
    Classes,
    GraphClasses,
    compile_core,
    compile_graphs,
    missing,
    missing_for_graphs,
)


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


@pytest.fixture(scope="module")
def graph_classes(classes: Classes, tmp_path_factory: pytest.TempPathFactory) -> GraphClasses:
    """What runs graphs in the app, over this machine's ONNX Runtime."""
    if reason := missing_for_graphs():
        pytest.skip(reason)
    return compile_graphs(tmp_path_factory.mktemp("graphs"), classes)
