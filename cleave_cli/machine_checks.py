"""Checks whether this machine meets Cleave's requirements, with advice for missing ones."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Final

from cleave.errors import to_install
from cleave.files import cache_folder
from cleave.machine.graph_choice import installed
from cleave.machine.graph_session import GraphError, setups_of
from cleave.machine.sensors import this_machine
from cleave_cli.options import human_bytes

LEAST_DISK_BYTES: Final = 10**9
"""Minimum free disk space. With less, the first checkpoint of a small model may fail."""


class Verdict(Enum):
    """The result of a check: whether the machine meets a requirement."""

    OK = "ok"
    WITHOUT = "without"
    """The requirement is missing, but Cleave works without it."""

    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Check:
    """One checked requirement.

    Attributes:
        verdict: whether the machine meets the requirement.
        what: readable description of the requirement and its purpose.
        advice: how to meet the requirement; empty if it is met.
    """

    verdict: Verdict
    what: str
    advice: str = ""


# Python modules, their purpose, and the extra of the package that installs them.
_MODULES: Final = (
    (("torch", "transformers", "tokenizers", "safetensors"), "trains, as a server", "train"),
    (("onnx", "onnxscript"), "makes graphs of layers, for stages", "train"),
    (("peft",), "trains adapters (--lora)", "lora"),
    (("numba",), "checks results in half of the time", "fast"),
    (("scipy", "psutil"), "measures this machine (cleave profile)", "profile"),
    (("cryptography",), "makes a certificate (cleave serve --tls)", "tls"),
)


def machine_checks(
    runs: Path, has: Callable[[str], bool] = lambda name: importlib.util.find_spec(name) is not None
) -> Iterator[Check]:
    """Check this machine, and yield the result of each check.

    Args:
        runs: parent folder of run folders.
        has: returns True if a Python module is installed.
    """
    machine = this_machine()
    memory = human_bytes(machine.memory_bytes) if machine.memory_bytes else "unknown size"
    yield Check(
        Verdict.OK,
        f"Python {platform.python_version()}, {machine.system}; {machine.cores} cores, memory of "
        f"{memory}",
    )
    for modules, use, extra in _MODULES:
        missing = [name for name in modules if not has(name)]
        if missing:
            what = f"no {', '.join(missing)}: {use}"
            yield Check(Verdict.WITHOUT, what, to_install(extra))
        else:
            names = ", ".join(f"{name} {version(name)}" for name in modules)
            yield Check(Verdict.OK, f"{names}: {use}")
    yield _graphs()
    yield _pages()
    for name, folder in (("runs", runs), ("cache", cache_folder())):
        yield _disk(name, folder)


def _graphs() -> Check:
    try:
        providers = installed()
    except GraphError as error:
        return Check(
            Verdict.FAILED,
            f"stages cannot be computed: {error}",
            "pip install --force-reinstall onnxruntime",
        )
    # The names of the execution providers that Cleave may use, as in --provider.
    names = ", ".join(dict.fromkeys(s.provider.value for s in setups_of(None, providers)))
    # All packages of ONNX Runtime (for CPUs, GPUs, ...) install the module `onnxruntime`.
    number = importlib.import_module("onnxruntime").__version__
    return Check(Verdict.OK, f"ONNX Runtime {number} on {names}: computes stages")


def _pages() -> Check:
    if (files("cleave.server") / "web" / "index.html").is_file():
        return Check(Verdict.OK, "web pages: the dashboard, and joining by a browser")
    return Check(
        Verdict.WITHOUT,
        "no web pages: the dashboard, and joining by a browser",
        "install Node.js with npm, then run: make web",
    )


def free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk of a folder, which need not exist yet."""
    there = folder.expanduser().absolute()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free


def _disk(name: str, folder: Path) -> Check:
    free = free_bytes(folder)
    what = f"{human_bytes(free)} free for {name}, in {str(folder)!r}"
    if free < LEAST_DISK_BYTES:
        return Check(Verdict.FAILED, what, "free some space there, or choose another folder")
    return Check(Verdict.OK, what)
