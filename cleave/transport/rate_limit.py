"""Limit the rate of failed attempts per address: rejected admissions or failed connections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cleave.transport.connection_limits import home_of

BURST: Final = 10
"""Number of failed attempts that an address may make in quick succession."""

REFILL_S: Final = 6.0
"""Seconds after which an address may make one more failed attempt."""

MAX_ADDRESSES: Final = 10_000
"""Maximum number of tracked addresses. The address with the oldest failure is dropped first."""


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at_s: float


class RateLimit:
    """A token bucket for each address. A failed attempt removes a token from the address's bucket.

    Args:
        clock: returns monotonic seconds.
        burst: number of tokens in a full bucket.
        refill_s: seconds after which one token is added to a bucket.
        max_addresses: maximum number of tracked addresses.
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
        """Return the seconds until `address` may make another attempt; 0 if it may do so now."""
        bucket = self._buckets.get(home_of(address))
        if bucket is None:
            return 0.0
        return max(0.0, (1.0 - self._tokens(bucket)) * self._refill_s)

    def failed(self, address: str) -> None:
        """Count a failed attempt from `address`."""
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
