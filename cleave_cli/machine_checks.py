"""Check requirements for `cleave doctor`: modules, disk space, and memory to train a model."""

from __future__ import annotations

import importlib
import importlib.util
import math
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Final

from cleave.errors import CleaveError, UsageError, to_install
from cleave.files import cache_folder
from cleave.machine.graph_choice import examined, runners
from cleave.machine.sensors import this_machine, total_memory_bytes
from cleave.planner.coding import CodingPolicy, payload_rates
from cleave.planner.forecast import Forecast
from cleave.planner.plan import ElementBytes, Method, PsRates
from cleave.planner.stages.model import PsCompute
from cleave.planner.tiles.planner import TilePlanner
from cleave.workload.build import resolve_model
from cleave.workload.stages import StageSizes, recomputed_elements
from cleave.workload.step import step_gemms
from cleave_cli.options import human_bytes
from cleave_cli.plan_question import PlanQuestion, adapters_of, fleet_devices, rates_of

LEAST_DISK_BYTES: Final = 10**9  # minimum free space for a small model's first checkpoint

_ELEMENT_BYTES = {"bf16": 2, "fp32": 4}
_ANY_FLOPS_PER_S = 1e12  # placeholder for the server's throughput, which does not affect memory
_CHECKPOINTS = 3  # maximum number on disk at once: two retained, and one being written
_FP32_BYTES = 4
_STATE_BYTES = 8  # size of AdamW's two fp32 moments, per parameter

# Python modules, their purpose, and the extra of the package that installs them.
_MODULES: Final = (
    (("torch", "transformers", "tokenizers", "safetensors"), "for training, as a server", "train"),
    (("onnx", "onnxscript"), "for exporting layers as graphs (stages)", "train"),
    (("peft",), "for training adapters (--lora)", "lora"),
    (("numba",), "for checking results in half the time", "fast"),
    (("scipy", "psutil"), "for measuring this machine (cleave profile)", "profile"),
    (("cryptography",), "for making certificates (cleave serve --tls)", "tls"),
)


class Verdict(Enum):
    """The result of a check. `WITHOUT` means that an optional requirement is not met."""

    OK = "ok"
    WITHOUT = "without"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Check:
    """The result of checking a requirement. `advice` explains how to meet an unmet requirement."""

    verdict: Verdict
    what: str
    advice: str = ""


def machine_checks(
    runs: Path, has: Callable[[str], bool] = lambda name: importlib.util.find_spec(name) is not None
) -> Iterator[Check]:
    """Yield checks of the installed software, and of the disk space for `runs` and the cache."""
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
    yield from _graphs()
    pages = "web pages: for the dashboard, and for joining in a browser"
    if (files("cleave.server") / "web" / "index.html").is_file():
        yield Check(Verdict.OK, pages)
    else:
        advice = "install Node.js with npm, then run: make web"
        yield Check(Verdict.WITHOUT, f"no {pages}", advice)
    for name, folder in (("runs", runs), ("cache", cache_folder())):
        free = free_bytes(folder)
        what = f"{human_bytes(free)} free for {name}, in {str(folder)!r}"
        if free < LEAST_DISK_BYTES:
            yield Check(Verdict.FAILED, what, "free some space there, or choose another folder")
        else:
            yield Check(Verdict.OK, what)


def _graphs() -> Iterator[Check]:
    """Yield a check of each runner (`--runner`) that can run graphs of layers on this machine."""
    try:
        # Ask the module for its version: one of several packages (CPU, GPU, ...) provides it.
        number = importlib.import_module("onnxruntime").__version__
    except ImportError as error:
        yield Check(
            Verdict.FAILED,
            f"stages cannot be computed: {error}",
            "pip install --force-reinstall onnxruntime",
        )
        return
    yield Check(Verdict.OK, f"ONNX Runtime {number}: for computing stages")
    for runner in runners():
        for products in (None, *runner.multiplies_in):
            found = examined(runner, products=products)
            memory_bytes = math.inf if found.fault else runner.memory_bytes()
            free = "" if math.isinf(memory_bytes) else f"; {human_bytes(memory_bytes)} free"
            yield Check(Verdict.WITHOUT if found.fault else Verdict.OK, f"{found.text}{free}")


def free_bytes(folder: Path) -> int:
    """Return the free space on a folder's disk in bytes. The folder need not exist yet."""
    there = folder.expanduser().absolute()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free


# --- memory of a training step ---


