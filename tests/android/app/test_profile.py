"""The profile that "Measure this phone" writes is one that Cleave reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiles.library import read_profile
from profiles.performance import Layout
from tests.android.app.conftest import (
    ANDROID,
    JUNIT,
    LIBRARIES,
    Built,
    class_path,
    compile_java,
    require,
    run_junit,
)
from tests.integration.processes import run


@pytest.mark.nightly
def test_cleave_reads_and_fits_it(built: Built, tmp_path: Path) -> None:
    require(*JUNIT, *LIBRARIES)
    classes = class_path(built.folder / "classes", *LIBRARIES)
    tests = compile_java(
        tmp_path / "tests",
        f"{classes}:{class_path(*JUNIT)}",
        ANDROID / "core/src/test/java/cleave/core/profile",
    )
    file = tmp_path / "phone.toml"
    said = run_junit(
        f"{classes}:{tests}",
        "cleave.core.profile.ProfileRunTest",
        options=(f"-Dcleave.profile={file}",),
    )
    assert "OK (" in said
    profile = read_profile(file)
    assert profile.title == 'ACME "Eins" Ultra+ 5G'
    assert set(profile.compute) == {"fp32", "bf16", "bf16>fp32"}
    assert {sample[3] for sample in profile.compute["fp32"].samples} == {
        Layout.NN,
        Layout.NT,
        Layout.TN,
    }
    shown = run("profile", "show", str(file))
    assert shown.returncode == 0, shown.stderr
    assert "ACME" in shown.stdout
    fitted = run("profile", "fit", str(file))
    assert fitted.returncode == 0, fitted.stderr
    assert read_profile(file).compute["fp32"].models
