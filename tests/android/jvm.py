"""The Android client's core on a JVM: compiled, its unit tests run, started as a device."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
CORE: Final = ROOT / "android_client" / "core" / "src"
_APP: Final = ROOT / "android_client" / "app" / "src"
_JARS: Final = Path("/usr/share/java")  # where Debian's packages put them
_USED: Final = ("okhttp.jar", "okio.jar", "msgpack-core.jar")
_TESTED_WITH: Final = ("junit4.jar", "hamcrest-core.jar", "gson.jar")
_JNA: Final = "jna.jar"
_JUNIT: Final = "org.junit.runner.JUnitCore"
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


def missing_for_graphs() -> str:
    """The same of what runs graphs."""
    if not (_JARS / _JNA).exists():
        return f"{_JNA} not here; apt-get install libjna-java"
    return "" if _onnx_runtime() else "ONNX Runtime is not here; pip install onnxruntime"


def _onnx_runtime() -> Path | None:
    """ONNX Runtime's library in the package for Python."""
    package = importlib.util.find_spec("onnxruntime")
    folders = (package and package.submodule_search_locations) or []
    found = [path for folder in folders for path in Path(folder).glob("capi/libonnxruntime.so.*")]
    return found[0] if found else None


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

    def unit_tests(self, *, without: Sequence[str] = ()) -> list[str]:
        """Return the command that runs all unit tests but those of some classes."""
        sources = CORE / "test" / "java"
        names = sorted(
            ".".join(path.relative_to(sources).with_suffix("").parts)
            for path in sources.rglob("*Test.java")
            if path.stem not in without
        )
        return self.run(_JUNIT, *names)

    def run(self, program: str, *arguments: str) -> list[str]:
        """The command of a program among the tests."""
        path = _path(self.core, self.tests)
        return ["java", *QUICK, *_vectors(), "-cp", path, program, *arguments]


@dataclass(frozen=True, slots=True)
class GraphClasses:
    """Compiled classes of the app that run graphs, on ONNX Runtime's library for this machine.

    Attributes:
        core: the core's.
        app: those of the app, and their tests.
        shim: what these use of ONNX Runtime, over JNA.
    """

    core: Classes
    app: Path
    shim: Path

    def device(self, *arguments: str, options: Sequence[str] = ()) -> list[str]:
        """The command line of a device that runs graphs, with options of java's own."""
        return self._run("cleave.app.GraphDevice", "-Xmx512m", *options, arguments=arguments)

    def unit_tests(self, *tested: Path) -> list[str]:
        """The command that runs them; for other classes of core and app than these if need be."""
        tests = ["cleave.app.OrtGraphsTest"]
        return self._run(_JUNIT, *_vectors(), tested=tested, arguments=tests)

    def unit_tests_without(self, *tested: Path) -> list[str]:
        """The same of those that are for apps without ONNX Runtime."""
        path = _path(*tested, self.app, self.core.core)
        return ["java", *QUICK, "-cp", path, _JUNIT, "cleave.app.OnnxRuntimeTest"]

    def _run(
        self, program: str, *options: str, arguments: Sequence[str], tested: Sequence[Path] = ()
    ) -> list[str]:
        library = f"-Donnxruntime={_onnx_runtime()}"
        own = (self.app, self.shim, self.core.core, self.core.tests, _JARS / _JNA)
        path = _path(*tested, *own)
        return ["java", *QUICK, library, *options, "-cp", path, program, *arguments]


def compile_graphs(folder: Path, core: Classes) -> GraphClasses:
    """Compile what runs graphs in the app, its tests, and ONNX Runtime's classes over JNA."""
    found = GraphClasses(core, folder / "app", folder / "shim")
    _compile(_APP / "shim" / "java", found.shim, _path(_JARS / _JNA))
    app = _APP / "main" / "java" / "cleave" / "app"
    files = [app / "OnnxRuntime.java", app / "OrtGraphs.java", *(_APP / "test").rglob("*.java")]
    _javac(files, found.app, _path(found.shim, core.core, core.tests))
    return found


def compile_core(folder: Path) -> Classes:
    """Compile core and tests as for Android, at Java 8's level; a warning is an error."""
    classes = Classes(folder / "core", folder / "tests")
    _compile(CORE / "main" / "java", classes.core, _path())
    _compile(CORE / "test" / "java", classes.tests, _path(classes.core))
    return classes


def _vectors() -> list[str]:
    return [f"-Dcleave.vectors={ROOT / 'tests' / 'vectors'}"]


def _compile(sources: Path, target: Path, classpath: str) -> None:
    _javac(sources.rglob("*.java"), target, classpath)


def _javac(sources: Iterable[Path], target: Path, classpath: str) -> None:
    target.mkdir(parents=True)
    files = [str(path) for path in sorted(sources)]
    options = ["--release", "8", "-Xlint:all", "-Werror", "-encoding", "UTF-8"]
    quick = [f"-J{option}" for option in QUICK]
    command = ["javac", *quick, *options, "-cp", classpath, "-d", str(target), *files]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _path(*folders: Path) -> str:
    return ":".join(str(path) for path in [*folders, *(_JARS / j for j in (*_USED, *_TESTED_WITH))])