@dataclass(frozen=True, slots=True)
class Fit:
    """The memory that a training method requires, and whether the machines have enough memory.

    Attributes:
        device_bytes: memory requirement of the device that needs the most; 0 if no device is used.
        server_bytes: memory requirement of the server, if `cleave train` runs with `options`.
        options: options of `cleave train` that reduce the server's memory requirement.
        reason: why the step does not fit in memory; empty if it fits.
    """

    method: Method
    device_bytes: int
    server_bytes: int
    fits: bool
    options: tuple[str, ...] = ()
    reason: str = ""


def fit(each: Forecast, sizes: StageSizes, rows: int, sent: int, memory_bytes: int) -> Fit:
    """Return the memory that one method requires for a step, and whether the step fits in memory.

    Args:
        each: forecast of the step; `refused` if, for example, the devices have too little memory.
        sizes: sizes of the model's layers.
        sent: bytes per activation element.
    """
    if each.refused:
        return Fit(each.method, 0, 0, fits=False, reason=each.refused)
    least, options = 0, tuple[str, ...]()
    for saved, options in _savings(each, sizes, rows, sent):
        least = max(0, each.server_bytes - saved)
        if least <= memory_bytes:
            return Fit(each.method, each.device_bytes, least, fits=True, options=options)
    reason = (
        f"the server needs {human_bytes(least)}, even with {' and '.join(options)}, but has only "
        f"{human_bytes(memory_bytes)}"
    )
    return Fit(each.method, each.device_bytes, least, fits=False, options=options, reason=reason)


def _savings(
    each: Forecast, sizes: StageSizes, rows: int, sent: int
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield pairs (saved server memory in bytes, `cleave train` options), smallest saving first."""
    trained = sizes.trained_parameters
    state = _STATE_BYTES * trained
    yield 0, ()
    if each.method is Method.STAGES:  # the PS holds no activations or extra gradients
        yield state, ("--state-dir",)
        return
    recomputed = recomputed_elements(sizes.spec) * sent * rows * sizes.sequence
    lean = _FP32_BYTES * trained + recomputed  # frees each gradient after its use
    yield lean, ("--memory lean",)
    yield lean + state, ("--memory lean", "--state-dir")


def model_fits(
    model: str,
    fleet: str,
    batch: int,
    seq: int,
    dtype: str,
    lora: int,
    lora_bits: int,
    server_memory: float,
    runs: Path,
) -> tuple[list[Fit], Check]:
    """Check whether a step fits in memory, by method, and whether checkpoints fit on disk."""
    if dtype not in _ELEMENT_BYTES:
        raise UsageError(f"--dtype is {dtype!r}; use one of {', '.join(_ELEMENT_BYTES)}")
    if not 0 <= server_memory < float("inf"):
        raise UsageError(f"--server-memory must be 0 or more GB, not {server_memory}")
    memory_bytes = round(server_memory * 1e9) or total_memory_bytes()
    if memory_bytes is None:
        raise CleaveError("this system does not report its memory size; pass --server-memory GB")
    spec, sent, card = resolve_model(model).spec, _ELEMENT_BYTES[dtype], PsRates()
    sizes = StageSizes(spec, seq, sent, sent, adapters_of(lora, lora_bits, spec))
    devices, in_fp32 = (
        rates_of(fleet_devices(fleet, 0.0, each), CodingPolicy.OFF, card)
        for each in (dtype, "fp32")
    )
    question = PlanQuestion(
        sizes,
        batch,
        dtype,
        step_gemms(spec, batch, seq, fused_siblings=True),
        TilePlanner(card),
        ElementBytes(sent, sent),
        payload_rates(devices, dtype),
        in_fp32,
        PsCompute(_ANY_FLOPS_PER_S, 0.0, card),
    )
    forecasts = question.choose(Method.AUTO).exact
    fits = [fit(each, sizes, batch, sent, memory_bytes) for each in forecasts]
    # A checkpoint contains the trained fp32 weights and AdamW's moments.
    one_bytes = (_FP32_BYTES + _STATE_BYTES) * sizes.trained_parameters
    free, needed = free_bytes(runs), _CHECKPOINTS * one_bytes
    what = (
        f"{_CHECKPOINTS} checkpoints of {human_bytes(one_bytes)} need {human_bytes(needed)} in "
        f"{str(runs)!r}; {human_bytes(free)} are free"
    )
    if free >= needed:
        return fits, Check(Verdict.OK, what)
    advice = "free some space, choose another --runs, or use --save-total-limit 1"
    return fits, Check(Verdict.FAILED, what, advice)
