"""A Ray actor to which servers send their records, and from which they learn when to stop."""

from __future__ import annotations

from cleave.cluster.ray_errors import Ending
from cleave.energy.run_energy import RunEnergy, in_succession
from cleave.training.loop.records import NoteRecord, Record


class Board:
    """Collects records, and counts starts of servers without progress."""

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
        """Count a server's start; return the number of its starts without a new step."""
        self._starts[rank] = self._starts.get(rank, 0) + 1
        return self._starts[rank]

    def say(self, record: Record, step: int) -> None:
        """Add a record. `step` is the finished step that it reports, or 0."""
        self._records.append(record)
        if step > self._step:  # a repeated step is no progress
            self._step = step
            self._starts = dict.fromkeys(self._starts, 1)

    def take(self) -> list[Record]:
        """Return the records since the last call."""
        taken, self._records = self._records, []
        return taken

    def stop(self) -> None:
        """Ask the servers to stop after their current step."""
        self._stopping = True

    def stopping(self) -> bool:
        """Return whether the servers must stop."""
        return self._stopping

    def end(self) -> None:
        """Record that a server has finished."""
        self._ended += 1

    def ended(self) -> int:
        """Return how many servers have finished."""
        return self._ended

    def used(self, rank: int, energy: RunEnergy) -> None:
        """Add the energy that a server's devices used from its start to its end."""
        before = [self._used[rank]] if rank in self._used else []
        self._used[rank] = in_succession([*before, energy])

    def energy(self) -> list[RunEnergy]:
        """Return the energy used by each server's devices, over all of its starts."""
        return list(self._used.values())

    def lost(self, rank: int, why: Ending) -> None:
        """Record that a server was lost, and why; all servers restart."""
        self._loss = f"server {rank + 1}: {why}"
        note = f"server {rank + 1} was lost, and all start again: {why.why}"
        self._records.append(NoteRecord(note))

    def give_up(self, starts: int) -> None:
        """Fail the training: servers started too often without a new step."""
        last = f"; the last time, {self._loss}" if self._loss else ""
        self.fail(f"the servers were lost {starts} times without a step{last}")

    def fail(self, text: str) -> None:
        """Record why training failed; only the first reason counts."""
        self._failure = self._failure or text

    def failure(self) -> str:
        """Return why training failed; empty if it has not."""
        return self._failure
