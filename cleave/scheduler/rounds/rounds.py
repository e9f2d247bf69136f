"""Run rounds of local updates: track what each device has done, and end the round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cleave.protocol import messages
from cleave.scheduler.instructions import ForSteps, TellStep
from cleave.scheduler.rounds.shares import is_given_up, is_late
from cleave.scheduler.rounds.work import RoundPart, RoundResult, RoundWork
from cleave.scheduler.rounds.worker import LocalWorker
from cleave.scheduler.sessions.session import Session
from cleave.scheduler.stages.work import StageOrder
from cleave.scheduler.tiles.device_memory import Names


class LocalRounds:
    """Manages rounds of local updates, one at a time.

    If a device leaves or fails, its work in the round is lost. A device that rejoins gets the
    newest weights, and begins with new optimizer moments (see `LocalWorker.late`). Methods that
    handle an event return the instructions to carry out.

    Attributes:
        results: number of graph runs and fetches that devices have completed in all rounds.
    """

    def __init__(self, sessions: Mapping[int, Session], ids: Names) -> None:
        self._sessions = sessions
        self._ids = ids
        self._workers: dict[int, LocalWorker] = {}
        self._round: RoundWork | None = None
        self._began_s = 0.0
        self._stepped_s: dict[int, float] = {}  # seconds that a device took for its local steps
        self._parts: dict[int, RoundPart] = {}
        self._finished_s: dict[int, float] = {}  # seconds until a device's difference arrived
        self._lost: dict[str, str] = {}
        self.results = 0

    @property
    def devices(self) -> set[int]:
        """Return the devices that hold the model."""
        return set(self._workers)

    def owns(self, order: StageOrder) -> bool:
        """Return whether a task is part of a round."""
        return order.request.device in self._workers

    def busy(self, device: int) -> bool:
        """Return whether a device is working on the current round."""
        return device in self._working

    @property
    def _working(self) -> set[int]:
        """Return the devices whose differences for this round have not arrived."""
        if self._round is None:
            return set()
        return {d for d in self._round.steps if d in self._workers and d not in self._parts}

    def begin(self, work: RoundWork, now_s: float) -> list[ForSteps]:
        """Begin a round on the devices in `work.steps` that are still connected."""
        last = self._round
        undone = last.steps.keys() if last is not None and not last.collected else ()
        self._round, self._began_s = work, now_s
        self._stepped_s, self._parts, self._finished_s, self._lost = {}, {}, {}, {}
        out: list[ForSteps] = []
        for device, worker in list(self._workers.items()):
            if worker.model is not work.model:
                out += self._drop(device)
        for device in work.steps:
            session = self._sessions.get(device)
            if session is None or session.rates is None:
                self._lost[f"device {device}"] = "it left before the round"
                continue
            if work.collected:
                if (held := self._workers.get(device)) is not None:
                    has = held.collect(work.collected, undone=device in undone)
                    out += (
                        held.take() if has else self.leave(device, "it no longer has its moments")
                    )
                continue
            if device not in self._workers:
                self._workers[device] = LocalWorker(
                    device,
                    (session.name, session.identity),
                    self._ids,
                    work.model,
                    session.rates.memory_bytes,
                )
            worker = self._workers[device]
            worker.begin(work)
            worker.more(work)
            out += worker.take()
        return out + self._end_if_complete()

    def answered(
        self, order: StageOrder, answer: messages.Computed | messages.Result, now_s: float
    ) -> list[ForSteps]:
        """Handle a device's answer to a task of a round."""
        self.results += 1
        device, work = order.request.device, self._round
        worker = self._workers[device]
        payload = answer.payload if isinstance(answer, messages.Result) else None
        worker.arrived(order, answer.id, payload, answer.compute_s)
        if work is None or device not in self._working:
            return []
        worker.more(work)
        if worker.difference is not None:
            self._stepped_s.setdefault(device, now_s - self._began_s)
        if worker.is_finished:
            worker.finish()
            self._parts[device] = worker.part()
            self._finished_s[device] = now_s - self._began_s
        return [*worker.take(), *self.tick(now_s)]

    def tick(self, now_s: float) -> list[ForSteps]:
        """Make late devices skip their remaining steps. Remove very late devices from the round."""
        work, out = self._round, list[ForSteps]()
        if work is None:
            return []
        if work.collected:  # `LocalUpdates.collect` limits its time
            return self._end_if_complete()
        taken_s, missing = now_s - self._began_s, self._working
        present = missing | self._parts.keys()
        for device in missing:
            worker, others = self._workers[device], present - {device}
            if is_given_up(taken_s, self._finished_s, others):
                out += self.leave(device, "it is far slower than the other devices")
            elif worker.steps and is_late(taken_s, self._stepped_s, others):
                worker.steps.clear()
                worker.more(work)
                out += worker.take()
        return out + self._end_if_complete()

    def leave(self, device: int, reason: str) -> list[ForSteps]:
        """Remove a device that left, failed or is draining from the round."""
        if device not in self._workers:
            return []
        if device in self._working:
            self._lost[self._workers[device].name] = reason
        return [*self._drop(device), *self._end_if_complete()]

    def end(self) -> list[ForSteps]:
        """End the current round, and tell all devices to drop their arrays."""
        self._round = None
        return [sent for device in list(self._workers) for sent in self._drop(device)]

    def _drop(self, device: int) -> Iterable[ForSteps]:
        worker = self._workers.pop(device)
        worker.end_snapshot()
        worker.start_over()
        return worker.take()

    def _end_if_complete(self) -> list[ForSteps]:
        if self._round is None or self._working:
            return []
        work, self._round = self._round, None
        parts = [self._parts[device] for device in sorted(self._parts)]
        return [TellStep(RoundResult(parts, self._lost), work)]
