"""Where servers say what they do, and read whether they are to stop: an actor of Ray."""

from __future__ import annotations

from cleave.cluster.ray_errors import Ending
from cleave.energy.run_energy import RunEnergy, in_succession
from cleave.training.loop.records import NoteRecord, Record


class Board:
    """Keeps records until they are taken, and counts how often servers start in vain."""

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
        """Note that a server starts; return how often it did without a further step."""
        self._starts[rank] = self._starts.get(rank, 0) + 1
        return self._starts[rank]

    def say(self, record: Record, step: int) -> None:
        """Keep a record; `step` is one that is done, or 0."""
        self._records.append(record)
        if step > self._step:  # one that was done before shows no progress
            self._step = step
            self._starts = dict.fromkeys(self._starts, 1)

    def take(self) -> list[Record]:
        """Return the records since the last call."""
        taken, self._records = self._records, []
        return taken

    def stop(self) -> None:
        """Ask the servers to stop after their step."""
        self._stopping = True

    def stopping(self) -> bool:
        """Say whether the servers are to stop."""
        return self._stopping

    def end(self) -> None:
        """Note that a server has done its part."""
        self._ended += 1

    def ended(self) -> int:
        """Return how many servers have done their part."""
        return self._ended

    def used(self, rank: int, energy: RunEnergy) -> None:
        """Note what a server's devices used, from when it started until it ended."""
        before = [self._used[rank]] if rank in self._used else []
        self._used[rank] = in_succession([*before, energy])

    def energy(self) -> list[RunEnergy]:
        """Return what the devices of each server used, also of one that started several times."""
        return list(self._used.values())

    def lost(self, rank: int, why: Ending) -> None:
        """Note that a server was lost, and why; all start again."""
        self._loss = f"server {rank + 1}: {why}"
        note = f"server {rank + 1} was lost, and all start again: {why.why}"
        self._records.append(NoteRecord(note))

    def give_up(self, starts: int) -> None:
        """Note that training cannot go on: servers start so often without a further step."""
        last = f"; the last time, {self._loss}" if self._loss else ""
        self.fail(f"the servers were lost {starts} times without a step{last}")

    def fail(self, text: str) -> None:
        """Note why training cannot go on; what was noted first counts."""
        self._failure = self._failure or text

    def failure(self) -> str:
        """Return why training cannot go on; empty if it can."""
        return self._failure
