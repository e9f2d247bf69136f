"""The GPU's kernel as it is shipped, on Mesa's software OpenGL ES 3.1.

`gpu/src/shim` has Android's classes for OpenGL, as far as the kernel uses them, on top of the
system's own libraries.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.android.app.conftest import (
    ANDROID,
    JNA,
    JUNIT,
    Built,
    class_path,
    compile_java,
    require,
    run_junit,
)

MESA = {"EGL_PLATFORM": "surfaceless", "LIBGL_ALWAYS_SOFTWARE": "1"}
GPU_TESTS = ("cleave.gpu.GpuKernelTest", "cleave.gpu.GpuChoiceTest")
LIBS = Path("/usr/lib/x86_64-linux-gnu")


@pytest.fixture(scope="module")
def test_classes(built: Built, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tests and the shim, for a class path after the kernel's."""
    require(*JUNIT, JNA, LIBS / "libEGL.so.1", LIBS / "libGLESv2.so.2", LIBS / "libEGL_mesa.so.0")
    folder = tmp_path_factory.mktemp("gpu")
    shim = compile_java(folder / "shim", str(JNA), ANDROID / "gpu/src/shim/java")
    classes = built.folder / "classes"
    tests = compile_java(
        folder / "tests", class_path(classes, *JUNIT), ANDROID / "gpu/src/test/java"
    )
    return class_path(shim, tests, JNA)


@pytest.mark.nightly
def test_numbers_are_right(built: Built, test_classes: str) -> None:
    path = f"{built.folder / 'classes'}:{test_classes}"
    said = run_junit(path, *GPU_TESTS, env=MESA)
    assert "OK (" in said


@pytest.mark.nightly
def test_numbers_are_right_from_the_apk(from_dex: Path, test_classes: str) -> None:
    said = run_junit(f"{from_dex}:{test_classes}", *GPU_TESTS, env=MESA)
    assert "OK (" in said
