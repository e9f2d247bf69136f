"""Send SIGKILL at seeded moments: every run continues, every checkpoint is intact.

    python -m benchmarks.crash            # 200 killed runs, every line of writing a checkpoint
    python -m benchmarks.crash --quick    # a few of each

Moments are counted in Python calls or lines and drawn from a seed, so that failures are
reproducible on machines of any speed. There are three parts:

- *writing*: a process is killed at every line that it executes while writing a checkpoint.
  Afterwards the old or the new checkpoint must be complete. The next checkpoint can be written and
  leaves no other files.
- *damage*: a byte of the newest checkpoint is changed, or one of its files truncated or deleted.
  The run must report it and continue from the previous checkpoint.
- *runs*: `cleave train` is killed at a random call, resumed, perhaps killed again, and resumed to
  its end, without and with `--journal`. All losses must equal those of the undisturbed run, to the
  last bit. (The emulated devices sum in the order of k. With a library's kernels, the last bits
  depend on the tiling. A step partly restored from disk leaves other arrays on devices, which
  changes the tiling.)

Every killed process is forked from this one, which has loaded torch. So processes and SIGKILL are
real, without the seconds of starting up.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

if __name__ == "__main__":  # before torch is imported: a forked process has only one thread
    os.environ["OMP_NUM_THREADS"] = "1"


import matplotlib.backends.backend_agg
import matplotlib.figure
import numpy as np
import tomli_w
import torch
import transformers.models.opt.modeling_opt

from cleave.arrays import Buffer
from cleave.training.data.tokenizer import default_tokenizer
from cleave.training.loop import checkpoint, journal, run_folder
from cleave.training.loop.run_folder import CHECKPOINTS
from cleave.workload.registry import find_model
from cleave_cli import main as command_line
from emulator import virtual

LOADED = (matplotlib.backends.backend_agg, matplotlib.figure, tomli_w, transformers.models.opt)
WRITES = {str(module.__file__) for module in (checkpoint, run_folder, journal)}
STEPS, EVERY = 5, 2


# --- processes that are killed ---


def forked(work: Callable[[], None]) -> int:
    """Run a function in a forked process; return its exit status as `os.waitpid` does."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    code = 1
    try:
        work()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        os._exit(code)


