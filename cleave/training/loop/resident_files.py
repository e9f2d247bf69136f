"""Files from which a killed server resumes at the very step, while devices keep trained state.

The folder `resident` of a run has three subfolders:

layers/     the layers' weights and optimizer state, as in the last snapshot that devices returned
rest/       all else that a checkpoint has, after the same step
log/        all steps since then; see `cleave.training.stages.step_log`

A thread writes the first two, because the tensors change only when the next update begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from cleave.errors import CleaveError
from cleave.training.loop.checkpoint import (
    DamagedCheckpointError,
    LoadedCheckpoint,
    load_checkpoint,
    remove_checkpoints,
    save_checkpoint,
)
from cleave.training.loop.finite import first_not_finite
from cleave.training.loop.optimizer import Optimizer
from cleave.training.loop.run_folder import LAYERS, LOG, REST, held_steps, newest_first, step_of
from cleave.training.stages.resident import ResidentState
from cleave.training.stages.step_log import LogFolder
from cleave.training.stages.stored_steps import StoredStep

_ALL: Final = 2**31  # value of `keep` with which no checkpoint is removed


@dataclass(frozen=True, slots=True)
class Logged:
    """The steps that an earlier process has logged after the checkpoint from which a run resumes.

    Attributes:
        steps: the steps.
        recorded: number of the last step until which all steps have records in the run folder.
        judged: whether it has the record of an evaluation.
    """

    steps: Sequence[StoredStep] = ()
    recorded: int = 0
    judged: bool = False


class ResidentFiles:
    """Writes the files of one run.

    Args:
        run: the run folder, of which incomplete checkpoints after `step` are removed.
        step: the step from which the run begins or resumes; None if no checkpoint has it.
        note: called with messages for the user.

    Attributes:
        log: the files of the log.
    """

    def __init__(self, run: Path, step: int | None, note: Callable[[str], None]) -> None:
        self._run = run
        self.log = LogFolder(run / LOG)
        self._base = -1 if step is None else step  # the step of the newest complete checkpoint
        self._rest = -1  # the step of the newest checkpoint in `rest`
        self._note = note
        self._thread = ThreadPoolExecutor(1, "cleave-snapshot")
        self._writing: list[Future[None]] = []
        # A later checkpoint may have a damaged half. This process could write that half again, and
        # the two halves would not belong together.
        for name in (LAYERS, REST):
            remove_checkpoints(run / name, lambda each: each > self._base)

    def follow(
        self,
        step: int,
        state: ResidentState,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
    ) -> None:
        """Begin to write what a restarted server needs, if there is anything new.

        Call `wait` before any of the tensors change.

        Args:
            step: number of completed steps.
            state: the state on devices.
            tensors: the tensors of a checkpoint. Those of layers on devices are of the snapshot.
            meta: metadata of a checkpoint after `step` steps.
        """
        layers: dict[str, Tensor] = {}
        rest: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            on_devices = Optimizer.parameter_of(name) in state.names
            (layers if on_devices else rest)[name] = tensor
        snapshot = state.position
        if step in (snapshot, state.under_way) and step > max(self._base, self._rest):
            self._write(REST, step, rest, meta, {snapshot, step})
            self._rest = step
        if snapshot > self._base and snapshot <= self._rest:
            self._write(LAYERS, snapshot, layers, {}, set())
            self._base = snapshot

    def _write(
        self,
        name: str,
        step: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        wanted: Set[int],
    ) -> None:
        """Let the thread write a checkpoint. `wanted`: steps whose files in `rest` are needed."""

        def write() -> None:
            if name == LAYERS and step not in held_steps(self._run / REST):
                return  # the disk was full
            if bad := first_not_finite(tensors):
                raise CleaveError(f"{bad!r} is not finite")
            folder = self._run / name
            save_checkpoint(folder, step=step, tensors=tensors, meta=meta, keep=_ALL)
            if name == LAYERS:
                self._remove(step)
            else:  # devices never returned the snapshots for which other files were written
                needed = {*held_steps(self._run / LAYERS), *wanted}
                remove_checkpoints(folder, lambda each: each not in needed)

        self._writing.append(self._thread.submit(write))

    def wait(self) -> None:
        """Wait until all files are written."""
        writing, self._writing = self._writing, []
        for each in writing:
            try:
                each.result()
            except CleaveError as error:
                self._note(f"a restarted server would repeat older steps: {error}")

    def covered(self, step: int) -> None:
        """Remove all files, because a checkpoint of `step`, the last one, is complete."""
        self.wait()
        self._base = step
        self._remove(step + 1)

    def begin_again(self) -> None:
        """Remove all files, because they follow from a lie that is undone."""
        self.wait()
        self._base = self._rest = -1
        self._remove(_ALL)

    def logged(
        self, step: int, rates: Iterable[float], records: Iterable[Mapping[str, Any]]
    ) -> Logged:
        """Return the steps after `step` that an earlier process has logged. Remove all others.

        It may have ended before it recorded the last ones, or the power failed.

        Args:
            rates: the learning rates of the steps that follow. The log ends at another rate.
            records: the records of the run.
        """
        pairs = zip(self.log.after(step), rates, strict=False)
        found = [each for each, rate in takewhile(lambda pair: pair[0].rate == pair[1], pairs)]
        last = step + len(found)
        self.log.keep(range(step + 1, last + 1))
        if not found:
            return Logged()
        events = {(record.get("event"), record.get("step")) for record in records}
        recorded = step
        while recorded < last and ("step", recorded + 1) in events:
            recorded += 1
        return Logged(found, recorded, ("eval", recorded) in events)

    def close(self) -> None:
        """Wait for the thread, and end it."""
        self.wait()
        self._thread.shutdown()

    def _remove(self, first: int) -> None:
        """Remove all that is older than a complete checkpoint of step `first`."""
        for name in (LAYERS, REST):
            remove_checkpoints(self._run / name, lambda step: step < first)
        self.log.keep(range(first + 1, _ALL))


def load_resident(
    run: Path, passed_over: Callable[[DamagedCheckpointError], None]
) -> LoadedCheckpoint | None:
    """Load the newest complete checkpoint that `ResidentFiles` has written; None without one.

    Args:
        passed_over: called with the error of each damaged checkpoint.

    Raises:
        CleaveError: if a checkpoint that may be intact cannot be read.
    """
    # Of two folders for a step, the last one here, which is the newer one, is used.
    rests = {step_of(path): path for path in reversed(newest_first(run / REST))}
    for path in newest_first(run / LAYERS):
        if (step := step_of(path)) not in rests:
            continue
        try:
            layers, rest = load_checkpoint(path), load_checkpoint(rests[step])
        except DamagedCheckpointError as error:
            passed_over(error)
            continue
        return LoadedCheckpoint(step, {**layers.tensors, **rest.tensors}, rest.meta)
    return None
