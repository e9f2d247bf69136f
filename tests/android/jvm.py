"""The Android client's core on a JVM: compiled, its unit tests run, started as a device."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
CORE: Final = ROOT / "android_client" / "core" / "src"
_JARS: Final = Path("/usr/share/java")  # where Debian's packages put them
_USED: Final = ("okhttp.jar", "okio.jar", "msgpack-core.jar")
_TESTED_WITH: Final = ("junit4.jar", "hamcrest-core.jar", "gson.jar")
QUICK: Final = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
"""Of java, for runs of seconds: less compiling takes half the processor time."""
_PACKAGES: Final = (
    "openjdk-17-jdk-headless libokhttp-java libokio-java libmsgpack-java junit4 libhamcrest-java "
    "libgoogle-gson-java"
)


def missing() -> str:
    """What is not installed here and how to get it; empty where all is there."""
    absent = [tool for tool in ("javac", "java") if not shutil.which(tool)]
    absent += [jar for jar in (*_USED, *_TESTED_WITH) if not (_JARS / jar).exists()]
    return f"{', '.join(absent)} not here; apt-get install {_PACKAGES}" if absent else ""


@dataclass(frozen=True, slots=True)
class Classes:
    """Compiled classes.

    Attributes:
        core: of the core itself.
        tests: of its unit tests.
    """

    core: Path
    tests: Path

    def command(self, *arguments: str) -> list[str]:
        """The core's command line for a device."""
        # A small heap: several processes share the machine.
        return ["java", "-Xmx512m", *QUICK, "-cp", _path(self.core), "cleave.core.Main", *arguments]

    def unit_tests(self) -> list[str]:
        """The command that runs all of them."""
        sources = CORE / "test" / "java"
        names = sorted(
            ".".join(path.relative_to(sources).with_suffix("").parts)
            for path in sources.rglob("*Test.java")
        )
        return self.run("org.junit.runner.JUnitCore", *names)

    def run(self, program: str, *arguments: str) -> list[str]:
        """The command of a program among the tests."""
        vectors = f"-Dcleave.vectors={ROOT / 'tests' / 'vectors'}"
        return ["java", *QUICK, vectors, "-cp", _path(self.core, self.tests), program, *arguments]


def compile_core(folder: Path) -> Classes:
    """Compile core and tests as for Android, at Java 8's level; a warning is an error."""
    classes = Classes(folder / "core", folder / "tests")
    _compile(CORE / "main" / "java", classes.core, _path())
    _compile(CORE / "test" / "java", classes.tests, _path(classes.core))
    return classes


def _compile(sources: Path, target: Path, classpath: str) -> None:
    target.mkdir(parents=True)
    files = [str(path) for path in sorted(sources.rglob("*.java"))]
    options = ["--release", "8", "-Xlint:all", "-Werror", "-encoding", "UTF-8"]
    quick = [f"-J{option}" for option in QUICK]
    command = ["javac", *quick, *options, "-cp", classpath, "-d", str(target), *files]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _path(*folders: Path) -> str:
    return ":".join(str(path) for path in [*folders, *(_JARS / j for j in (*_USED, *_TESTED_WITH))])
