"""Start several servers: the first server in this process, the others in a Ray cluster."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from cleave.cluster.endpoint import Endpoint
from cleave.cluster.endpoint_calls import ServedEndpoint
from cleave.cluster.endpoints import Endpoints, open_endpoints
from cleave.cluster.membership import Members
from cleave.cluster.own_endpoint import EndpointSetup
from cleave.cluster.room import check_cores, cores_of_nodes
from cleave.cluster.servers import Servers
from cleave.energy.grid import Grid
from cleave.errors import UsageError
from cleave.server.api.overview import Overview
from cleave.server.fleet_server import Server, ServerConfig
from cleave.server.runtime import Numbering
from cleave.transport.addresses import is_loopback

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Serving:
    """The running servers of a cluster.

    Attributes:
        servers: the operator interface to all servers.
        endpoints: the endpoints of all servers. A training worker calls `endpoints` to get its
            fleet.
    """

    servers: Servers
    endpoints: Endpoints


@contextmanager
def serving_together(
    ray: Any,
    first: Server,
    config: ServerConfig,
    members: Members,
    overview: Overview,
    count: int,
    grid: Grid | None = None,
) -> Iterator[Serving]:
    """Start all servers except the first, and stop them when the `with` block ends.

    Args:
        ray: the `ray` module, connected to a cluster.
        first: server of this process, which already listens.
        config: settings of all servers. Servers on the same machine use successive ports.
        members: authenticator of the first server.
        overview: overview of the first server.
        count: total number of servers, including the first server.
        grid: electricity grid that powers the devices; None if unknown.

    Raises:
        UsageError: when a server cannot listen on its port, when the cluster has fewer cores than
            servers, or when `config.host` is loopback and the servers are on several machines.
    """
    check_cores(cores_of_nodes(ray), count)
    with ExitStack() as opened:
        own = ray.get_runtime_context().get_node_id()
        here = ServedEndpoint(Endpoint(first), ray.util.get_node_ip_address())
        opened.callback(here.close)
        alike = replace(
            config,
            operator_credential="",
            viewer_credential="",
            auth=None,
            events=None,
            operator=None,
            pages=None,
            # Nodes need not store their certificates: the first server sends devices the
            # fingerprint.
            security=replace(config.security, folder=None),
        )
        setups = [
            EndpointSetup(replace(alike, numbering=Numbering(number, count)), members.server, grid)
            for number in range(2, count + 1)
        ]
        others = open_endpoints(ray, setups, _logger.info, [own])
        nodes = [own, *others.nodes]
        endpoints = Endpoints([here.calls(), *others.calls], nodes, others.on_one_machine)
        if not endpoints.on_one_machine and is_loopback(config.host):
            others.close()
            raise UsageError(
                f"--host is {config.host}, where devices reach none but their own machine, and the "
                f"cluster has several; give --host 0.0.0.0"
            )
        servers = Servers(first, members, overview, endpoints)
        opened.callback(servers.close)  # this also closes the other servers' endpoints
        yield Serving(servers, endpoints)
