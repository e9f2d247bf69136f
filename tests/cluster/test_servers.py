"""Servers that train together are one to operators and to devices.

The other server is a process of its own, which Ray would start: here the test does.
"""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from cleave.cluster.endpoint import Endpoint, EndpointSetup
from cleave.cluster.endpoint_calls import EndpointCalls, EndpointLostError, ServedEndpoint
from cleave.cluster.endpoints import EndpointLogs, EndpointRuntime, Endpoints
from cleave.cluster.membership import Members
from cleave.cluster.servers import Servers
from cleave.fleet.fleet import Fleet
from cleave.server.api.overview import Question
from cleave.server.app import App, open_app
from cleave.server.fleet_server import Server, ServerConfig, serve
from cleave.server.runtime import Numbering
from tests.integration.emulation import DEVICE, check, emulation, submit
from tests.integration.processes import printing, until, wait_for_event


class Other:
    """Calls the endpoint of another process, which may be killed and start again."""

    def __init__(self, setup: EndpointSetup) -> None:
        self._setup = pickle.dumps(setup).hex()
        self._process = ExitStack()
        self._calls: EndpointCalls | None = None
        self._in_reach = True
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.cluster.endpoint_process", self._setup]
        _, lines = self._process.enter_context(printing(command))
        self._calls = pickle.loads(bytes.fromhex(wait_for_event(lines, "listening")["calls"]))

    def kill(self) -> None:
        self._process.close()

    def cut(self) -> None:
        """Be out of reach of the first server, and alive."""
        self._in_reach = False

    def reach(self) -> None:
        self._in_reach = True

    def call(self, name: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        assert self._calls is not None
        if not self._in_reach:
            raise EndpointLostError("it is out of reach")
        return self._calls.call(name, *arguments, timeout_s=timeout_s)

    def tell(self, name: str, *arguments: Any) -> None:
        self.call(name, *arguments)

    def fleet(self) -> Fleet:
        """Its fleet, as a worker has it."""
        return Fleet(EndpointRuntime(self.call, self.tell))


class Cluster:
    """Two servers, and what operators know of them."""

    def __init__(self, app: App, first: Server, other: Other, servers: Servers) -> None:
        self.app, self.first, self.other, self.servers = app, first, other, servers

    def ask(self, action: str, **arguments: Any) -> dict[str, Any]:
        """What an operator is answered."""
        answered = self.first.live.in_loop(lambda: self.app.device_admin.answer(action, arguments))
        return dict(answered)

    def overview(self) -> dict[str, Any]:
        return self.first.live.in_loop(lambda: self.app.overview.answer(Question(stream=True)))

    def counts(self) -> list[int | None]:
        """Devices of each server."""
        found: list[int | None] = self.overview()["server"]["servers"]
        return found

    def joined(self) -> int:
        """How often devices joined any server."""
        return int(self.overview()["totals"]["joined"])

    def url(self, uses: int, *, own: bool = False) -> str:
        return self.first.join_url(self.app.access.pair(uses=uses, own=own).text)


class Frozen:
    """An endpoint that is silent until it is lost."""

    def __init__(self) -> None:
        self.lost = threading.Event()

    def call(self, name: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        self.lost.wait(timeout_s)
        raise EndpointLostError("it is frozen")

    def tell(self, name: str, *arguments: Any) -> None:
        self.call(name, *arguments)


@contextmanager
def clustered(folder: Path, *between: EndpointCalls) -> Iterator[Cluster]:
    """Servers, with other endpoints in the order between the first and the last."""
    with open_app(str(folder), "", "") as app:
        members = Members(app.access)
        config = ServerConfig(
            viewer_credential=app.viewer_token, auth=members, numbering=Numbering(1, 2)
        )
        setup = EndpointSetup(
            ServerConfig(credential="", numbering=Numbering(2, 2)), members.server
        )
        with serve(config, events=app.overview.happened) as first:
            here, other = ServedEndpoint(Endpoint(first), "127.0.0.1"), Other(setup)
            calls = [here.calls(), *between, other]
            endpoints = Endpoints(calls, [str(number) for number in range(len(calls))], True)
            servers = Servers(first, members, app.overview, endpoints)
            app.overview.combine = servers.combine
            app.overview.energy_elsewhere = servers.energy
            app.open(first, servers)
            try:
                yield Cluster(app, first, other, servers)
            finally:
                servers.close()
                other.kill()
                here.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with clustered(tmp_path) as made:
        yield made


@pytest.mark.slow
def test_devices_are_shown_once_and_thrown_out_wherever_they_are(cluster: Cluster) -> None:
    with emulation(cluster.url(4, own=True), [DEVICE] * 4) as running:
        until(lambda: cluster.counts() == [2, 2])
        seen = cluster.overview()
        assert seen["devices"]["total"] == 4
        numbers = [row[0] for row in seen["devices"]["rows"]]
        assert len(set(numbers)) == 4
        assert {number % 2 for number in numbers} == {0, 1}  # of both servers
        listed = cluster.ask("devices")["devices"]
        assert len(listed) == 4
        assert all(device["own"] for device in listed)
        until(lambda: {d["state"] for d in cluster.ask("devices")["devices"]} == {"ready"})

        def events() -> list[tuple[int, int]]:
            """Of all servers in one log: the ids of joins, and by which server."""
            rows = cluster.overview()["events"]["rows"]
            return [(id, device % 2) for id, _, kind, device, _ in rows if kind == "join"]

        until(lambda: {server for _, server in events()} == {0, 1})
        ids = [id for id, _ in events()]
        assert ids == sorted(set(ids))
        assert running.error is None

        check(submit(cluster.other.fleet()))  # its work is stored
        for device in cluster.ask("devices")["devices"]:
            cluster.ask("revoke", device=device["id"], reason="sold")
        running.wait()
        until(lambda: cluster.counts() == [0, 0])
        listed = cluster.ask("devices")["devices"]
        assert {device["state"] for device in listed} == {"revoked"}
        assert sum(device["blocks"] for device in listed) > 0
        assert all("sold" in note for note in running.fleet.notes if "revoked" in note)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_server_that_starts_again_gets_devices_again(cluster: Cluster) -> None:
    with emulation(cluster.url(2), [DEVICE] * 2) as running:
        until(lambda: cluster.counts() == [1, 1])
        until(lambda: cluster.joined() == 3)
        cluster.other.kill()
        until(lambda: cluster.counts() == [2, None])  # its device is back where it joined
        until(lambda: cluster.joined() == 4)  # those that joined the lost one count further on
        cluster.other.start()
        until(lambda: cluster.counts() == [1, 1])
        until(lambda: cluster.joined() == 5)
        assert running.error is None


@pytest.mark.nightly
@pytest.mark.slow
def test_the_energy_of_a_job_counts_what_all_devices_did(cluster: Cluster) -> None:
    meter = cluster.app.meter(cluster.first, [EndpointLogs([cluster.other])])
    with emulation(cluster.url(2), [DEVICE] * 2):
        until(lambda: cluster.counts() == [1, 1])
        for fleet in (cluster.first.fleet, cluster.other.fleet()):
            check(submit(fleet))
        record = meter.record()
        assert sum(usage["devices"] for usage in record["spells"]) == 2
        assert record["devices_here"] == 2
    meter.close()


@pytest.mark.nightly
@pytest.mark.slow
def test_what_a_server_was_to_do_while_it_was_out_of_reach_is_done_later(cluster: Cluster) -> None:
    with emulation(cluster.url(2), [DEVICE] * 2) as running:
        until(lambda: cluster.counts() == [1, 1])
        cluster.other.cut()
        until(lambda: cluster.counts() == [1, None])
        for device in cluster.ask("devices")["devices"]:
            cluster.ask("revoke", device=device["id"])
        until(lambda: cluster.counts()[0] == 0)
        until(lambda: running.fleet.counters().connected == 1)
        cluster.other.reach()
        running.wait()
        until(lambda: cluster.counts() == [0, 0])


@pytest.mark.nightly
@pytest.mark.slow
def test_a_server_that_does_not_answer_delays_nobody_else(tmp_path: Path) -> None:
    frozen = Frozen()
    with clustered(tmp_path, frozen) as cluster, emulation(cluster.url(2), [DEVICE] * 2) as running:
        until(lambda: cluster.counts() == [1, None, 1])
        for device in cluster.ask("devices")["devices"]:
            cluster.ask("revoke", device=device["id"])
        running.wait()
        until(lambda: cluster.counts() == [0, None, 0])
        assert not frozen.lost.is_set()
        frozen.lost.set()
