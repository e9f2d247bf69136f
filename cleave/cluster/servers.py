"""Present the servers of a cluster to operators as one server.

Operators query the first server, which has the store and admits devices. A thread per other server
polls it every second: it sends the list of admitted devices, and takes reports and events. So a
silent server delays no other. Another thread evens out the numbers of devices.
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
"""Seconds between polls of the other servers."""

FRESH_S: Final = 5.0
"""Devices are only sent to a server polled within the last this many seconds."""

ASKED_S: Final = 5.0
"""Seconds for which a question about a device or stream outlasts questions without either."""


@dataclass(slots=True)
class _Other:
    """State of another server.

    Attributes:
        calls: calls to the server.
        start: identifies its current process; empty before the first poll.
        seen: state at the last poll; None before, and while it is lost.
        before: final overview and energy of each of its lost processes, by `start`.
        knows: version of the list that it has; -1 for none.
        taken: number of its reports that were taken.
        after_event: id of its last event known here.
        told_s: it knows the devices admitted before this time, on the first server's clock.
        is_new: whether its process was replaced since devices were last spread.
        wake: set to poll it immediately.
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
        """Return its overviews and energy, including those of lost processes."""
        now = [(self.seen.answer, self.seen.energy)] if self.seen is not None else []
        return [*self.before.values(), *now]

    def gone(self) -> None:
        """Keep the final overview and energy of the last process seen."""
        if self.seen is not None:
            left = ended(self.seen.answer), self.seen.energy.when_ended()
            self.before[self.start] = left


class Servers:
    """All servers of a cluster, with the same interface for operators as one `Server`.

    Public methods are called in the first server's loop, unless stated otherwise.

    Args:
        first: server that operators know and devices join.
        members: authenticator of the first server.
        overview: overview of the first server.
        doors: endpoints of all servers, the first server's first.

    Attributes:
        dashboard_url: dashboard URL of the first server.
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

    # --- operators' requests, see `Server` ---

    def describe_devices(self) -> list[dict[str, object]]:
        """Return the connected devices as plain values."""
        elsewhere = [device for seen in self._seen() for device in seen.devices]
        return self._first.describe_devices() + elsewhere

    def join_url(self, credential: str) -> str:
        """Return the join URL for devices with this credential or join code."""
        return self._first.join_url(credential)

    def join_page_url(self, credential: str) -> str:
        """Return the join page's URL for browsers, with this credential or join code."""
        return self._first.join_page_url(credential)

    def end_identity(self, identity: int, code: ErrorCode, reason: str) -> None:
        """End a device's sessions on all servers, tell it why, and stop admitting it."""
        self._members.expel(identity, code, reason)
        self._first.end_identity(identity, code, reason)
        self._wake()

    def mark_own(self, identity: int, own: bool) -> None:
        """Set whether a device belongs to the operator."""
        self._members.mark_own(identity, own=own)
        self._first.mark_own(identity, own)
        self._wake()

    def credit(self) -> None:
        """Store the work of the first server's devices; other servers report it at each poll."""
        self._first.credit()

    def progress(self) -> StepProgress | None:
        """Return the current step's progress over all servers, if any."""
        parts = [self._first.progress(), *(seen.progress for seen in self._seen())]
        known = [part for part in parts if part is not None]
        if not known:
            return None
        of = sum(part.of for part in known) if all(part.of for part in known) else 0
        return StepProgress(sum(part.done for part in known), of)

    def combine(self, answer: Answer, question: Question) -> Answer:
        """Merge the other servers' overviews into the first one's; see `Overview.combine`."""
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
        """Return the energy of the other servers' devices; see `Overview.energy_elsewhere`."""
        return [used for other in self._others for _, used in other.known()]

    def _seen(self) -> list[Seen]:
        return [other.seen for other in self._others if other.seen is not None]

    # --- a thread per other server ---

    def close(self) -> None:
        """End the other servers' sessions and take their last reports. Not in the loop."""
        self._spreading.close()
        self._closed.set()
        self._wake()
        for thread in self._threads:
            thread.join()

    def _wake(self) -> None:
        """Poll the other servers immediately."""
        for other in self._others:
            other.wake.set()

    def _watch(self, number: int, other: _Other) -> None:
        """Poll another server every second; end its sessions on close."""
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
        """Return a time for each server, see `Knowing`."""

        def known() -> list[float | None]:
            found: list[float | None] = [math.inf]
            for other in self._others:
                fresh = self._first.live.now() - other.told_s < FRESH_S
                found.append(other.told_s if fresh and not other.is_new else None)
                other.is_new = False
            return found

        return self._first.live.in_loop(known)

    def _look_at(self, other: _Other) -> None:
        """Send another server the device list, and take its state."""
        live = self._first.live
        seen: Seen | None = None
        question, roll, now_s = live.in_loop(partial(self._due, other))
        try:
            seen = self._asked(other, question, roll)
            if seen.start != other.start and roll is None:  # a new process knows no devices
                roll = live.in_loop(self._members.roll)
                seen = self._asked(other, question, roll)
        except DoorLostError as lost:
            _logger.debug("%s", lost)
        except Exception as error:  # noqa: BLE001 - the next look may succeed
            _logger.error("another server: %s: %s", type(error).__name__, error)
        live.in_loop(partial(self._take, other, seen, roll, now_s))

    def _due(self, other: _Other) -> tuple[Question, Roll | None, float]:
        """Return another server's question, its device list if outdated there, and the time."""
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
        """Process another server's state, requested at `told_s`; None if it is lost."""
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
        if new:  # its event numbers restart
            other.after_event = 0
            return
        events = seen.answer["events"]
        for _, _, kind, device, text in events["rows"]:
            self._overview.happened_elsewhere(EventKind(kind), device, text)
        other.after_event = events["last"]


def _of(timeline: Answer | None, device: int) -> Answer | None:
    """Return a timeline if it belongs to this device, else None."""
    return timeline if timeline is not None and timeline["device"] == device else None
