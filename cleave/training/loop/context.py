"""The fleet, clock and callbacks of a training run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cleave.fleet.fleet import Fleet
from cleave.training.loop.disk import Patience
from cleave.training.loop.records import DiskRecord, NoteRecord, Record
from cleave.training.servers.ranks import Alone, Ranks


@dataclass(frozen=True, slots=True)
class TrainContext:
    """The fleet, the other servers, the clock and the callbacks of a training run.

    Attributes:
        fleet: the fleet that computes; None to train with plain PyTorch on this machine.
        stop: returns True if the run should end early; called between steps and while the run waits
            for devices or disk space.
        clock: returns the wall time in seconds.
        sleep: sleeps for a number of seconds; called while the disk is full.
        ranks: the servers that train the model together. Rank 0 writes to the run folder.
    """

    fleet: Fleet | None
    report: Callable[[Record], None]
    stop: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    ranks: Ranks = field(default_factory=Alone)

    def note(self, text: str) -> None:
        """Report a message for the user as a `NoteRecord`."""
        self.report(NoteRecord(text))

    def patience(self, step: Callable[[], int]) -> Patience:
        """Return a `Patience` that reports a full disk.

        `step` returns the number of completed steps.
        """

        def tell(full: bool, text: str) -> None:
            self.report(DiskRecord(step(), "full" if full else "free", text))

        return Patience(tell, self.stop, self.sleep)
