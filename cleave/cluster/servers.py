"""The servers of a cluster as operators see them: one.

The first one is asked, has the store, and admits devices. A thread for each of the others looks at
it every second: it tells it whom it may let in, and takes what it reports of devices and what
happened there. So one that does not answer delays nobody else. Another thread sends devices from
servers with many to those with few.
"""

from __future__ import annotations

import logging
import math
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from cleave.cluster.door_calls import DoorCalls, DoorLostError
from cleave.cluster.doors import ANSWERS_S, Doors
from cleave.cluster.own_door import Seen
from cleave.cluster.roster import Members, Roll
from cleave.cluster.spreading import Spreading
from cleave.fleet.counters import StepProgress
from cleave.protocol.messages import ErrorCode
from cleave.scheduler.fleet_events import EventKind
from cleave.server.api.merged import ended, merged
from cleave.server.api.overview import Answer, Overview, Question
from cleave.server.fleet_server import Server
from cleave.server.jobs.fleet_energy import EnergySums
from cleave.server.jobs.jobs import JobState

_logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""Seconds between two looks at the other servers."""

FRESH_S: Final = 5.0
"""Devices are sent to another server so long after a look at it."""

ASKED_S: Final = 5.0
"""What one client wants to see of a device is asked so long, whatever others ask meanwhile."""


@dataclass(slots=True)
class _Other:
    """Holds what is known of another server.

    Attributes:
        calls: calls it.
        start: tells its present process from earlier ones; empty before the first look.
        seen: at the last look; None before, and while it is lost.
        before: what is left of its last overview, while it is lost, and of those of its earlier
            processes; and what their devices used.
        knows: the version of the roll that it has; -1 for none.
        taken: the number of its reports that were taken.
        after_event: the id of its last event that is known here.
        told_s: it knows whom the first server let in before that time, on the clock of the first.
        is_new: whether another process took its place since devices were spread last.
        wake: set to look at it at once.
    """

    calls: DoorCalls
    start: str = ""
    seen: Seen | None = None
    before: dict[str, tuple[Answer, EnergySums]] = field(default_factory=dict)
    knows: int = -1
    taken: int = 0
    after_event: int = 0
    told_s: float = -math.inf
    is_new: bool = False
    wake: threading.Event = field(default_factory=threading.Event)

    def known(self) -> list[tuple[Answer, EnergySums]]:
        """Return its overviews, those of lost processes among them, and what devices used."""
        now = [(self.seen.answer, self.seen.energy)] if self.seen is not None else []
        return [*self.before.values(), *now]

    def gone(self) -> None:
        """Keep what is left of the process that was seen last."""
        if self.seen is not None:
            left = ended(self.seen.answer), self.seen.energy.when_ended()
            self.before[self.start] = left


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
    """

    def __init__(self, first: Server, members: Members, overview: Overview, doors: Doors) -> None:
        self.dashboard_url = first.dashboard_url
        self._first, self._members, self._overview = first, members, overview
        self._others = [_Other(calls) for calls in doors.calls[1:]]
        self._question, self._asked_s = Question(), 0.0
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._watch, args=each, name="cleave-server", daemon=True)
            for each in enumerate(self._others, start=2)
        ]
        for thread in self._threads:
            thread.start()
        self._spreading = Spreading(doors.calls, self._knowing)

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
        self._members.expel(identity, code, reason)
        self._first.end_identity(identity, code, reason)
        self._wake()

    def mark_own(self, identity: int, own: bool) -> None:
        """Note that a device is the operator's own now, or is that no more."""
        self._members.mark_own(identity, own=own)
        self._first.mark_own(identity, own)
        self._wake()

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
        """Return what devices of the other servers used; see `Overview.energy_elsewhere`."""
        return [used for other in self._others for _, used in other.known()]

    def _seen(self) -> list[Seen]:
        return [other.seen for other in self._others if other.seen is not None]

    # --- a thread for each of the others ---

    def close(self) -> None:
        """End the sessions of the others, and take what they still report. Not in the loop."""
        self._spreading.close()
        self._closed.set()
        self._wake()
        for thread in self._threads:
            thread.join()

    def _wake(self) -> None:
        """Look at the others at once."""
        for other in self._others:
            other.wake.set()

    def _watch(self, number: int, other: _Other) -> None:
        """Look at another server every second, and end its sessions when all is closed."""
        while not self._closed.is_set():
            was_there = other.seen is not None
            self._look_at(other)
            if other.seen is None and was_there:
                _logger.warning("server %d does not answer; Ray starts it again", number)
            other.wake.wait(LOOK_S)
            other.wake.clear()
        try:
            other.calls.call("close", timeout_s=ANSWERS_S)
        except DoorLostError as lost:
            _logger.debug("%s", lost)
        else:
            self._look_at(other)

    def _knowing(self) -> list[float | None]:
        """Return whom each server knows, see `Knowing`."""

        def known() -> list[float | None]:
            found: list[float | None] = [math.inf]
            for other in self._others:
                fresh = self._first.live.now() - other.told_s < FRESH_S
                found.append(other.told_s if fresh and not other.is_new else None)
                other.is_new = False
            return found

        return self._first.live.in_loop(known)

    def _look_at(self, other: _Other) -> None:
        """Tell another server whom to let in, and take what it says."""
        live = self._first.live
        seen: Seen | None = None
        question, roll, now_s = live.in_loop(partial(self._due, other))
        try:
            seen = self._asked(other, question, roll)
            if seen.start != other.start and roll is None:  # it is new, and knows nobody
                roll = live.in_loop(self._members.roll)
                seen = self._asked(other, question, roll)
        except DoorLostError as lost:
            _logger.debug("%s", lost)
        except Exception as error:  # noqa: BLE001 - the next look may succeed
            _logger.error("another server: %s: %s", type(error).__name__, error)
        live.in_loop(partial(self._take, other, seen, roll, now_s))

    def _due(self, other: _Other) -> tuple[Question, Roll | None, float]:
        """Return what another server is asked, the roll if it does not have it, and the time."""
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
        """Take what another server said, which was asked at that time."""
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
        if new:  # its events are numbered anew
            other.after_event = 0
            return
        events = seen.answer["events"]
        for _, _, kind, device, text in events["rows"]:
            self._overview.happened_elsewhere(EventKind(kind), device, text)
        other.after_event = events["last"]


def _of(timeline: Answer | None, device: int) -> Answer | None:
    """Return a timeline if it is that of a device."""
    return timeline if timeline is not None and timeline["device"] == device else None
