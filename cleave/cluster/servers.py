"""All servers of a cluster, presented to operators as one server.

The first server owns the store and admits devices. It polls every other server once per second. A
separate thread polls each server, so that a silent server does not delay the others. A poll sends
the list of admitted devices and returns the polled server's state, reports and events. Another
thread balances the number of devices per server.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from cleave.cluster.endpoint import Endpoint, EndpointSetup, Seen
from cleave.cluster.endpoint_calls import EndpointCalls, EndpointLostError, ServedEndpoint
from cleave.cluster.endpoints import ANSWERS_S, Endpoints, open_endpoints
from cleave.cluster.membership import Members, Roll
from cleave.cluster.room import check_cores, cores_of_nodes
from cleave.cluster.spreading import Spreading
from cleave.energy.grid import Grid
from cleave.errors import UsageError
from cleave.protocol.messages import ErrorCode
from cleave.scheduler.counters import StepProgress
from cleave.scheduler.sessions.session import EventKind
from cleave.server.api.overview import (
    MAX_DEVICES_BYTES,
    MAX_STREAMS,
    Answer,
    Overview,
    Question,
    row_bytes,
)
from cleave.server.fleet_server import Server, ServerConfig
from cleave.server.jobs.energy import EnergySums
from cleave.server.jobs.jobs import JobState
from cleave.server.runtime import Numbering
from cleave.transport.addresses import is_loopback


def merged(own: Answer, others: Sequence[Answer]) -> Answer:
    """Return one overview of several servers, merged from `own` and `others`.

    The job, events, server facts, latest GEMMs and energy are taken from `own`. The energy in `own`
    must already cover all servers. Session numbers must be unique across the servers.
    """
    every = [own, *others]
    return {
        **own,
        "card": _sum([each["card"] for each in every]),
        "totals": _sum([each["totals"] for each in every]),
        "traffic": _sum_deep([each["traffic"] for each in every]),
        "saved": _sum_deep([each["saved"] for each in every]),
        "rates": {**_sum([each["rates"] for each in every]), "window_s": own["rates"]["window_s"]},
        "devices": _devices([each["devices"] for each in every]),
        "plan": _first(each["plan"] for each in every),
        "stages": _first(each["stages"] for each in every),
        "timeline": _first(each["timeline"] for each in every),
        "stream": _stream([each["stream"] for each in every if each["stream"] is not None]),
    }


def ended(answer: Answer) -> Answer:
    """Return a lost server's last overview, reduced to the totals of its past work.

    Rates and bandwidths become 0, and all sessions count as ended. Devices, plans and timelines are
    removed.
    """
    return {
        **answer,
        "totals": {**answer["totals"], "left": answer["totals"]["joined"]},
        "card": dict.fromkeys(answer["card"], 0.0),
        "rates": dict.fromkeys(answer["rates"], 0.0),
        "devices": {**answer["devices"], "rows": [], "total": 0, "by": []},
        **dict.fromkeys(("plan", "stages", "timeline", "stream")),
    }


def _first(values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _sum(maps: Sequence[Answer]) -> Answer:
    """Add up dictionaries key by key. A sum is None if any of its terms is None."""
    return {
        name: None if any(each[name] is None for each in maps) else sum(e[name] for e in maps)
        for name in maps[0]
    }


def _sum_deep(maps: Sequence[Answer]) -> Answer:
    return {name: _sum([each[name] for each in maps]) for name in maps[0]}


def _devices(tables: Sequence[Answer]) -> Answer:
    rows, room = [], MAX_DEVICES_BYTES
    for row in (row for table in tables for row in table["rows"]):
        room -= row_bytes(row)
        if room < 0:
            break
        rows.append(row)
    by: Counter[tuple[str | None, str]] = Counter()
    for table in tables:
        for kind, state, count in table["by"]:
            by[kind, state] += count
    return {
        "columns": tables[0]["columns"],
        "rows": rows,
        "total": sum(table["total"] for table in tables),
        "by": [[kind, state, count] for (kind, state), count in by.items()],
    }


def _stream(streams: Sequence[Answer]) -> Answer | None:
    if not streams:
        return None
    devices = [device for stream in streams for device in stream["devices"]]
    hidden = sum(stream["hidden"] for stream in streams) + max(0, len(devices) - MAX_STREAMS)
    window_s = min(stream["window_s"] for stream in streams)
    return {"window_s": window_s, "devices": devices[:MAX_STREAMS], "hidden": hidden}


_log = logging.getLogger(__name__)

LOOK_S: Final = 1.0  # time between polls of another server

FRESH_S: Final = 5.0
"""Maximum age of a server's last successful poll at which devices may be moved to the server."""

ASKED_S: Final = 5.0
"""Time for which the servers report a timeline or stream after an operator last requested it.

Requests for neither, for example from another operator, do not end the reports earlier.
"""