@dataclass
class Countdown:
    """Kills its own process at a given event, if it gets that far.

    Attributes:
        left: number of the event at which the process is killed.
        seen: number of events so far.
    """

    left: int
    seen: int = 0

    def _count(self) -> None:
        self.seen += 1
        if self.seen == self.left:
            os.kill(os.getpid(), signal.SIGKILL)

    def line(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Count lines of the modules that write checkpoints; a function for `sys.settrace`."""
        if frame.f_code.co_filename not in WRITES:
            return None
        if event == "line":
            self._count()
        return self.line

    def call(self, frame: FrameType, event: str, argument: Any) -> None:
        """Count all calls and returns, including C functions; a function for `sys.setprofile`."""
        self._count()


def was_killed(status: int) -> bool:
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def require(condition: bool, text: str) -> None:
    if not condition:
        print(f"FAILED: {text}", flush=True)
        sys.exit(1)


# --- writing checkpoints ---


def _save(folder: Path, step: int) -> None:
    value = torch.full((50,), float(step))
    tensors = {"a": value, "tied": value, "b": torch.arange(step, step + 9)}
    checkpoint.save_checkpoint(folder, step=step, tensors=tensors, meta={"value": step})


def _is_whole(found: checkpoint.LoadedCheckpoint | None, steps: tuple[int, ...]) -> bool:
    if found is None or found.step not in steps:
        return False
    right = bool((found.tensors["tied"] == float(found.step)).all())
    return right and found.meta == {"value": found.step}


def kill_while_writing(folder: Path, quick: bool, seed: int) -> None:
    """Run part one; see the module's docstring."""
    count = folder / "count"
    for again in (False, True):  # a new step, and a step that is written again
        target = 2 if again else 3

        def undisturbed(place: Path = folder / f"whole-{again}", step: int = target) -> None:
            for earlier in (1, 2):
                _save(place, earlier)
            counter = Countdown(-1)
            sys.settrace(counter.line)
            _save(place, step)
            sys.settrace(None)
            count.write_text(str(counter.seen))

        require(forked(undisturbed) == 0, "a checkpoint cannot be written at all")
        lines = int(count.read_text())
        moments = list(range(1, lines + 1))
        if quick:
            moments = sorted(random.Random(seed).sample(moments, 12))
        old = 0
        for moment in moments:
            place = folder / f"killed-{again}-{moment}"

            def killed(place: Path = place, moment: int = moment, step: int = target) -> None:
                for earlier in (1, 2):
                    _save(place, earlier)
                sys.settrace(Countdown(moment).line)
                _save(place, step)

            require(was_killed(forked(killed)), f"line {moment} of {lines} was not reached")
            found = checkpoint.load_latest(place)
            require(_is_whole(found, (2, target)), f"{place} holds no whole checkpoint")
            old += found is not None and found.step < target
            _save(place, 4)
            names = sorted(path.name for path in place.iterdir())
            require(names[-1] == "step-000004" and len(names) == 2, f"{place} holds {names}")
        what = "written a second time" if again else "written"
        print(
            f"killed at {len(moments)} of {lines} lines while a checkpoint is {what}: always a "
            f"whole one, {old} times the one before",
            flush=True,
        )


# --- runs ---


class OrderedBackend:
    """A backend that sums products in the order of k, for any tile."""

    name = "ordered"

    def matmul(self, a: Buffer, b: Buffer, out: Buffer, *, accumulate: bool = False) -> None:
        """See `MatmulBackend.matmul`."""
        left, right = a.float32().T.copy(), b.float32().copy()
        total = out.array.copy() if accumulate else np.zeros(out.shape, np.float32)
        product = np.empty_like(total)
        for column, row in zip(left, right, strict=True):
            np.multiply(column[:, None], row, out=product)
            total += product
        out.array[...] = total


def _train(folder: Path, *options: str) -> None:
    """Run `cleave train` in this process, which ends with it."""
    os.chdir(folder)
    for stream, name in ((1, "out"), (2, "err")):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream)
    sys.argv = ["cleave", "train", *options, "--json"]
    command_line.main()


@dataclass(frozen=True, slots=True)
class Course:
    """The options of runs, and the losses that they must reach."""

    root: Path
    options: tuple[str, ...]
    losses: tuple[float, ...]
    calls: int

    def killed(self, name: str, options: tuple[str, ...], moment: int) -> bool:
        """Start or resume a run and kill it at a moment; return False if it ended before."""

        def work() -> None:
            sys.setprofile(Countdown(moment).call)
            _train(self.root, *options)

        status = forked(work)
        require(was_killed(status) or status == 0, f"{name} ended with {status}; see {self.root}")
        return was_killed(status)


def losses_of(run: Path) -> tuple[float, ...]:
    """Return the losses in a run's metrics, checking that the steps are 1, 2, 3, ..."""
    steps = [r for r in run_folder.RunFolder(run).records() if r["event"] == "step"]
    require([r["step"] for r in steps] == list(range(1, STEPS + 1)), f"{run} has other steps")
    return tuple(r["loss"] for r in steps)


def prepare_text() -> None:
    """Train the tokenizer unless it is cached."""
    default_tokenizer(vocab_size=find_model("opt-nano").vocabulary)


def undisturbed(root: Path) -> Course:
    """Run without a kill; return the run's options, losses and number of calls."""
    lines = (f"def step_{i}(a, b):\n    return a * {i} + b - {i % 7}\n" for i in range(2000))
    (root / "text.txt").write_text("\n".join(lines))
    options = (
        "--model", "opt-nano", "--data", "text.txt", "--steps", str(STEPS), "--batch", "2",
        "--seq", "16", "--devices", "1", "--checkpoint-every", str(EVERY),
    )  # fmt: skip

    def once(name: str) -> Callable[[], None]:
        def work() -> None:
            counter = Countdown(-1)
            sys.setprofile(counter.call)
            try:
                _train(root, *options, "--name", name)
            finally:
                sys.setprofile(None)
                (root / "count").write_text(str(counter.seen))

        return work

    require(forked(prepare_text) == 0, "the tokenizer cannot be made")
    require(forked(once("whole")) == 0, f"a run that nobody killed failed; see {root}/err")
    calls = int((root / "count").read_text())
    return Course(root, options, losses_of(root / "runs" / "whole"), calls)


