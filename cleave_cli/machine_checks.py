"""Which requirements of Cleave a machine meets, and how to install the rest."""

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
from cleave.machine.cache_folder import cache_folder
from cleave.machine.graph_choice import installed
from cleave.machine.graph_provider import setups_of
from cleave.machine.graph_session import GraphError
from cleave.machine.sensors import this_machine
from cleave_cli.options import human_bytes

LEAST_DISK_BYTES: Final = 10**9
"""With less, the first checkpoint of a small model may not fit."""


class Verdict(Enum):
    """Whether a machine meets a requirement."""

    OK = "ok"
    WITHOUT = "without"
    """Missing, but Cleave works without it."""

    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check.

    Attributes:
        verdict: the result.
        what: what was checked, and what it is for.
        advice: what to do where something is missing or wrong.
    """

    verdict: Verdict
    what: str
    advice: str = ""


# Modules, their use, and the extra that installs them.
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
    """Yield the results of the checks of this machine.

    Args:
        runs: where runs would be written.
        has: returns whether a module is installed.
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
    # The providers that Cleave may use, by the names that --provider takes.
    names = ", ".join(dict.fromkeys(s.provider.value for s in setups_of(None, providers)))
    number = importlib.import_module("onnxruntime").__version__  # every package has this module
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
    """Return the free bytes on the disk that holds a folder, or would hold it."""
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
