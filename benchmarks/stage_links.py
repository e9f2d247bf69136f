"""A training step by stages, by tiles, on one machine and by DDP, behind home-like links.

    python -m benchmarks.stage_links [--model opt-125m] [--tokens 1024] [--steps 2] [--seq 256]
                                     [--methods stages:fp32,tiles:fp32,local:fp32,ddp:fp32,...]
                                     [--down 100] [--up 20] [--devices 4] [--lora RANK] [--json]

Four processes, each with one thread in a network namespace of its own behind tbf (root, Linux). One
after another, the methods train the same model on the same batches:

- `stages`, `tiles` and `auto`: `cleave train --server` on a `cleave serve --stages-on any` of this
  machine, with `cleave join` in the namespaces (`stages:bf16:off`: with `--coding off`);
- `virtual`: stages on emulated devices with such links, in virtual time: what its devices take and
  what this machine takes for the server's part. A device computes at the speed that `cleave profile
  device` finds for a layer's graph with one thread. `stages` of the same dtype may take 15 % more
  or less;
- `local`: `cleave train --devices 0` here alone;
- `ddp`: `torch.distributed` DDP over gloo, a quarter of the batch in each namespace. The way from
  one to another leads through this machine: up the one's link, down the other's.

The first step is not counted: it plans, makes graphs and threads, and sends what then stays. Bytes
are counted by the interfaces, in all namespaces together. Memory is the largest that was resident
after the first step. Where a method is measured with coding and without (`stages:bf16` and
`stages:bf16:off`), the time that coding saves is compared with its limit. Losses must
be those of `local:fp32`, or of the first method that there is: within 1e-4 in fp32, 2e-2 in bf16.
With `--lora` all methods but DDP train adapters of that rank alone. Each step is also compared with
one of `local` in the same dtype.
Ends with 1 if they are not, or if a method failed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

from benchmarks.links import (
    MBIT,
    LimitedNamespace,
    let_reach_one_another,
    limited_namespace,
    namespaces_missing,
)
from cleave.device.host.policy import parse_memory
from cleave.planner.coding import LINK_BYTES_PER_S

METHODS: Final = "stages:fp32,stages:bf16,tiles:fp32,tiles:bf16,local:fp32,ddp:fp32"
WAYS: Final = ("stages", "tiles", "auto", "local", "ddp", "virtual")
REFERENCES: Final = ("local:fp32", "ddp:fp32", "tiles:fp32", "stages:fp32")
LOSS_LIMITS: Final = {"fp32": 1e-4, "bf16": 2e-2}
FLOOR_LIMIT: Final = 1.1
"""The bytes of a step over the least, as `StepWork.floor_bytes` says."""
VIRTUAL_LIMIT: Final = 0.15
"""How much longer or shorter a step may take than in virtual time."""

_SHORT_BATCH: Final = 2048  # tokens, up to which sequences are short
_LOOK_S: Final = 0.02
_START_S: Final = 180.0  # in which a server listens and devices have joined
_END_S: Final = 10.0  # in which a process ends when it is asked to
_TAIL: Final = 12  # lines of a log that are shown
_SPEED: Final = """
from profiles.measuring.graphs import measure_graphs
print(measure_graphs().flops_per_s)
"""
_PORT: Final = 29_500  # of DDP, inside a namespace
_PR_SET_PDEATHSIG: Final = 1
_WIDTH: Final = 80
_COLUMNS: Final = 4  # in 80 characters


class RunError(Exception):
    """A method could not be measured; the text says why."""


@dataclass(frozen=True)
class Method:
    """A way to train, with its dtype.

    Attributes:
        way: one of `WAYS`.
        dtype: `fp32` or `bf16`.
        coding: as `cleave serve --coding` takes it.
    """

    way: str
    dtype: str
    coding: str = "auto"

    @property
    def name(self) -> str:
        """Return it as it is given on the command line."""
        coding = "" if self.coding == "auto" else f":{self.coding}"
        return f"{self.way}:{self.dtype}{coding}"

    @classmethod
    def of(cls, text: str) -> Method:
        """Read one.

        Raises:
            ValueError: when it is none.
        """
        way, dtype, coding, *more = [*text.strip().split(":"), "", ""][:4]
        known = way in WAYS and (dtype or "fp32") in LOSS_LIMITS
        if not known or coding not in ("", "off", "on") or any(more):
            raise ValueError(
                f"{text!r} is no method; use {', '.join(WAYS)} with :fp32 or :bf16, "
                "and :off or :on for coding"
            )
        return cls(way, dtype or "fp32", coding or "auto")


@dataclass(frozen=True)
class Settings:
    """What all methods have in common.

    Attributes:
        model: its name.
        batch, seq: sequences a step, tokens of each.
        steps: that are counted.
        devices: how many.
        down_mbit, up_mbit: rates of each device's link.
        memory: what each device offers.
        rank: of the adapters that are trained alone; 0 to train the model.
        limit_s: how long a method may take.
        logs: where every process writes.
    """

    model: str
    batch: int
    seq: int
    steps: int
    devices: int
    down_mbit: float
    up_mbit: float
    memory: str
    rank: int
    limit_s: float
    logs: Path


@dataclass
class Outcome:
    """What was measured of a method.

    Attributes:
        method: its name.
        seconds: of each counted step.
        losses: of each step, the first one included.
        down_bytes, up_bytes: to and from all devices, in a step on average.
        floor_ratio: all bytes of the last step, as if nothing were coded, over the least that it
            needs; 0 where that is not known.
        links_s: how long the busiest link would take for its bytes of a step, down and then up.
        server_peak_bytes: resident memory of the server, or of the only process; 0 for none.
        device_peak_bytes: of the largest device; 0 for none.
        plan: the stages, in a sentence.
        lost: how often a device left meanwhile.
        error: why it failed; empty if it did not.
    """

    method: str
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    down_bytes: float = 0.0
    up_bytes: float = 0.0
    floor_ratio: float = 0.0
    links_s: float = 0.0
    server_peak_bytes: int = 0
    device_peak_bytes: int = 0
    plan: str = ""
    lost: int = 0
    error: str = ""

    @property
    def step_s(self) -> float:
        """Return the median seconds of a step."""
        return statistics.median(self.seconds)


# --- processes ---


@dataclass(frozen=True)
class Started:
    """A process, and the files that it writes its output to."""

    name: str
    process: subprocess.Popen[bytes]
    out: Path
    err: Path

    def tail(self) -> str:
        """Return the last lines of its output."""
        shown = []
        for path in (self.out, self.err):
            lines = path.read_text(errors="replace").splitlines()[-_TAIL:]
            if lines:
                shown += [f"--- {path.name}", *lines]
        return "\n".join(shown)


class Processes:
    """Processes that end with the block. A context manager.

    Args:
        logs: the folder for their output.
        until_s: when the time for them is over, by `time.monotonic`.
    """

    def __init__(self, logs: Path, until_s: float) -> None:
        self._logs = logs
        self._until_s = until_s
        self.started: list[Started] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        # Devices before their server, which else would say of each that it was lost.
        processes = [one.process for one in reversed(self.started)]
        for process in processes:
            process.terminate()
        until_s = time.monotonic() + _END_S
        for process in processes:
            try:
                process.wait(max(0.1, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def start(self, name: str, command: Sequence[str], **environment: str) -> Started:
        """Start a process that a Ctrl-C in the terminal does not reach."""
        out, err = self._logs / f"{name}.out", self._logs / f"{name}.err"
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        self.started.append(Started(name, process, out, err))
        return self.started[-1]

    def records(self, of: Started, until_s: float | None = None) -> Iterator[dict[str, Any]]:
        """Yield the JSON lines that a process prints, until it ends.

        Args:
            of: the process. It may end; the others may not meanwhile.
            until_s: when it is too late, by `time.monotonic`.

        Raises:
            RunError: when another process ends, this one fails, or the time is over.
        """
        until_s = min(until_s or self._until_s, self._until_s)
        rest = ""
        with of.out.open(errors="replace") as file:
            while True:
                ended = of.process.poll() is not None
                rest += file.read()
                *lines, rest = rest.split("\n")
                for line in lines:
                    if line.startswith("{"):
                        yield json.loads(line)
                if ended:
                    if of.process.returncode:
                        raise RunError(self._told(f"{of.name} ended with {of.process.returncode}"))
                    return
                for one in self.started:
                    if one is not of and one.process.poll() is not None:
                        code = one.process.returncode
                        raise RunError(self._told(f"{one.name} ended with {code}"))
                if time.monotonic() > until_s:
                    raise RunError(self._told(f"{of.name} took too long"))
                time.sleep(_LOOK_S)

    def await_record(self, of: Started, fits: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the first JSON line of a process that fits.

        Raises:
            RunError: when none comes.
        """
        for record in self.records(of, time.monotonic() + _START_S):
            if fits(record):
                return record
        raise RunError(self._told(f"{of.name} ended too soon"))

    def _told(self, what: str) -> str:
        return "\n".join([what, *(one.tail() for one in self.started)])


