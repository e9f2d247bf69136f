"""Devices' work for a job at endpoints of other processes, for the run's energy record."""

from __future__ import annotations

from collections.abc import Sequence

from cleave.cluster.door_calls import DoorCalls, ask_all
from cleave.cluster.doors import ANSWERS_S
from cleave.server.jobs.job_energy import SessionWork


class DoorLogs:
    """Counts work at several endpoints; a lost one counts as no work. See `Elsewhere`.

    Args:
        doors: calls to the endpoints, each an `OwnDoor`.
        on_one_machine: whether all endpoints are on this machine.
    """

    def __init__(self, doors: Sequence[DoorCalls], on_one_machine: bool) -> None:
        self._doors = doors
        self.on_one_machine = on_one_machine

    def begin(self) -> None:
        """Start counting."""
        ask_all(self._doors, "begin_log", timeout_s=ANSWERS_S)

    def did(self) -> list[SessionWork]:
        """Return the work done since `begin`."""
        answers = ask_all(self._doors, "did", timeout_s=ANSWERS_S)
        return [work for answer in answers if answer is not None for work in answer]

    def end(self) -> None:
        """Stop counting."""
        ask_all(self._doors, "end_log", timeout_s=ANSWERS_S)
