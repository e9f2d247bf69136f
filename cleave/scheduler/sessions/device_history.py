"""Devices beyond one session: what they did, how they worked and rounded, and their links.

Devices with an identity are known by it. Of others only how they worked is remembered, by address
and name, and only while the server runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from cleave.planner.plan import DeviceRates
from cleave.scheduler.sessions.admission import Authenticator
from cleave.scheduler.sessions.conduct import Conduct
from cleave.scheduler.sessions.reputation import Rounding
from cleave.scheduler.sessions.session import Session

CREDIT_S: Final = 15.0
"""Seconds between two reports to the authenticator of what devices contributed."""

GRACE_S: Final = 60.0
"""A device that comes back within this time keeps the link rates and the speed that were measured
before."""

SAME_CLAIM: Final = 2.0
"""Claims of speed that differ by no more than this factor count as the same processor's, since a
device may measure itself again each time it starts."""

MAX_STRANGERS: Final = 1000
"""How many devices without an identity are remembered: the most recent ones."""

MAX_CREDIT: Final = 1e12
"""The most compute seconds that are believed of a session, so that sums stay finite."""


@dataclass(frozen=True, slots=True)
class _Departure:
    at_s: float
    address: str
    rates: DeviceRates
    claimed_flops_per_s: float

    def flops_per_s(self, claimed: float) -> float | None:
        """Return its speed, given what it claims now; None where that has to be measured again.

        A device that did not show the speed it claimed, and claims about the same now, would not
        show it now either.
        """
        if self.rates.flops_per_s >= self.claimed_flops_per_s or claimed <= self.rates.flops_per_s:
            return claimed
        same = max(claimed, self.claimed_flops_per_s) <= SAME_CLAIM * min(
            claimed, self.claimed_flops_per_s
        )
        return self.rates.flops_per_s if same else None


class DeviceHistory:
    """Tells the authenticator about devices, and remembers those that left.

    Args:
        auth: is told about devices that have an identity.
    """

    def __init__(self, auth: Authenticator) -> None:
        self._auth = auth
        self._credited_s = 0.0
        self._departed: dict[int, _Departure] = {}
        self._strangers: dict[tuple[str, str], Conduct] = {}  # by address and name
        self._rounding: dict[int, Rounding] = {}  # by identity: a new session changes nothing

    def tick(self, sessions: Iterable[Session], now_s: float) -> None:
        """Report what these sessions did, unless that was done less than `CREDIT_S` ago."""
        if now_s - self._credited_s < CREDIT_S:
            return
        self.credit(sessions, now_s)

    def credit(self, sessions: Iterable[Session], now_s: float) -> None:
        """Report what these sessions did since the last report."""
        self._credited_s = now_s
        for session in sessions:
            self._credit(session, now_s)
        long_gone = [who for who, left in self._departed.items() if now_s - left.at_s > GRACE_S]
        for who in long_gone:
            del self._departed[who]

    def depart(self, session: Session, reason: str, now_s: float, *, lost: bool) -> None:
        """Note that a session is over.

        Args:
            session: in its last state.
            reason: why it is over.
            now_s: the time.
            lost: whether the session ended unintentionally.
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
        """Keep how a device works for its next session, after that has changed."""
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
        """Return how a device worked in its last session.

        Args:
            session: the new session, with the device's name.
            known: what the authenticator knows.
        """
        if session.identity is not None:
            return known
        return self._strangers.get((session.address, session.name), known)

    def rounding_before(self, session: Session) -> Rounding:
        """Return the evidence of how a device rounds; its sessions share it."""
        if session.identity is None:
            return session.rounding
        return self._rounding.setdefault(session.identity, session.rounding)

    def forget_rounding(self, session: Session) -> None:
        """Forget that evidence: a device that is quarantined for it and released begins anew."""
        if session.identity is not None:
            self._rounding.pop(session.identity, None)

    def rates_before(self, session: Session, now_s: float) -> DeviceRates | None:
        """Return the session's rates with the link and speed that were measured before.

        Returns:
            None where the link or the speed has to be measured.
        """
        if session.identity is None or session.rates is None:
            return None
        left = self._departed.pop(session.identity, None)
        if left is None or left.address != session.address or now_s - left.at_s > GRACE_S:
            return None
        flops_per_s = left.flops_per_s(session.rates.flops_per_s)
        if flops_per_s is None:
            return None
        slowed = flops_per_s < session.rates.flops_per_s
        return replace(
            session.rates,
            flops_per_s=flops_per_s,
            graph_flops_per_s=0.0 if slowed else session.rates.graph_flops_per_s,
            downlink_bytes_per_s=left.rates.downlink_bytes_per_s,
            uplink_bytes_per_s=left.rates.uplink_bytes_per_s,
            latency_s=left.rates.latency_s,
        )

    def _credit(self, session: Session, now_s: float) -> None:
        measured_j = session.measured_j(now_s)
        if measured_j is not None:
            session.counters.energy_j = measured_j
        if session.identity is None:
            return
        done = replace(session.counters, compute_s=min(MAX_CREDIT, session.counters.compute_s))
        if done != session.credited:
            self._auth.contributed(session.identity, done - session.credited)
            session.credited = done
