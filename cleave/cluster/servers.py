"""The servers of a cluster as operators see them: one.

The first one is asked, has the store, and admits devices. A thread looks at the others every
second: it tells them whom they may let in, takes what they report of devices and what happened
there, and sends devices from servers with many to those with few.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from cleave.cluster.balance import Balance
from cleave.cluster.door_calls import DoorCalls, DoorLostError
from cleave.cluster.doors import Doors
from cleave.cluster.own_door import Seen
from cleave.cluster.roster import Members
from cleave.fleet.counters import StepProgress
from cleave.protocol.messages import ErrorCode
from cleave.scheduler.fleet_events import EventKind
from cleave.server.api.merged import merged
from cleave.server.api.overview import Answer, Overview, Question
from cleave.server.fleet_server import Server
from cleave.server.jobs.job_energy import SessionWork
from cleave.server.jobs.jobs import JobState

_logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""Seconds between two looks at the other servers."""

Order = Callable[[DoorCalls], object]
"""Something that another server is to do."""


@dataclass(slots=True)
class _Other:
    """Holds what is known of another server.

    Attributes:
        calls: calls it.
        start: tells its present process from earlier ones; empty before the first look.
        seen: at the last look; None before, and while it is lost.
        orders: what it has not been told yet.
        after_event: the id of its last event that is known here.
    """

    calls: DoorCalls
    start: str = ""
    seen: Seen | None = None
    orders: list[Order] = field(default_factory=list)
    after_event: int = 0


