"""Compare a server and its devices with the server alone, when each is a computer of its own.

    python -m benchmarks.real_fleet [--devices 6] [--link 100/20] [--part 0.28] [--steps 3]
        [--alone-steps 2] [--alone-batch N] [--memory 4GB] [--json] [-- options of cleave train]

Linux, root. The server and every device get `--part` of a core, as separate computers would have
cores of their own, and each device has a link of its own with a 20 ms round trip. A computer has
two cores, so links are slower by the factor `--part` / 2. Ratios are then those of real computers,
as long as all parts together are less than this machine. With `--alone-batch`, the server alone
trains on batches of N sequences, and its seconds count in proportion to the batch, except those of
the optimizer.

Prints seconds per step of both, without the first step of each; the prediction of the last step;
the server's own work, CPU time and peak memory; and the *bound*, which no plan can beat: the larger
of the time for the bytes of the busiest link, and the time of the server alone divided by the
number of computers. Ends with 1 if losses of equal batches differ from those of the server alone
by more than 1e-4 (fp32) or 2e-2.
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.common import machine
from benchmarks.cores import LimitedCores, limited_cores
from benchmarks.links import limited_namespace, namespaces_missing
from benchmarks.side_by_side.memory import peak_bytes
from benchmarks.side_by_side.method import LOSS_LIMITS
from benchmarks.side_by_side.processes import Processes
from benchmarks.side_by_side.setting import Link

_USUAL: Final = "--model opt-125m --batch 16 --seq 512 --dtype fp32"
_CORES: Final = 2  # of a computer; `--part` stands for them
_ONE_WAY_S: Final = 0.01
_CLEAVE: Final = (sys.executable, "-m", "cleave_cli")


@dataclass
class Measured:
    """The steps of one job.

    Attributes:
        seconds, predicted_s, own_s, optimizer_s: durations of the steps; of the forecasts; of the
            server's work; of the optimizer.
        losses: loss of each step.
        cpu_s: CPU time of the server in all steps after the first.
        peak_bytes: peak resident memory of the server.
        plan: the plan of the stages, as a sentence.
        links_s: time in which the busiest link carries its bytes, as a mean of all steps.
    """

    seconds: list[float] = field(default_factory=list)
    predicted_s: list[float] = field(default_factory=list)
    own_s: list[float] = field(default_factory=list)
    optimizer_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    peak_bytes: int = 0
    plan: str = ""
    links_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Return the median duration of a step, without the first one if there are others."""
        return statistics.median(self.seconds[1:] or self.seconds)

    def take(self, record: dict[str, Any]) -> None:
        """Add the record of a step."""
        self.seconds.append(float(record["wall_s"]))
        self.predicted_s.append(float(record.get("predicted_s", 0.0)))
        self.own_s.append(float(record["ps_s"]))
        self.optimizer_s.append(float(record.get("optimizer_s", 0.0)))
        self.losses.append(float(record["loss"]))


class Computers:
    """A server and its devices, each with a part of a core.

    Args:
        options: command line of this benchmark.
        train: options of `cleave train`, the same for both jobs.
        folder: folder for logs and runs.
    """

    def __init__(self, options: argparse.Namespace, train: Sequence[str], folder: Path) -> None:
        self._options, self._train, self._folder = options, train, folder
        self._scale = options.part / _CORES

    def alone(self) -> Measured:
        """Train on the server alone."""
        with self._server() as cores, self._processes() as processes:
            runs, smaller = str(self._folder / "runs"), self._options.alone_batch
            batch = ("--batch", str(smaller)) if smaller else ()
            command = self._training(
                self._options.alone_steps, "--devices", "0", "--runs", runs, *batch
            )
            job = processes.start("alone", cores.inside(*command), OMP_NUM_THREADS="1")
            found = _followed(processes.records(job), job.process.pid)
        if smaller:
            times = int(self._train[self._train.index("--batch") + 1]) / smaller
            before_s = found.step_s
            found.seconds = [  # the optimizer's time does not depend on the batch
                times * (step_s - update_s) + update_s
                for step_s, update_s in zip(found.seconds, found.optimizer_s, strict=True)
            ]
            found.cpu_s *= found.step_s / before_s
            found.losses = []
        return found

    def together(self) -> Measured:
        """Train on the server with its devices."""
        link = Link.of(self._options.link)
        with ExitStack() as stack:
            namespaces = [
                stack.enter_context(
                    limited_namespace(
                        number, link.down * self._scale, link.up * self._scale, _ONE_WAY_S,
                        self._options.part,
                    )
                )
                for number in range(1, self._options.devices + 1)
            ]  # fmt: skip
            cores = stack.enter_context(self._server())
            processes = stack.enter_context(self._processes())
            serving = (
                *_CLEAVE, "serve", "--json", "--host", namespaces[0].host, "--port", "0",
                "--insecure-lan", "--data", "none", "--stages-on", "any",
                "--coding", self._options.coding, "--runs", str(self._folder / "runs"),
            )  # fmt: skip
            server = processes.start(
                "serve",
                cores.inside(*serving),
                OMP_NUM_THREADS="1",
                CLEAVE_CREDENTIAL=secrets.token_urlsafe(16),
                CLEAVE_OPERATOR_CREDENTIAL=secrets.token_urlsafe(16),
            )
            listening = processes.await_record(server, lambda each: each["event"] == "listening")
            for number, namespace in enumerate(namespaces, 1):
                joining = (
                    *_CLEAVE, "join", listening["url"], "--json",
                    "--memory", self._options.memory, "--name", f"device-{number}",
                )  # fmt: skip
                processes.start(f"device-{number}", namespace.inside(*joining), OMP_NUM_THREADS="1")
                # One after another: each measures itself on a processor that no other device uses.
                processes.await_record(server, lambda each: " joined" in str(each.get("text")))
            before = [namespace.passed_bytes() for namespace in namespaces]
            command = self._training(self._options.steps, "--server", listening["operator_url"])
            job = processes.start("train", command)
            found = _followed(processes.records(job), server.process.pid)
            passed = [
                max((down - d) / link.down, (up - u) / link.up) / self._scale
                for (d, u), (down, up) in zip(
                    before, [each.passed_bytes() for each in namespaces], strict=True
                )
            ]
            found.links_s = max(passed) / len(found.seconds)
            plans = [
                line for line in job.err.read_text().splitlines() if " a step predicted" in line
            ]
            found.plan = plans[-1] if plans else ""
            return found

    def _server(self) -> AbstractContextManager[LimitedCores]:
        return limited_cores(f"cleave-server-{time.monotonic_ns()}", self._options.part)

    def _processes(self) -> Processes:
        return Processes(self._folder, time.monotonic() + self._options.limit_s)

    def _training(self, steps: int, *options: str) -> list[str]:
        return [
            *_CLEAVE, "train", "--json", "--checkpoint-every", "0", "--schedule", "constant",
            *self._train, "--steps", str(steps), *options,
        ]  # fmt: skip