def _end_with_parent() -> None:
    """Have a new process end when this one is killed, where the system can (Linux)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def peak_bytes(pid: int | str) -> int:
    """Return the most memory of a process that was resident since `forget_peak`, in bytes.

    Raises:
        OSError: when the process is gone.
    """
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"process {pid} has ended")


def forget_peak(pid: int | str) -> None:
    """Let the peak of a process be what is resident now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


# --- measuring ---


@dataclass
class Meter:
    """Measures a method from the records of its steps.

    Attributes:
        outcome: what was measured.
        settings: the rates of links.
        namespaces: whose bytes are counted.
        server, devices: whose memory is measured.
    """

    outcome: Outcome
    settings: Settings
    namespaces: Sequence[LimitedNamespace] = ()
    server: Started | None = None
    devices: Sequence[Started] = ()
    _before: Sequence[tuple[int, int]] = ()

    def take(self, record: dict[str, Any]) -> None:
        """Take a step that has just ended. The first is not counted."""
        outcome = self.outcome
        outcome.losses.append(float(record["loss"]))
        now = [namespace.passed_bytes() for namespace in self.namespaces]
        measured = [one for one in (self.server, *self.devices) if one is not None]
        if len(outcome.losses) == 1:
            self._before = now
            for one in measured:
                forget_peak(one.process.pid)
            return
        virtual = record.get("clock") == "virtual"
        took = record["fleet_s"] + record["ps_s"] if virtual else record["wall_s"]
        outcome.seconds.append(float(took))
        counted = len(outcome.seconds)
        passed = [
            ((down - down_before) / counted, (up - up_before) / counted)
            for (down, up), (down_before, up_before) in zip(now, self._before, strict=True)
        ]
        outcome.down_bytes = sum(down for down, _ in passed)
        outcome.up_bytes = sum(up for _, up in passed)
        rates = self.settings.down_mbit * MBIT, self.settings.up_mbit * MBIT
        outcome.links_s = max((d / rates[0] + u / rates[1] for d, u in passed), default=0.0)
        if floor := record.get("floor_bytes"):
            saved = sum(sum(way.values()) for way in record["saved"].values())
            sent = record["downlink_bytes"] + record["uplink_bytes"]
            outcome.floor_ratio = (sent + saved) / floor
        if self.server is not None:
            outcome.server_peak_bytes = peak_bytes(self.server.process.pid)
        peaks = [peak_bytes(one.process.pid) for one in self.devices]
        outcome.device_peak_bytes = max(peaks, default=record.get("device_peak_bytes", 0))


