"""A limit per address on failures: rejected admissions or failed connections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cleave.transport.connection_limits import home_of

BURST: Final = 10
"""Failed attempts that an address may make at once."""

REFILL_S: Final = 6.0
"""Seconds until an address may fail once more."""

MAX_ADDRESSES: Final = 10_000
"""Number of addresses remembered; those whose last failure is oldest are dropped first."""


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at_s: float


class RateLimit:
    """A token bucket for each address: a failed attempt takes a token, and tokens return with time.

    Args:
        clock: returns monotonic seconds.
        burst: tokens of a full bucket.
        refill_s: seconds until one token returns.
        max_addresses: number of addresses remembered.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        burst: int = BURST,
        refill_s: float = REFILL_S,
        max_addresses: int = MAX_ADDRESSES,
    ) -> None:
        self._clock = clock
        self._burst = burst
        self._refill_s = refill_s
        self._max_addresses = max_addresses
        self._buckets: dict[str, _Bucket] = {}  # oldest failure first

    def wait_s(self, address: str) -> float:
        """Return the seconds until this address may try again; 0 if it may now."""
        bucket = self._buckets.get(home_of(address))
        if bucket is None:
            return 0.0
        return max(0.0, (1.0 - self._tokens(bucket)) * self._refill_s)

    def failed(self, address: str) -> None:
        """Count a failed attempt from this address."""
        who = home_of(address)
        now_s = self._clock()
        bucket = self._buckets.pop(who, None)
        tokens = self._tokens(bucket) if bucket is not None else float(self._burst)
        self._buckets[who] = _Bucket(max(0.0, tokens - 1.0), now_s)
        if len(self._buckets) > self._max_addresses:
            del self._buckets[next(iter(self._buckets))]

    def _tokens(self, bucket: _Bucket) -> float:
        back = (self._clock() - bucket.at_s) / self._refill_s
        return min(float(self._burst), bucket.tokens + back)
