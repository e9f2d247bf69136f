"""Files from which a killed server resumes at its last step, if devices keep trained state.

The folder `resident` of a run has three subfolders:

layers/     the layers' weights and optimizer state, from the last snapshot that devices returned
rest/       everything else in a checkpoint, from the same step
log/        all later steps; see `cleave.training.stages.step_log`

A thread writes the first two in the background. From a complete pair, it also makes a regular
checkpoint if one is due, so devices need not stop for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, TypeAlias

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

_ALL: Final = 2**31  # value of `keep` that keeps all checkpoints

# Writes a checkpoint, given its step, tensors and metadata.
SaveCheckpoint: TypeAlias = Callable[[int, Mapping[str, Tensor], Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Logged:
    """The steps that an earlier process logged after the checkpoint from which a run resumes.

    Attributes:
        steps: the logged steps, in order.
        recorded: number of the last step up to which the run folder has all records.
        judged: whether step `recorded` has the record of an evaluation.
    """

    steps: Sequence[StoredStep] = ()
    recorded: int = 0
    judged: bool = False


class ResidentFiles:
    """Writes the files in the folder `resident` of one run.

    Args:
        run: path of the run folder. Incomplete checkpoints after `step` are removed.
        step: step after which the run begins or resumes; None without a checkpoint.
        note: called with messages for the user.

    Attributes:
        log: the files of the log.
    """

    def __init__(self, run: Path, step: int | None, note: Callable[[str], None]) -> None:
        self._run = run
        self.log = LogFolder(run / LOG)
        self._base = -1 if step is None else step  # step of the newest complete checkpoint
        self._rest = -1  # step of the newest checkpoint in `rest`
        self._note = note
        self._thread = ThreadPoolExecutor(1, "cleave-snapshot")
        self._writing: list[tuple[str, Future[None]]] = []  # with the name of the folder
        # If one half of a later checkpoint is damaged, remove the other half, too. Otherwise, this
        # process could write the damaged half again, and the two halves would not match.
        for name in (LAYERS, REST):
            remove_checkpoints(run / name, lambda each: each > self._base)

    def follow(
        self,
        step: int,
        state: ResidentState,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        save: SaveCheckpoint | None = None,
    ) -> bool:
        """Start writing the files that a restarted server needs, unless they are up to date.

        Call `wait` before the tensors change.

        Args:
            step: number of completed steps.
            state: the state on devices.
            tensors: tensors of a checkpoint; for layers on devices, those of the snapshot.
            meta: metadata of a checkpoint after `step` steps.
            save: writes a regular checkpoint. If devices have returned a new snapshot, the thread
                calls this function with the checkpoint of the snapshot's step.

        Returns:
            Whether the thread will call `save`.
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
        if not self._base < snapshot <= self._rest:
            return False
        self._write(LAYERS, snapshot, layers, {}, set())
        self._base = snapshot
        if save is not None:
            self._submit(LAYERS, partial(self._make_checkpoint, snapshot, layers, save))
        return save is not None

    def _make_checkpoint(
        self, step: int, layers: Mapping[str, Tensor], save: SaveCheckpoint
    ) -> None:
        """Call `save` with the layers and the rest of a complete pair, unless it is incomplete."""
        if step in held_steps(self._run / LAYERS):
            paths = newest_first(self._run / REST)
            rest = load_checkpoint(next(path for path in paths if step_of(path) == step))
            save(step, {**layers, **rest.tensors}, rest.meta)

    def _write(
        self,
        name: str,
        step: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        wanted: Set[int],
    ) -> None:
        """Write a checkpoint in the thread. Keep the files in `rest` of the steps in `wanted`."""

        def write() -> None:
            if name == LAYERS and step not in held_steps(self._run / REST):
                return  # `rest` was not written, for example because the disk was full
            if bad := first_not_finite(tensors):
                raise CleaveError(f"{bad!r} is not finite")
            folder = self._run / name
            save_checkpoint(folder, step=step, tensors=tensors, meta=meta, keep=_ALL)
            if name == LAYERS:
                self._remove(step)
            else:  # devices never returned the snapshots for which other files were written
                needed = {*held_steps(self._run / LAYERS), *wanted}
                remove_checkpoints(folder, lambda each: each not in needed)

        self._submit(name, write)

    def _submit(self, name: str, write: Callable[[], None]) -> None:
        self._writing.append((name, self._thread.submit(write)))

    def wait(self, *, layers: bool = True) -> None:
        """Wait until all files are written. Without `layers`, only wait for those in `rest`."""
        writing, self._writing = self._writing, []
        for name, each in writing:
            if name == LAYERS and not layers:
                self._writing.append((name, each))
                continue
            try:
                each.result()
            except CleaveError as error:
                self._note(f"a restarted server would repeat more steps: {error}")

    def covered(self, step: int) -> None:
        """Remove all files, because a regular checkpoint of `step`, the last step, is complete."""
        self.wait()
        self._base = step
        self._remove(step + 1)

    def begin_again(self) -> None:
        """Remove all files, because they depend on a wrong result that was undone."""
        self.wait()
        self._base = self._rest = -1
        self._remove(_ALL)

    def logged(
        self, step: int, rates: Iterable[float], records: Iterable[Mapping[str, Any]]
    ) -> Logged:
        """Return the steps after `step` that an earlier process logged. Remove all other steps.

        The earlier process may have ended before it recorded the last of these steps.

        Args:
            rates: learning rates of the steps after `step`. A logged step with another rate, and
                all later steps, are removed.
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
        """Wait until all files are written, and stop the thread."""
        self.wait()
        self._thread.shutdown()

    def _remove(self, first: int) -> None:
        """Remove all files that are older than a complete checkpoint of step `first`."""
        for name in (LAYERS, REST):
            remove_checkpoints(self._run / name, lambda step: step < first)
        self.log.keep(range(first + 1, _ALL))


def load_resident(
    run: Path, passed_over: Callable[[DamagedCheckpointError], None]
) -> LoadedCheckpoint | None:
    """Load the newest complete checkpoint that `ResidentFiles` has written, or return None.

    Args:
        passed_over: called with the error of each damaged checkpoint.

    Raises:
        CleaveError: if a checkpoint that may be intact cannot be read.
    """
    # If a step has two folders, the newer one, which comes last here, is used.
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
