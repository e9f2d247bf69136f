"""Judges each device's pace against the fleet, and corrects the rates of slow devices. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cleave.scheduler import events
from cleave.scheduler.instructions import Decision, Note
from cleave.scheduler.sessions.device_history import DeviceHistory
from cleave.scheduler.sessions.handshake import bounded
from cleave.scheduler.sessions.pace import common_delay_s
from cleave.scheduler.sessions.session import Session


def common_delay_of(sessions: Iterable[Session]) -> float:
    """Return the delay that is common to all devices, in seconds."""
    return common_delay_s(session.pace.delay_s for session in sessions)


def judge_paces(
    sessions: Iterable[Session], history: DeviceHistory, now_s: float
) -> Sequence[Decision]:
    """Return decisions that update the rates of devices whose estimated pace changed."""
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
            text = session.pace.estimate.text or "its answers come in time again"
            decisions.append(Note(f"{session.name}: {text}"))
    return decisions