def kill_runs(course: Course, kills: int, seed: int) -> None:
    """Run part three; see the module's docstring."""
    died = resumed = taken = 0
    saved_s = 0.0
    for number in range(kills):
        rng = random.Random(f"{seed} {number}")
        name = f"killed-{number}"
        run = course.root / "runs" / name
        with_journal = ("--journal",) if number % 2 else ()
        start = (*course.options, "--name", name, *with_journal)
        died += course.killed(name, start, rng.randrange(course.calls // 4, course.calls))
        while not (run / "config.toml").is_file():  # killed before the run could be resumed
            run.rename(run.with_name(f"{name}-before-{rng.random()}")) if run.exists() else None
            require(forked(lambda o=start: _train(course.root, *o)) == 0, f"{name} failed")  # type: ignore[misc]
        resume = (
            "--resume",
            str(run),
            "--restart",
        )  # some are killed before their first checkpoint
        if rng.random() < 0.5:
            died += course.killed(name, resume, rng.randrange(course.calls // 4, course.calls))
        status = forked(lambda r=resume: _train(course.root, *r))  # type: ignore[misc]
        require(status == 0, f"{name} did not go on; see {course.root}/err")
        resumed += 1
        for record in run_folder.RunFolder(run).records():
            if record["event"] == "done":
                taken += record["journal_gemms"]
                saved_s += record["journal_saved_s"]
        found = losses_of(run)
        require(found == course.losses, f"{name} has losses {found}, not {course.losses}")
    print(
        f"{died} kills in {kills} runs, half of them with --journal: all {resumed} went on to the "
        f"same losses, to the last bit; {taken} products came from journals",
        flush=True,
    )


def damage_checkpoints(course: Course, cases: int, seed: int) -> None:
    """Run part two; see the module's docstring."""
    for number in range(cases):
        rng = random.Random(f"{seed} damage {number}")
        run = course.root / "runs" / f"damaged-{number}"
        options = (*course.options[:-1], "1", "--name", run.name)
        require(forked(lambda o=options: _train(course.root, *o)) == 0, f"{run} failed")  # type: ignore[misc]
        newest = max((run / CHECKPOINTS).iterdir())
        file = newest / rng.choice(["tensors.safetensors", "meta.json"])
        content = bytearray(file.read_bytes())
        match rng.choice(["flip", "cut", "missing"]):
            case "flip":  # a bit of the tensors, or JSON's first brace
                place = 0 if file.suffix == ".json" else rng.randrange(len(content))
                content[place] ^= 1 << rng.randrange(7)
                file.write_bytes(content)
            case "cut":
                file.write_bytes(content[: rng.randrange(len(content))])
            case _:
                file.unlink()
        (course.root / "err").unlink()
        status = forked(lambda r=run: _train(course.root, "--resume", str(r)))  # type: ignore[misc]
        said = (course.root / "err").read_text()
        require(status == 0 and losses_of(run) == course.losses, f"{run} went on wrongly: {said}")
        require("passed over" in said and newest.name in said, f"{run} did not say it: {said}")
        require(f"resuming after step {STEPS - 1}" in said, f"{run} began elsewhere: {said}")
    print(f"{cases} damaged checkpoints: said, and resumed from the one before", flush=True)


def main() -> None:
    """Run all parts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--kills", type=int, default=0, help="runs to kill [200; quick: 2]")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    kills = options.kills or (2 if options.quick else 200)
    torch.set_num_threads(1)
    with (
        mock.patch.object(virtual, "default_backend", OrderedBackend),
        tempfile.TemporaryDirectory(prefix="cleave-crash-") as folder,
    ):
        root = Path(folder)
        kill_while_writing(root, options.quick, options.seed)
        course = undisturbed(root)
        damage_checkpoints(course, 1 if options.quick else 10, options.seed)
        kill_runs(course, kills, options.seed)
    print(json.dumps({"kills": kills, "seed": options.seed, "calls": course.calls}))


if __name__ == "__main__":
    main()
