"""An endpoint that has its own process. Ray runs it as an actor on a node of the cluster."""

from __future__ import annotations

import math
import secrets
import time
from dataclasses import dataclass, replace

from cleave.cluster.endpoint import Endpoint
from cleave.cluster.membership import Membership, Report, Roll
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
class EndpointSetup:
    """Settings of an endpoint in its own process."""

    config: ServerConfig
    first: str = ""  # id of the first server, whose list admits devices; empty to admit all
    grid: Grid | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """The state of one server, which the first server polls."""

    start: str  # random id of the process, new when Ray restarts the server
    answer: Answer
    energy: EnergySums
    devices: list[dict[str, object]]  # of `Server.describe_devices`
    progress: StepProgress | None
    reports: list[Report]  # about devices, not yet received by the first server
    number: int  # of all reports since the process started


class OwnEndpoint(Endpoint):
    """An endpoint in its own process, which a training worker and the first server call.

    If the process replaces a lost process (`again`), it uses any free port when its own is in use.
    """

    def __init__(self, setup: EndpointSetup, *, again: bool = False) -> None:
        profiles = load_profiles()
        self._energy = EnergyMeter(profiles.values(), load_typical(), setup.grid)
        self._overview = Overview(
            _facts(setup.config.card), EventLog(time.time), profiles, self._energy, Clocks()
        )
        self._start = secrets.token_hex(8)
        config = replace(setup.config, events=self._overview.happened)
        if setup.first:
            self._membership = Membership(setup.first, config.credential)
            config = replace(config, auth=self._membership)
        try:
            server = serve(config)
        except UsageError:
            if not again:
                raise
            server = serve(replace(config, port=0))
        super().__init__(server)
        self._overview.live = self._server.live
        self._log = ServerLog(self._server.live, self._energy)
        if again:  # a job may be running of which this new process does not know
            self._log.begin()

    def look(self, question: Question, start: str, taken: int, roll: Roll | None) -> Seen:
        """Return the server's state and its pending reports about devices.

        The first server has `start` and `taken` from the last `Seen`. A `roll` is sent if it has
        changed.
        """

        def seen() -> Seen:
            server = self._server
            if roll is not None:
                self._follow(roll)
            server.credit()
            reports, number = self._membership.reports(taken if start == self._start else 0)
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
        self._membership.replace(roll)
        for identity, (code, reason) in roll.expelled.items():
            self._server.end_identity(identity, code, reason)
        for member in roll.members:
            if member.admission.identity is not None:
                self._server.mark_own(member.admission.identity, member.admission.own)

    # --- the energy of a job ---

    def begin_log(self) -> None:
        """Start to count each session's work for a job."""
        self._log.begin()

    def did(self) -> list[SessionWork]:
        """Return each session's work for the job since this process started to count."""
        return self._log.did()

    def end_log(self) -> None:
        """Stop counting the sessions' work for the job."""
        self._log.end()


def _facts(card: PsRates | None) -> ServerFacts:
    """Return the bandwidths of a network card, if known."""
    rates = (card.egress_bytes_per_s, card.ingress_bytes_per_s) if card is not None else ()
    known = [rate if math.isfinite(rate) else None for rate in rates] or [None, None]
    return ServerFacts(egress_bytes_per_s=known[0], ingress_bytes_per_s=known[1])