def measure(method: Method, settings: Settings, namespaces: Sequence[LimitedNamespace]) -> Outcome:
    """Measure a method; an outcome with an error says why it failed."""
    outcome = Outcome(method.name)
    logs = settings.logs / method.name.replace(":", "-")
    logs.mkdir(parents=True)
    ways = {"local": _local, "ddp": _ddp, "virtual": _virtual}
    with Processes(logs, time.monotonic() + settings.limit_s) as processes:
        try:
            ways.get(method.way, _served)(method, settings, namespaces, processes, outcome)
            if len(outcome.seconds) != settings.steps:
                raise RunError(f"it did {len(outcome.losses)} steps")
        except (RunError, OSError) as error:
            outcome.error = str(error)
    return outcome


def _training(method: Method, settings: Settings, *options: str) -> list[str]:
    """Return the command that trains."""
    return [
        sys.executable, "-m", "cleave_cli", "train", "--json", "--checkpoint-every", "0",
        "--model", settings.model, "--dtype", method.dtype, "--steps", str(settings.steps + 1),
        "--batch", str(settings.batch), "--seq", str(settings.seq),
        *(["--lora", f"r={settings.rank}"] if settings.rank else []), *options,
    ]  # fmt: skip


def _served(
    method: Method,
    settings: Settings,
    namespaces: Sequence[LimitedNamespace],
    processes: Processes,
    outcome: Outcome,
) -> None:
    """Measure a job on a server with devices in the namespaces."""
    server = processes.start(
        "serve",
        [
            sys.executable, "-m", "cleave_cli", "serve", "--json", "--host", namespaces[0].host,
            "--port", "0", "--insecure-lan", "--data", "none", "--stages-on", "any",
            "--coding", method.coding, "--runs", str(settings.logs / "runs"),
        ],
        CLEAVE_CREDENTIAL=secrets.token_urlsafe(16),
        CLEAVE_OPERATOR_CREDENTIAL=secrets.token_urlsafe(16),
    )  # fmt: skip
    listening = processes.await_record(server, lambda record: record["event"] == "listening")
    devices = [
        processes.start(
            f"device-{number}",
            namespace.inside(
                sys.executable, "-m", "cleave_cli", "join", listening["url"], "--json",
                "--memory", settings.memory, "--name", f"device-{number}",
            ),
            OMP_NUM_THREADS="1",
        )
        for number, namespace in enumerate(namespaces, 1)
    ]  # fmt: skip
    for device in devices:
        processes.await_record(server, _has_joined(device.name))
    job = processes.start(
        "train",
        _training(method, settings, "--method", method.way, "--server", listening["operator_url"]),
    )
    meter = Meter(outcome, settings, namespaces, server, devices)
    for record in processes.records(job):
        if record["event"] == "step":
            meter.take(record)
    outcome.lost = sum(" left (" in line for line in server.out.read_text().splitlines())
    plans = [line for line in job.err.read_text().splitlines() if line.startswith("stages: ")]
    outcome.plan = plans[-1].removeprefix("stages: ") if plans else ""


