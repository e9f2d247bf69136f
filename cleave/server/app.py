"""The parts of a server other than its fleet: data folder, store, access control and web pages."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cleave.energy.grid import Grid
from cleave.energy.typical import load_typical
from cleave.machine.sensors import PowerMeter, Sensors
from cleave.server.access import CREDENTIAL_BYTES, Access, Clocks
from cleave.server.api.device_admin import DeviceAdmin, Sessions
from cleave.server.api.event_log import EventLog
from cleave.server.api.operator import OperatorSessions
from cleave.server.api.overview import Overview, ServerFacts
from cleave.server.fleet_server import Server
from cleave.server.http import metrics
from cleave.server.http.metrics import Metrics
from cleave.server.http.pages import PROJECT_PATH, Pages, Project
from cleave.server.jobs.energy import EnergyMeter, JobMeter, OwnPower, ServerLog, WorkLog
from cleave.server.store.data_folder import DataFolder, default_folder
from cleave.server.store.job_history import JobHistory
from cleave.server.store.store import Store
from cleave.transport.http import HttpAnswer, HttpHandler, HttpRequest
from profiles.library import load_profiles

KEEP_NOTHING: Final = "none"
"""Value of `data` for a server that stores nothing on disk, and loses its data when it exits."""


@dataclass(frozen=True, slots=True)
class App:
    """The parts of a server other than its fleet. Create an `App` with `open_app`.

    `own_credential` admits the device on this computer; see `cleave.fleet.fleet_runtime.OwnDevice`.
    """

    access: Access
    own_credential: str
    history: JobHistory
    device_admin: DeviceAdmin
    operators: OperatorSessions
    overview: Overview
    pages: HttpHandler  # the web pages, the metrics and the project
    energy: EnergyMeter
    power: OwnPower
    operator_token: str
    viewer_token: str
    folder: DataFolder | None

    @property
    def url_file(self) -> Path | None:
        """Return the path of the file with the operator URL; None without a data folder."""
        return self.folder.url_path if self.folder is not None else None

    def meter(
        self, server: Server, elsewhere: Sequence[WorkLog] = (), *, alone: bool = True
    ) -> JobMeter:
        """Return a started energy meter for a job.

        Args:
            elsewhere: work logs of other servers.
            alone: whether all servers run on this machine.
        """
        return JobMeter([ServerLog(server.live, self.energy), *elsewhere], self.power, alone=alone)

    def open(self, server: Server, sessions: Sessions | None = None) -> None:
        """Connect the app to a server or to a cluster's `sessions`, and write the operator URL."""
        self.operators.server = self.device_admin.sessions = sessions or server
        self.overview.live = server.live
        if self.folder is not None:
            self.folder.write_url(server.operator_url)


@contextmanager
def open_app(
    data: str,
    operator_token: str,
    fleet_credential: str,
    facts: ServerFacts | None = None,
    grid: Grid | None = None,
    ps_watts: float | None = None,
) -> Iterator[App]:
    """Open an `App` and close it when the `with` block ends. Close the fleet before the app.

    Args:
        data: path of the data folder; empty for the default folder, `none` to store nothing on
            disk.
        operator_token: token that operators must send; empty for the token in the data folder, or
            a random token without a folder.
        fleet_credential: credential that admits any number of devices, which are not stored; empty
            to disable.
        facts: facts about the server that overviews show; None for empty facts.
        grid: electricity grid that powers the devices; None if unknown.
        ps_watts: power in watts that this machine draws at the wall socket; None to use its
            sensors, if any.

    Raises:
        CleaveError: if the data folder cannot be used.
    """
    with ExitStack() as stack:
        folder = None
        if data != KEEP_NOTHING:
            folder = stack.enter_context(DataFolder(Path(data) if data else default_folder()))
            stack.callback(folder.remove_url)
        store = Store(folder.store_path if folder is not None else None)
        stack.callback(store.close)
        kept, viewer = "", secrets.token_urlsafe(CREDENTIAL_BYTES)
        if folder is not None:
            kept, viewer = folder.token("operator"), folder.token("viewer")
        token = operator_token or kept or secrets.token_urlsafe(CREDENTIAL_BYTES)
        own = secrets.token_urlsafe(CREDENTIAL_BYTES)
        access = Access(store, token, viewer, fleet_credential=fleet_credential, own_credential=own)
        stack.callback(access.close)
        history = JobHistory(store, access.writer, time.time)
        device_admin = DeviceAdmin(access, history.all, time.time)
        profiles, facts = load_profiles(), facts or ServerFacts()
        energy = EnergyMeter(profiles.values(), load_typical(), grid)
        power = OwnPower(PowerMeter(Sensors()), ps_watts)
        overview = Overview(
            facts,
            EventLog(time.time),
            profiles,
            energy,
            Clocks(),
            power.used,
            lambda: access.writer.trouble,
        )
        operators = OperatorSessions(device_admin, overview)
        built = Pages.of_package(facts.title)
        made: dict[str, HttpHandler] = {
            metrics.PATH: Metrics(overview, access.admit_operator).answer,
            PROJECT_PATH: Project(
                facts,
                device_admin.flops_by_hour,
                overview.training,
                access.key_state,
                Clocks().steady,
            ).answer,
        }

        def pages(request: HttpRequest) -> HttpAnswer | None:
            return made.get(request.path, built.answer)(request)

        yield App(
            access,
            own,
            history,
            device_admin,
            operators,
            overview,
            pages,
            energy,
            power,
            token,
            viewer,
            folder,
        )
