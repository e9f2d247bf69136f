"""Run trials of devices that get no tasks, and evaluate the pace of all devices.

This module does no I/O.

A device is set aside after several consecutive failed runs (`reputation.py`). A slow device may get
no tasks from the planner (`pace.py`). In a trial, the device multiplies secret random matrices. No
job uses the products.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Final

from cleave.planner.plan import tile_s
from cleave.protocol import messages
from cleave.protocol.codec import payload_bytes
from cleave.protocol.messages import ErrorCode
from cleave.scheduler import events
from cleave.scheduler.instructions import Aside, Decision, Note, Refuse, Send
from cleave.scheduler.sessions.admission import clean_text
from cleave.scheduler.sessions.device_history import DeviceHistory
from cleave.scheduler.sessions.joining import bounded
from cleave.scheduler.sessions.pace import Sample, common_delay_s
from cleave.scheduler.sessions.probe import STATED, Probe
from cleave.scheduler.sessions.session import Session, Trial

NOTED_S: Final = 60.0  # minimum seconds between two reports about failed runs of a device
TRIAL_PATIENCE_S: Final = 60.0  # maximum duration of a trial
_MAX_FAILURE: Final = 120  # maximum length of a device's error text, in characters


class Trials:
    """Sets aside devices whose runs fail, and runs trials of devices that get no tasks.

    Methods that handle an event return the decisions to carry out.

    Args:
        rng: secret random generator for the matrices of the trials.
        observe: whether plans use each device's measured pace.
    """

    def __init__(self, history: DeviceHistory, rng: random.Random, *, observe: bool) -> None:
        self._history = history
        self._rng = rng
        self._observe = observe

    def run_failed(
        self, session: Session, run: int, reason: str, now_s: float
    ) -> Sequence[Decision]:
        """Count a failed run. Set the device aside if too many consecutive runs failed."""
        reason = _shown(reason)
        session.counters.failures += 1
        if session.rates is not None:
            session.pace.answered(run, session.rates, now_s, failed=True)
        decisions: list[Decision] = []
        if session.setbacks.failed(reason, now_s):
            self._behavior_changed(session)
            # Set the device aside first. Otherwise, its failed task could be assigned to it again.
            decisions += [_aside(session), events.DeviceAside(session.id)]
        elif session.noted_s is None or now_s - session.noted_s >= NOTED_S:
            session.noted_s = now_s
            decisions.append(Note(f"{session.name} failed a run: {reason}"))
        return decisions

    def tick(
        self, session: Session, now_s: float, *, busy: bool, alone: bool
    ) -> Sequence[Decision]:
        """Start a READY device's trial if one is due. End a trial that takes too long.

        Args:
            alone: whether this is the only device that is available for tasks.
        """
        if session.trial is not None:
            if now_s - session.trial.begun_s <= TRIAL_PATIENCE_S:
                return []
            return self.failed(session, session.trial, "it did not answer a trial in time", now_s)
        if session.rates is None or busy:
            return []
        slow = self._observe and session.pace.due(session.rates, now_s) and not alone
        if not session.setbacks.due(now_s) and (session.setbacks.aside or not slow):
            return []
        decisions: list[Decision] = []
        if not session.setbacks.aside:  # the trial needs the device's memory
            decisions.append(events.DeviceAside(session.id))
        probe = Probe(session.rates, STATED, self._rng, session.probe_ids)
        sent = probe.begin(now_s)
        nbytes = sum(payload_bytes(m.payload) for m in sent if isinstance(m, messages.Put))
        session.trial = Trial(probe, now_s, tile_s(session.rates, nbytes, 0.0, 0.0))
        return [*decisions, *(Send(session.id, m) for m in sent)]

    def answered(
        self,
        session: Session,
        trial: Trial,
        message: messages.Result,
        common_delay_s: float,
        now_s: float,
    ) -> Sequence[Decision]:
        """Handle a result of a trial. After the last result, make the device available again."""
        sent = [Send(session.id, m) for m in trial.probe.result(message, now_s)]
        if trial.probe.fault:
            reason = f"it failed its arithmetic test: {trial.probe.fault}"
            return [Refuse(session.id, ErrorCode.QUARANTINED, reason)]
        if trial.probe.rates is None:
            return sent
        session.trial = None
        if self._observe and session.rates is not None:
            sample = Sample(trial.expected_s, now_s - trial.begun_s)
            session.rates = session.pace.tried(sample, session.rates, common_delay_s, now_s)
        was_aside = session.setbacks.aside
        if was_aside:
            session.setbacks.back()
        self._behavior_changed(session)
        said = [_aside(session)] if was_aside else []
        return [*sent, *said, _back(session)]

    def trial_run_failed(
        self, session: Session, trial: Trial, run: int, reason: str, now_s: float
    ) -> Sequence[Decision]:
        """Repeat a failed run of a trial. After too many failed runs in a row, end the trial."""
        session.counters.failures += 1
        if again := trial.probe.failed(run, now_s):
            return [Send(session.id, m) for m in again]
        return self.failed(session, trial, reason, now_s)

    def failed(
        self, session: Session, trial: Trial, reason: str, now_s: float
    ) -> Sequence[Decision]:
        """End a failed trial and postpone the device's next trial."""
        session.trial = None
        decisions: list[Decision] = [Send(session.id, m) for m in trial.probe.abandon()]
        if session.pace.estimate.slow:
            session.pace.put_off(now_s)
        if session.setbacks.aside:
            session.setbacks.failed(_shown(reason), now_s)
            session.setbacks.put_off(now_s)
        else:
            decisions.append(_back(session))
        self._behavior_changed(session)
        return decisions

    def _behavior_changed(self, session: Session) -> None:
        session.reason = session.restriction
        self._history.remember(session)


def _shown(reason: str) -> str:
    return clean_text(reason, _MAX_FAILURE) or "no reason given"


def _aside(session: Session) -> Aside:
    return Aside(session.id, session.setbacks.aside, session.reason)


def _back(session: Session) -> events.DeviceBack:
    return events.DeviceBack(bounded(session.planned_rates), careful=session.setbacks.times > 0)


def common_delay_of(sessions: Iterable[Session]) -> float:
    """Return the delay that is common to all devices, in seconds."""
    return common_delay_s(session.pace.delay_s for session in sessions)


def judge_paces(
    sessions: Iterable[Session], history: DeviceHistory, now_s: float
) -> Sequence[Decision]:
    """Update pace estimates. Return decisions for the devices whose estimates changed."""
    sessions = list(sessions)
    judged = [s for s in sessions if s.pace.fresh and s.rates is not None]
    if not judged:
        return []
    decisions: list[Decision] = []
    common_s = common_delay_of(sessions)
    for session in judged:
        before = session.pace.estimate
        if not session.pace.judge(common_s, now_s):
            continue
        decisions.append(events.DeviceRated(bounded(session.planned_rates)))
        session.reason = session.restriction
        history.remember(session)
        if session.pace.estimate.slow != before.slow:
            text = session.pace.estimate.text or "its answers arrive on time again"
            decisions.append(Note(f"{session.name}: {text}"))
    return decisions
