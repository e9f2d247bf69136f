"""An endpoint in its own process: a Ray actor on the node of one server."""

from __future__ import annotations

import math
import secrets
import time
from dataclasses import dataclass, replace

from cleave.cluster.door import Door
from cleave.cluster.roster import Report, Roll, Roster
from cleave.energy.grid import Grid
from cleave.energy.typical import load_typical
from cleave.errors import UsageError
from cleave.fleet.counters import StepProgress
from cleave.planner.plan import PsRates
from cleave.server.api.event_log import EventLog
from cleave.server.api.overview import Answer, Overview, Question, ServerFacts
from cleave.server.auth.access import Clocks
from cleave.server.fleet_server import ServerConfig, serve
from cleave.server.jobs.fleet_energy import EnergyMeter, EnergySums
from cleave.server.jobs.job_energy import ServerLog, SessionWork
from profiles.library import load_profiles


@dataclass(frozen=True, slots=True)
class DoorSetup:
    """Configures an endpoint in its own process.

    Attributes:
        config: how it listens.
        first: id of the first server, which sends the list of admitted devices; empty to admit
            every device with the credential of `config`.
        grid: electricity grid that powers the devices; None if not stated.
    """

    config: ServerConfig
    first: str = ""
    grid: Grid | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """The state of a server, as reported to the first server.

    Attributes:
        start: identifies this process among earlier ones in its place.
        answer: overview of the server.
        energy: energy used by its devices.
        devices: see `Server.describe_devices`.
        progress: progress of the current step, if any.
        reports: news about devices that the first server does not know yet.
        number: number of the last report, counted over the process's lifetime.
    """

    start: str
    answer: Answer
    energy: EnergySums
    devices: list[dict[str, object]]
    progress: StepProgress | None
    reports: list[Report]
    number: int


class OwnDoor(Door):
    """Listens for devices, and serves a worker and the first server.

    Args:
        setup: configuration of the endpoint.
        again: whether it replaces a lost process. It then takes another port if its own is in use,
            since it may be on another machine. Devices are told the new port.

    Raises:
        UsageError: when it cannot listen.
    """

    def __init__(self, setup: DoorSetup, *, again: bool = False) -> None:
        profiles = load_profiles()
        self._energy = EnergyMeter(profiles.values(), load_typical(), setup.grid)
        self._overview = Overview(
            _facts(setup.config.card), EventLog(time.time), profiles, self._energy, Clocks()
        )
        self._start = secrets.token_hex(8)
        config = replace(setup.config, events=self._overview.happened)
        if setup.first:
            self._roster = Roster(setup.first, config.credential)
            config = replace(config, auth=self._roster)
        try:
            server = serve(config)
        except UsageError:
            if not again:
                raise
            server = serve(replace(config, port=0))
        super().__init__(server)
        self._overview.live = self._server.live
        self._log = ServerLog(self._server.live, self._energy)
        if again:  # a job may be running that this process does not know
            self._log.begin()

    def look(self, question: Question, start: str, taken: int, roll: Roll | None) -> Seen:
        """Return the server's state and its news about devices.

        Args:
            question: requested parts of the overview.
            start: `Seen.start` that the first server received last.
            taken: number of that process's reports already taken.
            roll: new list of admitted devices; None if unchanged.
        """

        def seen() -> Seen:
            server = self._server
            if roll is not None:
                self._follow(roll)
            server.credit()
            reports, number = self._roster.reports(taken if start == self._start else 0)
            return Seen(
                self._start,
                self._overview.answer(question),
                self._overview.energy(),
                server.describe_devices(),
                server.progress(),
                reports,
                number,
            )

        return self._server.live.in_loop(seen)

    def _follow(self, roll: Roll) -> None:
        self._roster.replace(roll)
        for identity, (code, reason) in roll.expelled.items():
            self._server.end_identity(identity, code, reason)
        for member in roll.members:
            if member.admission.identity is not None:
                self._server.mark_own(member.admission.identity, member.admission.own)

    # --- the energy of a job ---

    def begin_log(self) -> None:
        """Start counting the sessions' work for a job."""
        self._log.begin()

    def did(self) -> list[SessionWork]:
        """Return the sessions' work for the job, as far as this process knows."""
        return self._log.did()

    def end_log(self) -> None:
        """Stop counting."""
        self._log.end()


def _facts(card: PsRates | None) -> ServerFacts:
    """Return the facts about a server with this network card."""
    rates = (card.egress_bytes_per_s, card.ingress_bytes_per_s) if card is not None else ()
    known = [rate if math.isfinite(rate) else None for rate in rates] or [None, None]
    return ServerFacts(egress_bytes_per_s=known[0], ingress_bytes_per_s=known[1])