def _has_joined(device: str) -> Callable[[dict[str, Any]], bool]:
    return lambda record: str(record.get("text", "")).startswith(f"{device} joined")


def _local(
    method: Method,
    settings: Settings,
    namespaces: Sequence[LimitedNamespace],
    processes: Processes,
    outcome: Outcome,
) -> None:
    """Measure a job in one process of this machine."""
    runs = str(settings.logs / "runs")
    job = processes.start("train", _training(method, settings, "--devices", "0", "--runs", runs))
    meter = Meter(outcome, settings, server=job)
    for record in processes.records(job):
        if record["event"] == "step":
            meter.take(record)


def _virtual(
    method: Method,
    settings: Settings,
    namespaces: Sequence[LimitedNamespace],
    processes: Processes,
    outcome: Outcome,
) -> None:
    """Measure a job on emulated devices, in virtual time."""
    measured = subprocess.run(
        [sys.executable, "-c", _SPEED],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    fleet = settings.logs / "fleet.toml"
    fleet.write_text(
        f'[[group]]\nname = "device"\ncount = {settings.devices}\n'
        f"flops_per_s = {float(measured.stdout)}\n"
        f"memory_bytes = {parse_memory(settings.memory, None)}\n"
        f"downlink_bytes_per_s = {settings.down_mbit * MBIT}\n"
        f"uplink_bytes_per_s = {settings.up_mbit * MBIT}\n"
    )
    emulated = ("--fleet", str(fleet), "--devices", str(settings.devices), "--method", "stages")
    runs = ("--runs", str(settings.logs / "runs"), "--coding", method.coding)
    job = processes.start("train", _training(method, settings, *emulated, *runs))
    meter = Meter(outcome, settings)
    for record in processes.records(job):
        if record["event"] == "step":
            meter.take(record)
            outcome.down_bytes = record["downlink_bytes"]
            outcome.up_bytes = record["uplink_bytes"]


def _ddp(
    method: Method,
    settings: Settings,
    namespaces: Sequence[LimitedNamespace],
    processes: Processes,
    outcome: Outcome,
) -> None:
    """Measure DDP over gloo between the namespaces."""
    let_reach_one_another(namespaces)
    workers = [
        processes.start(
            f"worker-{rank}",
            namespace.inside(
                sys.executable, "-m", "benchmarks.ddp_worker", "--model", settings.model,
                "--steps", str(settings.steps + 1), "--batch", str(settings.batch),
                "--seq", str(settings.seq), "--dtype", method.dtype,
            ),
            OMP_NUM_THREADS="1",
            RANK=str(rank),
            WORLD_SIZE=str(len(namespaces)),
            MASTER_ADDR=namespaces[0].guest,
            MASTER_PORT=str(_PORT),
            GLOO_SOCKET_IFNAME=namespace.there,
        )
        for rank, namespace in enumerate(namespaces)
    ]  # fmt: skip
    meter = Meter(outcome, settings, namespaces)
    for record in processes.records(workers[0]):
        meter.take(record)
        if len(outcome.losses) > settings.steps:
            return  # they end in any order


# --- comparing ---


def reference_of(outcomes: Sequence[Outcome]) -> Outcome | None:
    """Return the outcome whose losses the others are compared with; None if there is none."""
    done = {outcome.method: outcome for outcome in outcomes if not outcome.error}
    names = [name for name in (*REFERENCES, *done) if name in done]
    return done[names[0]] if names else None


def difference(outcome: Outcome, reference: Outcome) -> float:
    """Return the largest relative difference of losses."""
    pairs = zip(outcome.losses, reference.losses, strict=True)
    return max(abs(mine - other) / abs(other) for mine, other in pairs)


def times_faster(outcome: Outcome, outcomes: Sequence[Outcome], than: str) -> float | None:
    """Return how many times faster a method is than another; None if that was not measured."""
    for other in outcomes:
        if other.method == than and not other.error and not outcome.error:
            return other.step_s / outcome.step_s
    return None


def agrees(outcome: Outcome, reference: Outcome) -> bool:
    """Say whether a method's losses are those of the reference, within its dtype's limit."""
    return difference(outcome, reference) <= LOSS_LIMITS[Method.of(outcome.method).dtype]


@dataclass(frozen=True)
class Saving:
    """What coding saves of a step's time.

    Attributes:
        method: with coding as it is by default.
        ratio: the time of its step over that without coding.
        limit: what that may be.
    """

    method: str
    ratio: float
    limit: float


def savings(settings: Settings, outcomes: Sequence[Outcome]) -> list[Saving]:
    """Return what coding saves of the methods that were measured with and without it.

    The share of a step that the busiest link takes may shrink to 0.70, with 0.03 for coding. Where
    links are too fast to be worth coding, a step may take 1.02 times as long.
    """
    slow = min(settings.down_mbit, settings.up_mbit) * MBIT <= LINK_BYTES_PER_S
    done = {outcome.method: outcome for outcome in outcomes if not outcome.error}
    found = []
    for name, outcome in done.items():
        if plain := done.get(f"{name}:off"):
            elsewhere = max(0.0, 1 - plain.links_s / plain.step_s)
            limit = 0.70 + 0.30 * elsewhere + 0.03 if slow else 1.02
            found.append(Saving(name, outcome.step_s / plain.step_s, limit))
    return found


def machine() -> str:
    """Return the machine in words: its cores and what they are."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    return f"{os.cpu_count()} cores, {name}"


def show(settings: Settings, outcomes: Sequence[Outcome]) -> None:
    """Print what was measured as tables."""
    say(
        f"{settings.model}, {settings.batch} x {settings.seq} tokens a step, {settings.devices} "
        f"devices behind {settings.down_mbit:g}/{settings.up_mbit:g} Mbit/s (down/up), one thread "
        f"each, median of {settings.steps} steps"
        + (f", adapters of rank {settings.rank}" if settings.rank else "")
    )
    say(f"all processes share this machine: {machine()}")
    print()
    print(f"{'':15} {'':8} {'MB a step':>17} {'peak memory, MB':>16} {'times faster than':>18}")
    head = ("method", "s a step", "down", "up", "server", "device", "tiles:fp32", "ddp:fp32")
    print("{:15} {:>8} {:>8} {:>8} {:>8} {:>7} {:>10} {:>8}".format(*head))
    for outcome in outcomes:
        if outcome.error:
            print(f"{outcome.method:15} failed")
            continue
        ratios = [times_faster(outcome, outcomes, than) for than in ("tiles:fp32", "ddp:fp32")]
        tiles, ddp = (f"{ratio:.2f}" if ratio is not None else "-" for ratio in ratios)
        print(
            f"{outcome.method:15} {outcome.step_s:8.2f} {_mb(outcome.down_bytes):>8} "
            f"{_mb(outcome.up_bytes):>8} {_mb(outcome.server_peak_bytes):>8} "
            f"{_mb(outcome.device_peak_bytes):>7} {tiles:>10} {ddp:>8}"
        )
    print()
    show_losses([outcome for outcome in outcomes if not outcome.error])
    for saving in savings(settings, outcomes):
        met = "met" if saving.ratio <= saving.limit else "NOT met"
        say(
            f"{saving.method}: with coding a step takes {saving.ratio:.3f} of the time without "
            f"(at most {saving.limit:.3f}): {met}"
        )
    for outcome in outcomes:
        if outcome.floor_ratio and outcome.method.startswith("stages"):
            met = "met" if outcome.floor_ratio <= FLOOR_LIMIT else "NOT met"
            say(
                f"{outcome.method}: without coding a step would send {outcome.floor_ratio:.3f} "
                f"times the least bytes (at most {FLOOR_LIMIT:g}): {met}"
            )
        alone = times_faster(outcome, outcomes, f"local:{Method.of(outcome.method).dtype}")
        if alone is not None and not outcome.method.startswith("local"):
            say(f"{outcome.method}: {1 / alone:.2f} times the step of this machine alone")
        of_virtual = f"virtual:{Method.of(outcome.method).dtype}"
        in_virtual = times_faster(outcome, outcomes, of_virtual)
        if in_virtual is not None and outcome.method.startswith("stages"):
            met = "met" if abs(1 / in_virtual - 1) <= VIRTUAL_LIMIT else "NOT met"
            say(
                f"{outcome.method}: {1 / in_virtual:.3f} times the step in virtual time "
                f"(1 +/- {VIRTUAL_LIMIT:g}): {met}"
            )
        if outcome.plan:
            say(f"{outcome.method}: {outcome.plan}")
        if outcome.lost:
            say(f"{outcome.method}: devices left and came back {outcome.lost} times meanwhile")
    if any(outcome.method.startswith("ddp") for outcome in outcomes):
        say(
            f"ddp: from one namespace to another through this machine: up a link of "
            f"{settings.up_mbit:g} Mbit/s and down one of {settings.down_mbit:g}"
        )
    for outcome in outcomes:
        if outcome.error:
            print(f"\n{outcome.method} failed: {outcome.error}")


def show_losses(outcomes: Sequence[Outcome]) -> None:
    """Print the losses of each step beside one another, and whether they agree."""
    for first in range(0, len(outcomes), _COLUMNS):
        some = outcomes[first : first + _COLUMNS]
        print("loss" + "".join(f"{outcome.method:>16}" for outcome in some))
        rows = zip(*(outcome.losses for outcome in some), strict=True)
        for step, losses in enumerate(rows, 1):
            print(f"{step:4}" + "".join(f"{loss:16.6f}" for loss in losses))
        print()
    reference = reference_of(outcomes)
    for outcome in outcomes:
        if reference is None or outcome is reference:
            continue
        limit = LOSS_LIMITS[Method.of(outcome.method).dtype]
        met = "met" if agrees(outcome, reference) else "NOT met"
        off = difference(outcome, reference)
        say(f"{outcome.method}: {off:.1e} off {reference.method} (at most {limit:g}): {met}")


def as_json(settings: Settings, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return what was measured, as `--json` prints it."""
    reference = reference_of(outcomes)
    methods = []
    for outcome in outcomes:
        told: dict[str, Any] = {"method": outcome.method, "error": outcome.error}
        if not outcome.error and reference is not None:
            told |= {
                "step_s": outcome.step_s,
                "seconds": outcome.seconds,
                "losses": outcome.losses,
                "downlink_bytes": outcome.down_bytes,
                "uplink_bytes": outcome.up_bytes,
                "server_peak_bytes": outcome.server_peak_bytes,
                "device_peak_bytes": outcome.device_peak_bytes,
                "times_faster_than_tiles_fp32": times_faster(outcome, outcomes, "tiles:fp32"),
                "times_faster_than_ddp_fp32": times_faster(outcome, outcomes, "ddp:fp32"),
                "loss_reference": reference.method,
                "loss_difference": difference(outcome, reference),
                "losses_agree": agrees(outcome, reference),
                "floor_ratio": outcome.floor_ratio,
                "plan": outcome.plan,
                "devices_lost": outcome.lost,
            }
        methods.append(told)
    return {
        "machine": machine(),
        "model": settings.model,
        "batch": settings.batch,
        "seq": settings.seq,
        "steps": settings.steps,
        "devices": settings.devices,
        "lora_rank": settings.rank,
        "down_mbit": settings.down_mbit,
        "up_mbit": settings.up_mbit,
        "methods": methods,
        "coding": [asdict(saving) for saving in savings(settings, outcomes)],
    }


def say(text: str) -> None:
    """Print a text in lines of at most 80 columns."""
    print(textwrap.fill(text, _WIDTH, subsequent_indent="  ", break_on_hyphens=False))


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.0f}" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f}" if nbytes else "-"


