"""Kill a server with SIGKILL while devices keep the state, or limit its memory.

    python -m benchmarks.resident_server [--model opt-125m] [--steps 12] [--kills 3] [--devices 3]
    python -m benchmarks.resident_server --compute off    # all state is on other devices
    python -m benchmarks.resident_server --model opt-350m --kills 0 --limit-gb 2.5

A real server, `cleave join` processes and `cleave train --state devices`. The server is killed at
random moments, and started again with `--resume-jobs` on the same port. Each step must be recorded
exactly once, and the losses must be those of `--method local` (1e-4). With `--limit-gb`, a control
group limits the server's memory (Linux, as root). Then `--method local` is also tried with this
limit, in addition to the run without a limit that gives the losses.

Ends with 1 if a limit is broken.
"""

from __future__ import annotations

import argparse
import random
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from benchmarks.common import machine, resident_bytes
from benchmarks.side_by_side.processes import Processes, Started
from cleave.training.loop.run_folder import RunFolder
from tests.integration.processes import free_port

_CLEAVE: Final = (sys.executable, "-m", "cleave_cli")
_LIMIT: Final = 1e-4
_GROUPS: Final = Path("/sys/fs/cgroup")


class Group:
    """A control group that limits the memory of processes.

    Args:
        limit_bytes: maximum memory; 0 for no limit, and no group.
    """

    def __init__(self, limit_bytes: int) -> None:
        old = (_GROUPS / "memory").is_dir()
        self._folder = _GROUPS / ("memory/cleave-benchmark" if old else "cleave-benchmark")
        self.command: tuple[str, ...] = ()
        if not limit_bytes:
            return
        self._folder.mkdir(exist_ok=True)
        name = "memory.limit_in_bytes" if old else "memory.max"
        (self._folder / name).write_text(str(limit_bytes))
        joining = f'echo $$ > {self._folder}/cgroup.procs && exec "$@"'
        self.command = ("sh", "-c", joining, "sh")

    def remove(self) -> None:
        """Remove the group, whose processes have ended."""
        if self.command:
            self._folder.rmdir()


class Peak:
    """The largest memory of a process so far, without file-backed memory, in bytes."""

    def __init__(self) -> None:
        self.most = 0

    def look(self, started: Started) -> None:
        """Note the present memory of a process and its children."""
        total = 0
        for pid in started.pids():
            with suppress(OSError, RuntimeError):  # the process has ended
                total += resident_bytes(pid, "RssAnon")
        self.most = max(self.most, total)


def job_of(options: argparse.Namespace) -> list[str]:
    """Return the options of the job."""
    return [
        "--model", options.model, "--steps", str(options.steps), "--batch", str(options.batch),
        "--seq", str(options.seq), "--checkpoint-every", "1000", "--seed", str(options.seed),
        "--eval-every", "0",
    ]  # fmt: skip


def steps_of(runs: Path, what: str = "loss") -> dict[int, float]:
    """Return a value of each step of the only run in a folder. No step may be recorded twice."""
    records = [each for folder in runs.glob("*") for each in RunFolder(folder).records()]
    steps = [each for each in records if each.get("event") == "step"]
    assert len({each["step"] for each in steps}) == len(steps)
    return {each["step"]: each[what] for each in steps}


