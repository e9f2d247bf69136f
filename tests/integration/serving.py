"""What `cleave serve` does, in this process, which has imported PyTorch already."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cleave.scheduler.sessions.session import EventKind
from cleave.server.app import App, open_app
from cleave.server.fleet_server import Server, serve
from cleave.server.jobs.jobs import Jobs
from cleave.training.loop.start import JobRunner


@contextmanager
def served(runs: Path, data: str = "none", port: int = 0) -> Iterator[tuple[Server, App, Jobs]]:
    """A server that runs jobs and keeps what it knows in the folder `data`."""
    with open_app(data, "", "") as app:
        server = serve(
            port=port,
            operator_credential=app.operator_token,
            viewer_credential=app.viewer_token,
            operator=app.operators.serve,
            auth=app.access,
        )
        with server:

            def happened(kind: EventKind, text: str) -> None:
                app.overview.events.add(kind, 0, text)

            jobs = Jobs(server.fleet, JobRunner(runs), app.history, happened)
            app.operators.jobs = app.overview.jobs = jobs
            app.operators.server = server
            app.open(server)
            yield server, app, jobs
            jobs.close(10.0)
