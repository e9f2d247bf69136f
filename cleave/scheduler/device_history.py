"""Devices beyond one session: what they did, how they worked, and the link they had.

Those with an identity are known by it. Of others only how they worked is remembered, by address and
name, and only while the server runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from cleave.planner.plan import DeviceRates
from cleave.scheduler.admission import Authenticator, Contribution
from cleave.scheduler.conduct import Conduct
from cleave.scheduler.session import Session
from profiles.power_limits import believable_j

CREDIT_S: Final = 15.0
"""How often the authenticator is told what devices did."""

GRACE_S: Final = 60.0
"""A device that comes back within this time goes on with the link, and the speed, that were
measured before."""

SAME_CLAIM: Final = 2.0
"""Claims of speed that differ by no more than this factor are of the same processor: a device may
measure itself anew each time that it starts."""

MAX_STRANGERS: Final = 1000
"""Devices without an identity whose conduct is remembered, those that were heard of last."""

MAX_CREDIT: Final = 1e12
"""The most seconds that are believed of a session, so that sums stay numbers."""


@dataclass(frozen=True, slots=True)
class _Departure:
    at_s: float
    address: str
    rates: DeviceRates
    claimed_flops_per_s: float

    def flops_per_s(self, claimed: float) -> float | None:
        """How fast it is, when it claims this now; None where that has to be found out again.

        One that did not show what it claimed, and claims about as much as before, would not show it
        now either.
        """
        if self.rates.flops_per_s >= self.claimed_flops_per_s or claimed <= self.rates.flops_per_s:
            return claimed
        same = max(claimed, self.claimed_flops_per_s) <= SAME_CLAIM * min(
            claimed, self.claimed_flops_per_s
        )
        return self.rates.flops_per_s if same else None


class DeviceHistory:
    """Tells the authenticator of devices that it knows.

    Args:
        auth: who is told.
    """

    def __init__(self, auth: Authenticator) -> None:
        self._auth = auth
        self._credited_s = 0.0
        self._departed: dict[int, _Departure] = {}
        self._strangers: dict[tuple[str, str], Conduct] = {}  # by address and name

    def tick(self, sessions: Iterable[Session], now_s: float) -> None:
        """Time passed: say what these sessions did, unless that was a moment ago."""
        if now_s - self._credited_s < CREDIT_S:
            return
        self.credit(sessions, now_s)
        long_gone = [who for who, left in self._departed.items() if now_s - left.at_s > GRACE_S]
        for who in long_gone:
            del self._departed[who]

    def credit(self, sessions: Iterable[Session], now_s: float) -> None:
        """Say what these sessions did since it was said last."""
        self._credited_s = now_s
        for session in sessions:
            self._credit(session, now_s)

    def depart(self, session: Session, reason: str, now_s: float, *, lost: bool) -> None:
        """A session is over.

        Args:
            session: in the state that it had until now.
            reason: why it is over.
            now_s: the time.
            lost: whether nobody meant it to be.
        """
        if session.identity is None:
            return
        self._credit(session, now_s)
        if session.rates is not None and session.probe is None:  # its link is known
            self._departed[session.identity] = _Departure(
                now_s, session.address, session.rates, session.claimed_flops_per_s
            )
        self._auth.departed(session.identity, reason, lost=lost)

    def remember(self, session: Session) -> None:
        """How a device works has changed: it is to count in its next session, too."""
        if session.identity is not None:
            self._auth.conducted(session.identity, session.conduct)
            return
        who = (session.address, session.name)
        self._strangers.pop(who, None)
        if session.conduct != Conduct():
            self._strangers[who] = session.conduct
            if len(self._strangers) > MAX_STRANGERS:
                del self._strangers[next(iter(self._strangers))]

    def conduct_before(self, session: Session, known: Conduct) -> Conduct:
        """How a device worked when it was here last.

        Args:
            session: a new one, with its name.
            known: what the authenticator knows.
        """
        if session.identity is not None:
            return known
        return self._strangers.get((session.address, session.name), known)

    def rates_before(self, session: Session, now_s: float) -> DeviceRates | None:
        """The session's rates with link and speed as they were measured, if it was here a moment
        ago; None where either has to be measured."""
        if session.identity is None or session.rates is None:
            return None
        left = self._departed.pop(session.identity, None)
        if left is None or left.address != session.address or now_s - left.at_s > GRACE_S:
            return None
        flops_per_s = left.flops_per_s(session.rates.flops_per_s)
        if flops_per_s is None:
            return None
        return replace(
            session.rates,
            flops_per_s=flops_per_s,
            downlink_bytes_per_s=left.rates.downlink_bytes_per_s,
            uplink_bytes_per_s=left.rates.uplink_bytes_per_s,
            latency_s=left.rates.latency_s,
        )

    def _credit(self, session: Session, now_s: float) -> None:
        if session.identity is None:
            return
        done = _contribution(session, now_s)
        if done != session.credited:
            self._auth.contributed(session.identity, done - session.credited)
            session.credited = done


def _contribution(session: Session, now_s: float) -> Contribution:
    energy_j = session.telemetry.get("energy_j", 0.0)
    if not believable_j(energy_j, session.profile, now_s - session.opened_s):
        energy_j = session.credited.energy_j
    return Contribution(
        session.blocks,
        session.flops,
        session.downlink_bytes,
        session.uplink_bytes,
        min(MAX_CREDIT, session.compute_s),
        energy_j,
        session.failures,
    )
