"""The log of steps from which trained state on devices can be rebuilt.

It holds the activations and gradients that crossed the server in each step, so it is much larger
than the memory of a small server. They are in files without names, which the operating system
deletes when nothing refers to them, also if the process is killed.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cleave.files import make_folder, write_all
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.work import LoggedStep, Resident, StepWork

_Arrays = Sequence[Mapping[int, StageArray]]  # by stage and micro-batch


class StepLog:
    """The steps since a snapshot.

    Args:
        folder: where the files are; None to keep all steps in memory.
        note: called with a message if a step stays in memory, because it cannot be written.

    Attributes:
        steps: the steps, oldest first.
        nbytes: size of the logged activations and gradients.
    """

    def __init__(self, folder: Path | None, note: Callable[[str], None]) -> None:
        self.steps: tuple[LoggedStep, ...] = ()
        self.nbytes = 0
        self._folder = folder
        self._note = note
        self._sizes: list[int] = []

    def add(
        self,
        work: StepWork,
        resident: Resident,
        x: _Arrays,
        dy: _Arrays,
        scalars: Sequence[StageArray],
    ) -> None:
        """Add a step, whose updates all devices have done. See `LoggedStep`."""
        size = sum(a.nbytes for each in (*x, *dy) for a in each.values())
        if self._folder is not None:
            try:
                x, dy = _written(self._folder, x, dy)
            except OSError as error:  # for example, the disk is full
                self._note(
                    f"the log of steps stays in memory, because it cannot be written to "
                    f"{self._folder}: {error}"
                )
        # Only what a device needs to repeat its passes. The first inputs say the dtype.
        work = replace(
            work, x=list(x[0].values()), resident=resident, loss=None, slices=(), slice_works=()
        )
        self.steps = (*self.steps, LoggedStep(work, x, dy, scalars))
        self._sizes.append(size)
        self.nbytes += size

    def forget(self, count: int) -> None:
        """Remove the `count` oldest steps, which a newer snapshot contains."""
        self.steps = self.steps[count:]
        self.nbytes -= sum(self._sizes[:count])
        del self._sizes[:count]


def _written(folder: Path, x: _Arrays, dy: _Arrays) -> tuple[_Arrays, _Arrays]:
    """Write all arrays to a file, and return arrays whose payloads are in the file."""
    make_folder(folder)
    with tempfile.TemporaryFile(dir=folder) as file:
        for each in (*x, *dy):
            for array in each.values():
                write_all(file, _bytes(array))
        if not file.tell():
            return x, dy
        file.flush()
        held = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    at = 0

    def moved(array: StageArray) -> StageArray:
        nonlocal at
        first, at = at, at + array.nbytes
        return replace(array, payload=held[first:at])

    made = [{batch: moved(array) for batch, array in each.items()} for each in (*x, *dy)]
    return made[: len(x)], made[len(x) :]


def _bytes(array: StageArray) -> memoryview:
    payload = array.payload
    held = payload if isinstance(payload, bytes | bytearray | memoryview) else payload.pack()
    return memoryview(held).cast("B")