class Servers:
    """All servers of a cluster; what `Server` is to operators, for several.

    Its public methods are called in the loop of the first server, unless said otherwise.

    Args:
        first: the server that operators know and devices join.
        members: its authenticator.
        overview: its overview.
        doors: those of all servers, that of the first one first.

    Attributes:
        dashboard_url: of the first server.
        on_one_machine: whether all servers are on the machine of the first.
    """

    def __init__(self, first: Server, members: Members, overview: Overview, doors: Doors) -> None:
        self.dashboard_url = first.dashboard_url
        self._first, self._members, self._overview = first, members, overview
        self._doors = doors
        self.on_one_machine = doors.on_one_machine
        self._others = [_Other(calls) for calls in doors.calls[1:]]
        self._balance = Balance()
        self._question = Question()
        self._closed = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cleave-servers", daemon=True)
        self._thread.start()

    # --- what operators ask, see `Server` ---

    def describe_devices(self) -> list[dict[str, object]]:
        """Return the connected devices as plain values."""
        elsewhere = [device for seen in self._seen() for device in seen.devices]
        return self._first.describe_devices() + elsewhere

    def join_url(self, credential: str) -> str:
        """Return the URL with which a device joins, with this credential or join code."""
        return self._first.join_url(credential)

    def join_page_url(self, credential: str) -> str:
        """Return the join page's URL for browsers, with this credential or join code."""
        return self._first.join_page_url(credential)

    def end_identity(self, identity: int, code: ErrorCode, reason: str) -> None:
        """End the sessions of a device on all servers, and tell it why; let it in no more."""
        self._members.forget(identity)
        self._first.end_identity(identity, code, reason)
        self._order(lambda door: door.call("expel", identity, code, reason))

    def mark_own(self, identity: int, own: bool) -> None:
        """Note that a device is the operator's own now, or is that no more."""
        self._members.mark_own(identity, own=own)
        self._first.mark_own(identity, own)
        self._order(lambda door: door.call("mark_own", identity, own))

    def credit(self) -> None:
        """Store what devices of the first server did so far; others report it at each look."""
        self._first.credit()

    def progress(self) -> StepProgress | None:
        """Return how far the step is that is under way, if any."""
        parts = [self._first.progress(), *(seen.progress for seen in self._seen())]
        known = [part for part in parts if part is not None]
        if not known:
            return None
        of = sum(part.of for part in known) if all(part.of for part in known) else 0
        return StepProgress(sum(part.done for part in known), of)

    def combine(self, answer: Answer, question: Question) -> Answer:
        """Add what the other servers do to the first one's overview; see `Overview.combine`."""
        self._question = question
        whole = merged(answer, [seen.answer for seen in self._seen()])
        if whole["job"] is not None and whole["job"]["state"] == JobState.RUNNING.value:
            progress = self.progress()
            whole["job"]["tasks"] = [progress.done, progress.of] if progress else None
        counts = [answer["devices"]["total"]]
        for other in self._others:
            counts.append(other.seen.answer["devices"]["total"] if other.seen else None)
        whole["server"] = {**answer["server"], "servers": counts}
        return whole

    def _seen(self) -> list[Seen]:
        return [other.seen for other in self._others if other.seen is not None]

    def _order(self, order: Order) -> None:
        """Have all other servers do something, soon."""
        for other in self._others:
            other.orders.append(order)
        self._wake.set()

    # --- the energy of a job, in its thread; see `Elsewhere` ---

    def begin(self) -> None:
        """Begin to count what devices of the other servers do."""
        self._each("begin_log")

    def did(self) -> list[SessionWork]:
        """Return what they did since."""
        return [work for some in self._each("did") for work in some]

    def end(self) -> None:
        """Stop counting."""
        self._each("end_log")

    def _each(self, name: str) -> list[Any]:
        """Call a method of all others; one that is lost has done nothing."""
        answers = []
        for other in self._others:
            with suppress(DoorLostError):
                answers.append(other.calls.call(name))
        return answers

    # --- the thread ---

    def close(self) -> None:
        """Look no more at the others. Not called in the loop."""
        self._closed.set()
        self._wake.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.is_set():
            try:
                self._round()
            except Exception as error:  # noqa: BLE001 - the next look may succeed
                _logger.error("the other servers: %s: %s", type(error).__name__, error)
            self._wake.wait(LOOK_S)
            self._wake.clear()

    def _round(self) -> None:
        """Look at each of the others, and spread the devices."""
        live = self._first.live
        known_before_s = live.in_loop(self._tell_news)
        for number, other in enumerate(self._others):
            seen = self._looked_at(other)
            if seen is None and other.seen is not None:
                _logger.warning("server %d does not answer; Ray starts it again", number + 2)
            if seen is None or seen.start != other.start:
                self._balance.forget(number + 1)
            live.in_loop(partial(self._take, other, seen))
        self._doors.spread(self._balance, known_before_s)

    def _tell_news(self) -> float:
        """Have the others know who came since the last round; return the time."""
        if news := self._members.news():
            self._order(lambda door: door.call("know", news))
        return self._first.live.now()

    def _due(self, other: _Other) -> tuple[list[Order], Question]:
        """Return what another server is to be told, and what it is asked."""
        orders, other.orders = other.orders, []
        asked = self._question
        return orders, Question(other.after_event, device=asked.device, stream=asked.stream)

    def _looked_at(self, other: _Other) -> Seen | None:
        """Tell another server what it is to know and do; return how it is, or None if it is lost.

        Orders are carried out one after the other: a device that was let in again must not be
        thrown out by an order that is older.
        """
        live, door = self._first.live, other.calls
        orders, question = live.in_loop(partial(self._due, other))
        try:
            for order in orders:
                order(door)
            seen: Seen = door.call("look", question)
            if seen.start != other.start:  # it is new, and knows nobody
                door.call("know", live.in_loop(self._members.all))
        except DoorLostError:
            live.in_loop(partial(self._put_back, other, orders))
            return None
        return seen

    @staticmethod
    def _put_back(other: _Other, orders: Sequence[Order]) -> None:
        """Have orders carried out again, in their order: it may be the same process that answers
        next."""
        other.orders[:0] = orders

    def _take(self, other: _Other, seen: Seen | None) -> None:
        """Take what another server said."""
        if seen is None:
            other.seen = None
            return
        for report in seen.reports:
            report(self._members)
        other.seen = seen
        if seen.start != other.start:  # its events are numbered anew
            other.start, other.after_event = seen.start, 0
            return
        events = seen.answer["events"]
        for _, _, kind, device, text in events["rows"]:
            self._overview.happened_elsewhere(EventKind(kind), device, text)
        other.after_event = events["last"]
