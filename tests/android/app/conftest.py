"""The app, built once as `build_apk.sh` builds it, and what its tests compile besides."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from filelock import FileLock

from tests.android.jvm import QUICK

ANDROID: Final = Path(__file__).parents[3] / "android_client"
JARS: Final = Path("/usr/share/java")
LIBRARIES: Final = tuple(JARS / f"{name}.jar" for name in ("okhttp", "okio", "msgpack-core"))
JUNIT: Final = (JARS / "junit4.jar", JARS / "hamcrest-core.jar")
JNA: Final = JARS / "jna.jar"
_TOOLS_FOLDER: Final = "tools-1"


@dataclass(frozen=True)
class Built:
    """What a build left.

    Attributes:
        apk: signed.
        folder: what was made on the way: `classes`, `stubs`, `dex`.
        tools: the fetched build tools.
    """

    apk: Path
    folder: Path
    tools: Path


def require(*paths: Path) -> None:
    """Skip where a file of a Debian package is not there."""
    for path in paths:
        if not path.exists():
            pytest.skip(f"{path} is not here; .ci/run names the Debian package that has it")


def run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Run a program; what it printed, or a failure that shows it."""
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=300,
        env={**os.environ, **(env or {})},
    )  # fmt: skip
    assert done.returncode == 0, f"{command[0]}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def class_path(*parts: Path) -> str:
    """As java wants it."""
    return ":".join(map(str, parts))


def compile_java(target: Path, path: str, *folders: Path) -> Path:
    """Compile all Java files in some folders, every warning being an error."""
    target.mkdir(parents=True)
    files = sorted(file for folder in folders for file in folder.rglob("*.java"))
    quick = [f"-J{option}" for option in QUICK]
    strict = ["--release", "8", "-Xlint:all,-options", "-Werror"]
    run("javac", *quick, *strict, "-cp", path, "-d", target, *files)
    return target


def run_junit(
    path: str,
    *classes: str,
    options: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
) -> str:
    """Run JUnit tests with this class path."""
    junit = class_path(*JUNIT)
    main = "org.junit.runner.JUnitCore"
    return run("java", "-ea", *QUICK, *options, "-cp", f"{path}:{junit}", main, *classes, env=env)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this test run share."""
    name = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    folder = tmp_path_factory.getbasetemp().parent / f"android-{name}"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def built(shared: Path) -> Built:
    """The APK, from `build_apk.sh`; its tools are fetched once per checkout."""
    for program in ("javac", "apksigner", "zipalign"):
        if not shutil.which(program):
            pytest.skip(f"{program} is not installed")
    require(*LIBRARIES)
    found = Built(
        shared / "cleave.apk",
        shared / "build/apk",
        ANDROID / "build/android" / _TOOLS_FOLDER,
    )
    with FileLock(shared / "lock"):
        if not found.apk.exists():
            build_apk(shared)
    return found


def build_apk(folder: Path, *arguments: str | Path, env: dict[str, str] | None = None) -> Path:
    """Run the script, with its tools in the checkout's ignored build folder."""
    apk = folder / "cleave.apk"
    where = {
        "CLEAVE_CACHE": str(ANDROID / "build"),
        "BUILD_FOLDER": str(folder / "build"),
        "PYTHON": sys.executable,
    }
    run(ANDROID / "build_apk.sh", "--output", apk, *arguments, env={**where, **(env or {})})
    return apk


@pytest.fixture(scope="session")
def from_dex(shared: Path, built: Built) -> Path:
    """The APK's DEX turned back into class files: a jar."""
    jar = shared / "from-dex.jar"
    enjarify = Path("/usr/lib/python3/dist-packages/enjarify")
    require(enjarify)
    with FileLock(shared / "lock-dex"):
        if not jar.exists():
            # It reads the APK itself, which is a zip archive with classes.dex in it.
            run("/usr/bin/python3", "-O", "-m", "enjarify.main", "-o", jar, built.apk,
                env={"PYTHONPATH": str(enjarify.parent)})  # fmt: skip
    return jar