# --- the command ---


@contextmanager
def _log_folder(given: Path | None) -> Iterator[Path]:
    """Yield a folder for logs: the given one, or one that is deleted."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield Path(tempfile.mkdtemp(prefix="stage-links-", dir=given.absolute()))
        return
    made = Path(tempfile.mkdtemp(prefix="cleave-benchmark-"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _ending(number: int, _: object) -> NoReturn:
    """End everything that was started; a second signal does not disturb that."""
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _read_arguments() -> tuple[argparse.Namespace, list[Method], int]:
    """Return the options, the methods and the tokens of a sequence."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="opt-125m")
    parser.add_argument("--tokens", type=int, default=1024, help="a step")
    parser.add_argument("--seq", type=int, help="tokens of a sequence; 256, or 512 of many")
    parser.add_argument("--steps", type=int, default=2, help="that are counted")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--down", type=float, default=100.0, help="Mbit/s")
    parser.add_argument("--up", type=float, default=20.0, help="Mbit/s")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--memory", default="2GB", help="what each device offers")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters alone")
    parser.add_argument("--limit-s", type=float, default=7200.0, help="for each method")
    parser.add_argument("--logs", type=Path, help="a folder in which all output is kept")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        methods = [Method.of(text) for text in options.methods.split(",")]
    except ValueError as error:
        parser.error(str(error))
    if min(options.steps, options.devices, options.tokens) < 1:
        parser.error("--steps, --devices and --tokens are 1 or more")
    if options.lora < 0 or (options.lora and any(method.way == "ddp" for method in methods)):
        parser.error(f"--lora {options.lora}: give a rank, and methods without ddp")
    usual = 256 if options.tokens <= _SHORT_BATCH else 512
    seq = options.seq or max(1, min(usual, options.tokens // options.devices))
    if options.tokens % (seq * options.devices):
        parser.error(
            f"{options.tokens} tokens in sequences of {seq} cannot be split {options.devices} "
            f"ways, as DDP does; give another --tokens or --seq"
        )
    return options, methods, seq


def main() -> None:
    """Run the benchmark; see the module's docstring."""
    options, methods, seq = _read_arguments()
    alone = all(method.way == "local" for method in methods)
    if not alone and (missing := namespaces_missing()):
        sys.exit(f"there are no rate-limited links here: {missing}; only --methods local works")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _ending)
    outcomes: list[Outcome] = []
    with ExitStack() as stack:
        settings = Settings(
            model=options.model,
            batch=options.tokens // seq,
            seq=seq,
            steps=options.steps,
            devices=options.devices,
            down_mbit=options.down,
            up_mbit=options.up,
            memory=options.memory,
            rank=options.lora,
            limit_s=options.limit_s,
            logs=stack.enter_context(_log_folder(options.logs)),
        )
        down, up = options.down * MBIT, options.up * MBIT
        namespaces = [
            stack.enter_context(limited_namespace(number, down, up))
            for number in range(0 if alone else options.devices)
        ]
        for method in methods:
            began_s = time.perf_counter()
            outcomes.append(measure(method, settings, namespaces))
            took_s, failed = time.perf_counter() - began_s, bool(outcomes[-1].error)
            how = "failed" if failed else f"{outcomes[-1].step_s:.2f} s a step"
            print(f"{method.name}: {how}, {took_s:.0f} s in all", file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps(as_json(settings, outcomes), indent=2))
    else:
        show(settings, outcomes)
    reference = reference_of(outcomes)
    right = reference is not None and all(
        not outcome.error and agrees(outcome, reference) for outcome in outcomes
    )
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