@dataclass(slots=True)
class _Other:
    """The data that the first server keeps about one other server."""

    calls: EndpointCalls
    start: str = ""  # the `Seen.start` of the current process; empty before the first poll
    seen: Seen | None = None  # at the last poll; None while the server is lost
    before: dict[str, tuple[Answer, EnergySums]] = field(default_factory=dict)  # by lost `start`
    knows: int = -1  # version of the last list sent; -1 if no list was sent
    taken: int = 0  # number of reports taken from its current process
    after_event: int = 0  # id of the last event received from it
    told_s: float = -math.inf  # the last list sent contains all devices admitted before this time
    is_new: bool = False  # whether its process was replaced since the last balancing
    wake: threading.Event = field(default_factory=threading.Event)  # set to poll now

    def known(self) -> list[tuple[Answer, EnergySums]]:
        """Return an (overview, energy) pair for each current or lost process of the server."""
        now = [(self.seen.answer, self.seen.energy)] if self.seen is not None else []
        return [*self.before.values(), *now]

    def gone(self) -> None:
        """Store the last overview and energy of the server's lost process."""
        if self.seen is not None:
            left = ended(self.seen.answer), self.seen.energy.when_ended()
            self.before[self.start] = left


class Servers:
    """All servers of a cluster, with the operator interface of a single `Server`.

    Call the public methods in the first server's event loop, unless stated otherwise. `members`,
    `overview` and the first of `endpoints` belong to the first server.
    """

    def __init__(
        self, first: Server, members: Members, overview: Overview, endpoints: Endpoints
    ) -> None:
        self.dashboard_url = first.dashboard_url
        self.join_url, self.join_page_url = first.join_url, first.join_page_url
        self.credit = first.credit  # the polls record the contributions of other servers' devices
        self._first, self._members, self._overview = first, members, overview
        self._others = [_Other(calls) for calls in endpoints.calls[1:]]
        self._question, self._asked_s = Question(), 0.0
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._watch, args=each, name="cleave-server", daemon=True)
            for each in enumerate(self._others, start=2)
        ]
        for thread in self._threads:
            thread.start()
        self._spreading = Spreading(endpoints.calls, self._knowing)

    # --- operators' requests, see `Server` ---

    def describe_devices(self) -> list[dict[str, object]]:
        elsewhere = [device for seen in self._seen() for device in seen.devices]
        return self._first.describe_devices() + elsewhere

    def end_identity(self, identity: int, code: ErrorCode, reason: str) -> None:
        """End a device's sessions at all servers, send it the reason, and stop admitting it."""
        self._members.expel(identity, code, reason)
        self._first.end_identity(identity, code, reason)
        self._wake()

    def mark_own(self, identity: int, own: bool) -> None:
        """Set at all servers whether the operator owns a device."""
        self._members.mark_own(identity, own=own)
        self._first.mark_own(identity, own)
        self._wake()

    def progress(self) -> StepProgress | None:
        """Return the progress of the current step over all servers; None if no step is running."""
        parts = [self._first.progress(), *(seen.progress for seen in self._seen())]
        known = [part for part in parts if part is not None]
        if not known:
            return None
        of = sum(part.of for part in known) if all(part.of for part in known) else 0
        return StepProgress(sum(part.done for part in known), of)

    def combine(self, answer: Answer, question: Question) -> Answer:
        """Return one overview of all servers. `answer` is the first server's own overview."""
        now_s = self._first.live.now()
        if question.device or question.stream or now_s - self._asked_s > ASKED_S:
            self._question, self._asked_s = question, now_s
        others = [
            {
                **each,
                "timeline": _of(each["timeline"], question.device),
                "stream": each["stream"] if question.stream else None,
            }
            for other in self._others
            for each, _ in other.known()
        ]
        whole = merged(answer, others)
        if whole["job"] is not None and whole["job"]["state"] == JobState.RUNNING.value:
            progress = self.progress()
            whole["job"]["tasks"] = [progress.done, progress.of] if progress else None
        counts = [answer["devices"]["total"]]
        for other in self._others:
            counts.append(other.seen.answer["devices"]["total"] if other.seen else None)
        whole["server"] = {**answer["server"], "servers": counts}
        return whole

    def energy(self) -> list[EnergySums]:
        """Return the energy totals of each current or lost process of the other servers."""
        return [used for other in self._others for _, used in other.known()]

    def _seen(self) -> list[Seen]:
        return [other.seen for other in self._others if other.seen is not None]

    # --- a thread per other server ---

    def close(self) -> None:
        """Close the other servers' endpoints, then process the other servers' last reports.

        Do not call this in the first server's event loop, because the polls need the loop.
        """
        self._spreading.close()
        self._closed.set()
        self._wake()
        for thread in self._threads:
            thread.join()

    def _wake(self) -> None:
        for other in self._others:
            other.wake.set()

    def _watch(self, number: int, other: _Other) -> None:
        """Poll another server every second until `close` is called. Then close its endpoint."""
        while not self._closed.is_set():
            was_there = other.seen is not None
            self._look_at(other)
            if other.seen is None and was_there:
                _log.warning("server %d does not answer; Ray restarts it", number)
            other.wake.wait(LOOK_S)
            other.wake.clear()
        try:
            other.calls.call("close", timeout_s=ANSWERS_S)
        except EndpointLostError as lost:
            _log.debug("%s", lost)
        else:
            self._look_at(other)

    def _knowing(self) -> list[float | None]:
        """Return, for each server, the time up to which its list of admitted devices is complete.

        The time is on the first server's clock. It is None if the server is lost, was restarted or
        has an old list.
        """

        def known() -> list[float | None]:
            found: list[float | None] = [math.inf]
            for other in self._others:
                fresh = self._first.live.now() - other.told_s < FRESH_S
                found.append(other.told_s if fresh and not other.is_new else None)
                other.is_new = False
            return found

        return self._first.live.in_loop(known)

    def _look_at(self, other: _Other) -> None:
        """Poll another server once. Send it a changed device list, and process its response."""
        live = self._first.live
        seen: Seen | None = None
        question, roll, now_s = live.in_loop(partial(self._due, other))
        try:
            seen = self._asked(other, question, roll)
            if seen.start != other.start and roll is None:  # a new process has no device list
                roll = live.in_loop(self._members.roll)
                seen = self._asked(other, question, roll)
        except EndpointLostError as lost:
            _log.debug("%s", lost)
        except Exception as error:  # noqa: BLE001 - the next poll may succeed
            _log.error("another server: %s: %s", type(error).__name__, error)
        live.in_loop(partial(self._take, other, seen, roll, now_s))

    def _due(self, other: _Other) -> tuple[Question, Roll | None, float]:
        """Return a poll's question, the device list (None if unchanged) and the current time."""
        asked, roll = self._question, self._members.roll()
        question = Question(other.after_event, device=asked.device, stream=asked.stream)
        due = roll if roll.version != other.knows else None
        return question, due, self._first.live.now()

    @staticmethod
    def _asked(other: _Other, question: Question, roll: Roll | None) -> Seen:
        told = question, other.start, other.taken, roll
        seen: Seen = other.calls.call("look", *told, timeout_s=ANSWERS_S)
        return seen

    def _take(self, other: _Other, seen: Seen | None, roll: Roll | None, told_s: float) -> None:
        """Process a poll that began at `told_s`. `seen` is None if the server did not answer."""
        if seen is None:
            other.gone()
            other.seen, other.knows, other.told_s = None, -1, -math.inf
            return
        new = seen.start != other.start
        if new:
            other.gone()
        other.before.pop(seen.start, None)
        for report in seen.reports:
            report(self._members)
        other.seen, other.start, other.taken = seen, seen.start, seen.number
        other.knows = roll.version if roll is not None else other.knows
        other.told_s = told_s
        other.is_new = other.is_new or (new and bool(other.before))
        if new:  # a new process restarts its event numbers
            other.after_event = 0
            return
        events = seen.answer["events"]
        for _, _, kind, device, text in events["rows"]:
            self._overview.events.add(EventKind(kind), device, text)
        other.after_event = events["last"]


