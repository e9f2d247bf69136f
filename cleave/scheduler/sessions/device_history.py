"""Device records that outlive a session: contributions, behavior, rounding and link rates.

A device without an identity is recognized by its address and name. For such a device, only the
behavior is remembered, and only until the server stops.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from ipaddress import ip_address
from typing import Final

from cleave.planner.plan import DeviceRates
from cleave.scheduler.sessions.admission import Authenticator, Behavior, Measurement
from cleave.scheduler.sessions.reputation import Rounding
from cleave.scheduler.sessions.session import Session

CREDIT_S: Final = 15.0  # minimum seconds between two reports of device contributions

# If a device rejoins within this many seconds, its link rates and speed are not measured again.
# Stored measurements are valid longer.
GRACE_S: Final = 60.0

MAX_STRANGERS: Final = 1000  # maximum number of remembered devices without an identity

# Maximum compute time credited to one session, in seconds. It keeps the totals finite.
MAX_CREDIT: Final = 1e12


class DeviceHistory:
    """Reports device records to the authenticator and remembers devices that left."""

    def __init__(self, auth: Authenticator) -> None:
        self._auth = auth
        self._credited_s = 0.0
        # key: identity; value: time of departure, and what was measured
        self._departed: dict[int, tuple[float, Measurement]] = {}
        self._strangers: dict[tuple[str, str], Behavior] = {}  # key: (address, name)
        self._rounding: dict[int, Rounding] = {}  # key: identity, across sessions

    def tick(self, sessions: Iterable[Session], now_s: float) -> None:
        """Report contributions to the authenticator, at most once every `CREDIT_S` seconds."""
        if now_s - self._credited_s < CREDIT_S:
            return
        self.credit(sessions, now_s)

    def credit(self, sessions: Iterable[Session], now_s: float) -> None:
        """Report to the authenticator each device's contribution since the previous report."""
        self._credited_s = now_s
        for session in sessions:
            self._credit(session, now_s)
        long_gone = [who for who, left in self._departed.items() if now_s - left[0] > GRACE_S]
        for who in long_gone:
            del self._departed[who]

    def depart(self, session: Session, reason: str, now_s: float, *, lost: bool) -> None:
        """Record the end of a session. `lost` says whether it ended unintentionally."""
        if session.identity is None:
            return
        self._credit(session, now_s)
        if session.rates is not None and session.probe is None:  # the link rates are known
            self._departed[session.identity] = now_s, _measurement(session, session.rates)
        self._auth.departed(session.identity, reason, lost=lost)

    def remember(self, session: Session) -> None:
        """Store a device's current behavior for its next session."""
        if session.identity is not None:
            self._auth.record_behavior(session.identity, session.behavior)
            return
        who = (session.address, session.name)
        self._strangers.pop(who, None)
        if session.behavior != Behavior():
            self._strangers[who] = session.behavior
            if len(self._strangers) > MAX_STRANGERS:
                del self._strangers[next(iter(self._strangers))]

    def behavior_before(self, session: Session, known: Behavior) -> Behavior:
        """Return a device's behavior in its previous session. `session.name` must be set.

        Args:
            known: the behavior that the authenticator recorded.
        """
        if session.identity is not None:
            return known
        return self._strangers.get((session.address, session.name), known)

    def rounding_before(self, session: Session) -> Rounding:
        """Return a device's rounding evidence, which all sessions of the device share."""
        if session.identity is None:
            return session.rounding
        return self._rounding.setdefault(session.identity, session.rounding)

    def forget_rounding(self, session: Session) -> None:
        """Discard a device's rounding evidence after the evidence led to a quarantine."""
        if session.identity is not None:
            self._rounding.pop(session.identity, None)

    def measured(self, session: Session) -> None:
        """Store the link and speed of a device whose probe has just measured them."""
        if session.identity is not None and session.rates is not None and _is_ip(session.address):
            self._auth.record_measurement(session.identity, _measurement(session, session.rates))

    def rates_before(
        self, session: Session, now_s: float, stored: Measurement | None = None
    ) -> DeviceRates | None:
        """Return a device's rates, with the link rates and speed known from an earlier session.

        Return None if the link rates or the speed must be measured again.

        Args:
            stored: the link and speed that the authenticator stored; None if unknown.
        """
        if session.identity is None or session.rates is None:
            return None
        left_s, left = self._departed.pop(session.identity, (-math.inf, None))
        if left is None or now_s - left_s > GRACE_S:
            left = stored
        if left is None or left.address != session.address:
            return None
        flops_per_s = left.flops_per_s_now(session.rates.flops_per_s)
        if flops_per_s is None:
            return None
        slowed = flops_per_s < session.rates.flops_per_s
        return replace(
            session.rates,
            flops_per_s=flops_per_s,
            graph_flops_per_s=0.0 if slowed else session.rates.graph_flops_per_s,
            graph_bf16_flops_per_s=0.0 if slowed else session.rates.graph_bf16_flops_per_s,
            downlink_bytes_per_s=left.downlink_bytes_per_s,
            uplink_bytes_per_s=left.uplink_bytes_per_s,
            latency_s=left.latency_s,
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


def _measurement(session: Session, rates: DeviceRates) -> Measurement:
    return Measurement(
        session.address,
        rates.downlink_bytes_per_s,
        rates.uplink_bytes_per_s,
        rates.latency_s,
        rates.flops_per_s,
        session.claimed_flops_per_s,
    )


def _is_ip(address: str) -> bool:
    """Return whether an address tells devices' networks apart. The name of a relay does not."""
    try:
        ip_address(address)
    except ValueError:
        return False
    return True
