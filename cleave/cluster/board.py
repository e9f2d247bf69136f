"""A Ray actor that collects the servers' training records and tells the servers when to stop."""

from __future__ import annotations

from cleave.cluster.ray_errors import Ending
from cleave.energy.run_energy import RunEnergy, in_succession
from cleave.training.loop.records import NoteRecord, Record


class Board:
    """Collects training records, and counts how often servers started without finishing a step.

    The process that started the training polls the board. The servers call it during training.
    """

    def __init__(self) -> None:
        self._records: list[Record] = []
        self._starts: dict[int, int] = {}
        self._step = 0
        self._stopping = False
        self._failure = ""
        self._loss = ""
        self._ended = 0
        self._used: dict[int, RunEnergy] = {}

    def started(self, rank: int) -> int:
        """Count a start of a server. Return the number of its starts since the last new step."""
        self._starts[rank] = self._starts.get(rank, 0) + 1
        return self._starts[rank]

    def say(self, record: Record, step: int) -> None:
        """Add a training record.

        Args:
            record: record to add.
            step: number of the finished step that the record reports; 0 for other records.
        """
        self._records.append(record)
        if step > self._step:  # a step repeated after a restart is no progress
            self._step = step
            self._starts = dict.fromkeys(self._starts, 1)

    def take(self) -> list[Record]:
        """Return the records that were added since the last call."""
        taken, self._records = self._records, []
        return taken

    def stop(self) -> None:
        """Ask the servers to stop the training after the current step."""
        self._stopping = True

    def stopping(self) -> bool:
        """Return whether `stop` was called, so the servers must stop after their current step."""
        return self._stopping

    def end(self) -> None:
        """Record that a server has finished training, with or without success."""
        self._ended += 1

    def ended(self) -> int:
        """Return how many servers have finished training."""
        return self._ended

    def used(self, rank: int, energy: RunEnergy) -> None:
        """Add the energy that a server's devices used between one start and end of the server."""
        before = [self._used[rank]] if rank in self._used else []
        self._used[rank] = in_succession([*before, energy])

    def energy(self) -> list[RunEnergy]:
        """Return the energy used by each server's devices, summed over all starts of the server."""
        return list(self._used.values())

    def lost(self, rank: int, why: Ending) -> None:
        """Record why a server was lost, and add a note that all servers restart."""
        self._loss = f"server {rank + 1}: {why}"
        note = f"server {rank + 1} was lost, and all start again: {why.why}"
        self._records.append(NoteRecord(note))

    def give_up(self, starts: int) -> None:
        """Mark the training as failed, because servers started too often without a new step.

        Args:
            starts: number of starts without a new step.
        """
        last = f"; the last time, {self._loss}" if self._loss else ""
        self.fail(f"the servers were lost {starts} times without a step{last}")

    def fail(self, text: str) -> None:
        """Mark the training as failed. If it is called several times, the first reason counts."""
        self._failure = self._failure or text

    def failure(self) -> str:
        """Return why the training failed; empty if it has not failed."""
        return self._failure