def _followed(records: Iterable[dict[str, Any]], pid: int) -> Measured:
    """Return the steps that a job prints; `pid` is the server's process."""
    found, server, first_cpu_s = Measured(), psutil.Process(pid), 0.0
    for record in records:
        if record.get("event") == "step":
            found.take(record)
            found.peak_bytes = max(found.peak_bytes, peak_bytes([pid]))
            cpu_s = sum(server.cpu_times()[:2])
            first_cpu_s = first_cpu_s or cpu_s
            found.cpu_s = cpu_s - first_cpu_s
    return found


def described(alone: Measured, fleet: Measured, devices: int) -> dict[str, float]:
    """Return the figures of a comparison; times are seconds per step."""
    share_s = alone.step_s / (devices + 1)
    bound_s = max(share_s, fleet.links_s)
    least = min(len(alone.losses), len(fleet.losses))
    pairs = zip(alone.losses[:least], fleet.losses[:least], strict=True)
    later = max(1, len(fleet.seconds) - 1)
    return {
        "alone_s": alone.step_s,
        "fleet_s": fleet.step_s,
        "times_as_fast": alone.step_s / fleet.step_s,
        "bound_s": bound_s,
        "links_s": fleet.links_s,
        "times_the_bound": fleet.step_s / bound_s,
        "first_predicted_s": fleet.predicted_s[0],
        "predicted_s": fleet.predicted_s[-1],
        "predicted_of_measured": fleet.predicted_s[-1] / fleet.seconds[-1],
        "own_share": statistics.median(
            own / took for own, took in zip(fleet.own_s, fleet.seconds, strict=True)
        ),
        "server_cpu_s": fleet.cpu_s / later,
        "alone_cpu_s": alone.cpu_s / max(1, len(alone.seconds) - 1),
        "server_peak_mb": fleet.peak_bytes / 1e6,
        "alone_peak_mb": alone.peak_bytes / 1e6,
        "losses_off": max((abs(other - plain) / abs(plain) for plain, other in pairs), default=0.0),
    }


def main() -> None:
    """Measure one setting and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=6)
    parser.add_argument("--link", default="100/20", help="Mbit/s down/up of each computer")
    parser.add_argument("--part", type=float, default=0.28, help="of a core, for each computer")
    parser.add_argument("--coding", default="auto", help="of cleave serve; off for a LAN")
    parser.add_argument("--memory", default="4GB")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--alone-steps", type=int, default=2)
    parser.add_argument("--alone-batch", type=int, default=0, help="sequences; 0: as the fleet")
    parser.add_argument("--limit-s", type=float, default=7200.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("train", nargs="*", help=f"options of cleave train ({_USUAL})")
    options = parser.parse_args()
    if missing := namespaces_missing():
        sys.exit(f"this machine cannot emulate computers: {missing}")
    train = options.train or [*_USUAL.split(), "--method", "stages"]
    with tempfile.TemporaryDirectory(prefix="cleave-benchmark-") as folder:
        computers = Computers(options, train, Path(folder))
        alone, fleet = computers.alone(), computers.together()
    figures = described(alone, fleet, options.devices)
    if options.json:
        print(json.dumps({"figures": figures, "alone": asdict(alone), "fleet": asdict(fleet)}))
    else:
        print(f"{' '.join(train)}; {options.devices} devices, {options.link} Mbit/s; {machine()}")
        print(fleet.plan)
        for name, value in figures.items():
            print(f"{name:24} {value:.3g}")
    limit = LOSS_LIMITS["fp32" if "fp32" in train or "--dtype" not in train else "bf16"]
    sys.exit(figures["losses_off"] > limit)


if __name__ == "__main__":
    main()
