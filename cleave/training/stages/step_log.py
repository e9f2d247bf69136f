"""The log of steps from which trained state on devices can be rebuilt.

The log holds the activations and gradients that passed through the server in each step, so it is
much larger than the memory of a small server. Each step has its own file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from cleave.files import mapped_copy, own_folder, write_atomically
from cleave.scheduler.stages.resident import KeptState
from cleave.scheduler.stages.work import LoggedStep, Resident, StepWork
from cleave.training.loop.run_folder import log_file
from cleave.training.stages.stored_steps import StoredStep

_NAME: Final = re.compile(r"step-(\d{6,})\.log")


@dataclass(frozen=True, slots=True)
class LogFolder:
    """The files of a log that a server continues after a restart.

    Attributes:
        path: the folder. It exists only if it contains files.
    """

    path: Path

    def numbers(self) -> list[int]:
        """Return the numbers of all steps that have a file, in ascending order."""
        found = [_NAME.fullmatch(each.name) for each in self.path.glob("step-*.log")]
        return sorted(int(name[1]) for name in found if name)

    def write(self, number: int, step: StoredStep) -> StoredStep:
        """Write the file of step `number`. Return the step with its arrays mapped from the file."""
        own_folder(self.path)
        # The file contains secret names that devices need to return. So only the owner may read it.
        write_atomically(self._of(number), step.pack(), 0o600, sync=False)
        return StoredStep.read(self._of(number)) or step

    def after(self, number: int) -> list[StoredStep]:
        """Return the steps between `number` and the first missing or damaged step."""
        found: list[StoredStep] = []
        while (step := StoredStep.read(self._of(number + len(found) + 1))) is not None:
            found.append(step)
        return found

    def kept(self) -> Sequence[KeptState]:
        """Return the trained state that devices kept after the last step."""
        last = StoredStep.read(self._of(numbers[-1])) if (numbers := self.numbers()) else None
        return last.kept if last is not None else ()

    def keep(self, numbers: range) -> None:
        """Remove the files of all steps that are not in `numbers`."""
        for number in self.numbers():
            if number not in numbers:
                self._of(number).unlink(missing_ok=True)

    def _of(self, number: int) -> Path:
        return log_file(self.path, number)


class StepLog:
    """The steps since a snapshot.

    Args:
        folder: folder of the files; None to keep all steps in memory. If it is a `Path`, the log
            uses unnamed temporary files; see `mapped_copy`.
        note: called with a message if a step stays in memory because it cannot be written.

    Attributes:
        steps: the steps, oldest first.
        nbytes: total size of the logged activations and gradients in bytes.
    """

    def __init__(self, folder: LogFolder | Path | None, note: Callable[[str], None]) -> None:
        self.steps: tuple[LoggedStep, ...] = ()
        self.nbytes = 0
        self._folder = folder
        self._note = note
        self._sizes: list[int] = []

    def add(self, number: int, work: StepWork, resident: Resident, step: StoredStep) -> StoredStep:
        """Add a step after all devices have run its updates.

        Args:
            number: number of the step in the run.
            work: the step's layers and their arguments.

        Returns:
            The step, with its arrays mapped from a file if the file could be written.
        """
        size = sum(a.nbytes for each in (*step.x, *step.dy) for a in each.values())
        try:
            step = self._written(number, step)
        except OSError as error:  # for example, because the disk is full
            self._note(f"the log of steps stays in memory, because it cannot be written: {error}")
        self._add(work, resident, step, size)
        return step

    def repeat(self, work: StepWork, resident: Resident, step: StoredStep) -> None:
        """Add a step that an earlier process ran and wrote to a file."""
        self._add(work, resident, step, 0)

    def _add(self, work: StepWork, resident: Resident, step: StoredStep, size: int) -> None:
        # Keep only what devices need to repeat passes. `x` also provides the dtype of activations.
        if work.embedding is None:  # otherwise, `x` has no values
            work = replace(work, x=[step.x[0][batch] for batch in range(work.batches)])
        work = replace(work, resident=resident, slices=(), slice_works=())
        self.steps = (*self.steps, LoggedStep(work, step.x, step.dy, step.scalars))
        self._sizes.append(size)
        self.nbytes += size

    def forget(self, count: int) -> None:
        """Remove the `count` oldest steps, because a newer snapshot contains them."""
        self.steps = self.steps[count:]
        self.nbytes -= sum(self._sizes[:count])
        del self._sizes[:count]

    def _written(self, number: int, step: StoredStep) -> StoredStep:
        if isinstance(self._folder, LogFolder):
            return self._folder.write(number, step)
        if self._folder is None:
            return step
        return StoredStep.unpacked(mapped_copy(self._folder, step.pack())) or step
