"""Graphs as the APK's own code runs them, and the stubs that it was compiled against."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.android.app.class_files import ClassFile, Member, read_class
from tests.android.app.conftest import Built, run
from tests.android.jvm import GraphClasses


@pytest.mark.nightly
def test_the_apk_runs_graphs_where_onnx_runtime_is(
    from_dex: Path, graph_classes: GraphClasses
) -> None:
    assert "OK (" in run(*graph_classes.unit_tests(from_dex))


@pytest.mark.nightly
def test_the_apk_offers_none_where_it_is_not(from_dex: Path, graph_classes: GraphClasses) -> None:
    assert "OK (" in run(*graph_classes.unit_tests_without(from_dex))


@pytest.mark.nightly
def test_stubs_of_onnx_runtime_say_what_its_tests_have(
    built: Built, graph_classes: GraphClasses
) -> None:
    """No more than what tests run: nothing is compiled against that nobody tried."""
    stubs = classes(built.folder / "onnxruntime")
    tried = classes(graph_classes.shim)
    assert len(stubs) > 10
    for name, stub in stubs.items():
        assert visible(stub) <= visible(tried[name]), name


def classes(folder: Path) -> dict[str, ClassFile]:
    """By name."""
    read = [read_class(file.read_bytes()) for file in folder.rglob("*.class")]
    return {found.name: found for found in read}


def visible(found: ClassFile) -> set[tuple[str, str, bool]]:
    """Members that others see: name, types, and whether it is static."""
    members: list[Member] = [*found.fields, *found.methods]
    return {(each.name, each.descriptor, each.static) for each in members if each.visible}