def _of(timeline: Answer | None, device: int) -> Answer | None:
    return timeline if timeline is not None and timeline["device"] == device else None


@contextmanager
def serving_together(
    ray: Any,
    first: Server,
    config: ServerConfig,
    members: Members,
    overview: Overview,
    count: int,
    grid: Grid | None = None,
) -> Iterator[tuple[Servers, Endpoints]]:
    """Start all servers except the first, and stop them when the `with` block ends.

    Yields the operator interface and the endpoints of all servers.

    Args:
        ray: the `ray` module, connected to a cluster.
        first: server of this process, which already listens.
        config: settings of all servers. Servers on the same machine use successive ports.
        members, overview: authenticator and overview builder of the first server.
        grid: electricity grid that powers the devices; None if unknown.

    Raises:
        UsageError: if a server cannot listen on its port, if the cluster has fewer than `count`
            cores, or if `config.host` is loopback and the servers are on several machines.
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
        others = open_endpoints(ray, setups, _log.info, [own])
        nodes = [own, *others.nodes]
        endpoints = Endpoints([here.calls(), *others.calls], nodes, others.on_one_machine)
        if not endpoints.on_one_machine and is_loopback(config.host):
            others.close()
            raise UsageError(
                f"--host is {config.host}, which devices on other machines cannot reach, but the "
                "cluster has several machines; use --host 0.0.0.0"
            )
        servers = Servers(first, members, overview, endpoints)
        opened.callback(servers.close)  # this also closes the other servers' endpoints
        yield servers, endpoints
