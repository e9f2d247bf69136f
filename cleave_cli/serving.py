"""Starts the server of `cleave serve`, or several servers that train together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cleave_cli.cluster_options import ClusterOptions, ray_of

if TYPE_CHECKING:
    from cleave.energy.grid import Grid
    from cleave.server.app import App
    from cleave.server.fleet_server import Server, ServerConfig
    from cleave.training.loop.run_job import JobRunner


@contextmanager
def serving(
    app: App, config: ServerConfig, runs: Path, cluster: ClusterOptions, grid: Grid | None
) -> Iterator[tuple[Server, JobRunner]]:
    """Listen for devices until the `with` block ends; yield the server and its job runner.

    Args:
        app: all parts of the server except its fleet.
        config: addresses and limits of the server.
        runs: parent folder of run folders. All servers need access to this folder.
        cluster: number of servers, and their addresses.
        grid: electricity grid of the devices; None if unknown.

    Raises:
        CleaveError: when a server cannot listen, or the cluster cannot be reached.
    """
    from cleave.server.fleet_server import serve

    if cluster.servers == 1:
        from cleave.training.loop.run_job import JobRunner

        with serve(config) as server:
            app.open(server)
            yield server, JobRunner(runs, lambda: app.meter(server))
        return
    from cleave.cluster.endpoints import EndpointLogs
    from cleave.cluster.membership import Members
    from cleave.cluster.ray_train import SharedRunner
    from cleave.cluster.servers import serving_together
    from cleave.server.runtime import Numbering

    members = Members(app.access)
    config = replace(config, auth=members, numbering=Numbering(1, cluster.servers))
    with ray_of(cluster) as ray, ExitStack() as opened:
        server = opened.enter_context(serve(config))
        together = serving_together(
            ray, server, config, members, app.overview, cluster.servers, grid
        )
        serving = opened.enter_context(together)
        endpoints = serving.endpoints
        elsewhere = EndpointLogs(endpoints.calls[1:], endpoints.on_one_machine)
        app.overview.combine = serving.servers.combine
        app.overview.energy_elsewhere = serving.servers.energy
        app.open(server, serving.servers)
        yield (
            server,
            SharedRunner(
                runs,
                lambda: app.meter(server, elsewhere),
                ray=ray,
                servers=cluster.servers,
                fleet_of=endpoints,
            ),
        )
