"""A door that is a process of its own: an actor of Ray on the node of one server."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cleave.cluster.door import Door
from cleave.cluster.roster import Member, Report, Roster
from cleave.energy.grid import Grid
from cleave.energy.typical import load_typical
from cleave.fleet.counters import StepProgress
from cleave.protocol.messages import ErrorCode
from cleave.server.api.event_log import EventLog
from cleave.server.api.overview import Answer, Overview, Question, ServerFacts
from cleave.server.auth.access import Clocks
from cleave.server.fleet_server import ServerConfig, serve
from cleave.server.jobs.fleet_energy import EnergyMeter
from cleave.server.jobs.job_energy import JobLog, SessionWork, opened_log
from profiles.library import load_profiles


@dataclass(frozen=True, slots=True)
class DoorSetup:
    """Tells such a door what to do.

    Attributes:
        config: how it listens.
        first: the id of the first server, which tells it whom to let in; empty for a door that
            lets in whoever shows the credential of `config`.
        grid: the electricity grid that devices are on; None if it was not stated.
    """

    config: ServerConfig
    first: str = ""
    grid: Grid | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """What the first server is told when it looks at another.

    Attributes:
        start: tells this process from others that were in its place before.
        answer: the server's overview.
        devices: see `Server.describe_devices`.
        progress: of the step that is under way, if any.
        reports: what it has learnt of devices since the last look.
    """

    start: str
    answer: Answer
    devices: list[dict[str, object]]
    progress: StepProgress | None
    reports: list[Report]


class OwnDoor(Door):
    """Listens for devices, and does what a worker and the first server ask.

    Args:
        setup: how.
    """

    def __init__(self, setup: DoorSetup) -> None:
        profiles = load_profiles()
        self._energy = EnergyMeter(profiles.values(), load_typical(), setup.grid)
        self._overview = Overview(
            ServerFacts(), EventLog(time.time), profiles, self._energy, Clocks()
        )
        self._log: JobLog | None = None
        self._start = secrets.token_hex(8)
        config = replace(setup.config, events=self._overview.happened)
        if setup.first:
            self._roster = Roster(setup.first, config.credential)
            config = replace(config, auth=self._roster)
        super().__init__(serve(config))
        self._overview.live = self._server.live

    def look(self, question: Question) -> Seen:
        """Return how things are, and what was learnt since the last look."""

        def seen() -> Seen:
            server = self._server
            server.credit()
            return Seen(
                self._start,
                self._overview.answer(question),
                server.describe_devices(),
                server.progress(),
                self._roster.reports(),
            )

        return self._server.live.in_loop(seen)

    def know(self, members: Sequence[Member]) -> None:
        """Let these devices in from now on, or learn more of them."""
        self._server.live.in_loop(lambda: self._roster.know(members))

    def expel(self, identity: int, code: ErrorCode, reason: str) -> None:
        """Let a device in no more; end its sessions, and tell it why."""

        def expelled() -> None:
            self._roster.forget(identity)
            self._server.end_identity(identity, code, reason)

        self._server.live.in_loop(expelled)

    def mark_own(self, identity: int, own: bool) -> None:
        """Note that a device is the operator's own now, or is that no more."""
        self._server.live.in_loop(lambda: self._server.mark_own(identity, own))

    # --- the energy of a job ---

    def begin_log(self) -> None:
        """Begin to count what sessions do for a job."""
        self.end_log()
        self._log = opened_log(self._server.live, self._energy)

    def did(self) -> list[SessionWork]:
        """Return what sessions did for the job; nothing where this server began in between."""
        log, live = self._log, self._server.live
        if log is None:
            return []
        return live.in_loop(lambda: log.did(live.manager.sessions, live.now()))

    def end_log(self) -> None:
        """Stop counting."""
        if (log := self._log) is not None:
            self._log = None
            self._server.live.in_loop(lambda: self._energy.watchers.remove(log.ended))