class Course:
    """A run on devices whose server is killed.

    Args:
        group: limits the memory of the server.
    """

    def __init__(
        self, options: argparse.Namespace, processes: Processes, folder: Path, group: Group
    ) -> None:
        self._options, self._processes, self._group = options, processes, group
        self.runs = folder / "runs"
        self._serving = [
            *group.command, *_CLEAVE, "serve", "--json", "--port", free_port(),
            "--data", str(folder / "data"), "--runs", str(self.runs), "--stages-on", "any",
            "--compute", options.compute,
        ]  # fmt: skip
        self._keys = {
            "CLEAVE_CREDENTIAL": secrets.token_urlsafe(16),
            "CLEAVE_OPERATOR_CREDENTIAL": secrets.token_urlsafe(16),
        }
        self._random = random.Random(options.seed)
        self.peak = Peak()
        self.resumed_s: list[float] = []  # from the kill until the next step was complete
        self.resumed_mb: list[float] = []  # what the server sent in that step

    def run(self) -> dict[int, float]:
        """Return the losses by step."""
        options, processes = self._options, self._processes
        server = processes.start("serve-0", self._serving, **self._keys)
        at = processes.await_record(server, lambda each: each["event"] == "listening")
        for number in range(options.devices):
            joining = [*_CLEAVE, "join", at["url"], "--json", "--memory", f"{options.memory}GB"]
            processes.start(f"device-{number}", joining, OMP_NUM_THREADS="1")
        self._await(server, lambda: server.out.read_text().count(" joined") >= options.devices)
        training = [
            *_CLEAVE, "train", "--json", "--server", at["operator_url"], "--method", "stages",
            "--state", "devices", *job_of(options),
        ]  # fmt: skip
        processes.may_end |= {"train", *(f"serve-{n}" for n in range(options.kills + 1))}
        processes.start("train", training)
        for kill in range(1, options.kills + 1):
            after = 1 + kill * (options.steps - 2) // (options.kills + 1)
            self._wait(server, after)
            time.sleep(self._random.random() * 3)
            server.signal(signal.SIGKILL)
            server.process.wait()
            began_s, done = time.monotonic(), max(steps_of(self.runs))
            assert done < options.steps, "the run ended before its server was killed"
            again = [*self._serving, "--resume-jobs"]
            server = processes.start(f"serve-{kill}", again, **self._keys)
            self._wait(server, done + 1)
            self.resumed_s.append(time.monotonic() - began_s)
            self.resumed_mb.append(steps_of(self.runs, "downlink_bytes")[done + 1] / 1e6)
        self._wait(server, options.steps)
        return steps_of(self.runs)

    def _wait(self, server: Started, step: int) -> None:
        """Wait until a step has been recorded."""
        self._await(server, lambda: step in steps_of(self.runs))

    def _await(self, server: Started, done: Callable[[], bool]) -> None:
        while not done():
            self.peak.look(server)
            if server.process.poll() is not None:
                raise RuntimeError(f"the server has ended: {server.last_words()}")
            if time.monotonic() > self._processes.until_s:
                raise RuntimeError("out of time")
            time.sleep(0.1)


def alone(
    options: argparse.Namespace, processes: Processes, folder: Path, group: Group
) -> dict[int, float] | None:
    """Return the losses of the server alone; None if it failed, for example without memory."""
    runs = folder / "runs"
    local = [*_CLEAVE, "train", "--json", "--method", "local", "--runs", str(runs)]
    started = processes.start(
        f"alone-{folder.name}", [*group.command, *local, "--memory", "plain", *job_of(options)]
    )
    processes.may_end.add(started.name)
    return steps_of(runs) if started.process.wait() == 0 else None


def main() -> None:
    """Run and compare; print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="opt-125m")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--memory", default="6", help="GB of each device")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-gb", type=float, default=0.0, help="memory of the server")
    parser.add_argument("--compute", default="auto", help="as for `cleave serve`")
    parser.add_argument("--quick", action="store_true", help="few steps")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.kills, options.seq = 6, 1, 64
    group = Group(round(options.limit_gb * 1e9))
    print(f"{machine()}; {options.model}, {options.devices} devices, {options.steps} steps")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        with Processes(folder, time.monotonic() + 1500) as processes:
            course = Course(options, processes, folder, group)
            losses = course.run()
        print(f"server killed {options.kills} times: {len(losses)} of {options.steps} steps, once")
        if course.resumed_s:
            print(f"seconds until the next step: {[round(s, 1) for s in course.resumed_s]}")
            print(f"MB that the server sent in it: {[round(mb) for mb in course.resumed_mb]}")
        print(f"memory of the server, without mapped files: {course.peak.most / 1e9:.2f} GB")
        with Processes(folder, time.monotonic() + 1500) as processes:
            if group.command:
                found = alone(options, processes, folder / "limited", group)
                print(f"the server alone, same limit: {'killed' if found is None else 'fits'}")
            plain = alone(options, processes, folder / "plain", Group(0))
        group.remove()
    assert plain is not None
    off = max(abs(losses[step] / plain[step] - 1) for step in plain)
    broken = losses.keys() != plain.keys() or off > _LIMIT
    print(f"largest relative difference of losses: {off:.1e} (at most {_LIMIT:g})")
    sys.exit(broken)


if __name__ == "__main__":
    main()
