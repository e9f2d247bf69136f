"""Limits devices that repeatedly leave soon after joining. Each change causes replanning."""

from __future__ import annotations

from cleave.protocol import limits


class ShortStays:
    """Counts short stays of devices, and decides how long a device must wait before it rejoins.

    A device may make `MAX_SHORT_STAYS` short stays in a row, and one more every `SHORT_STAY_REST_S`
    seconds.
    """

    def __init__(self) -> None:
        self._forgiven_s: dict[int, float] = {}  # key: device; value: expiry time

    def left(self, device: int, came_s: float, now_s: float) -> None:
        """Record that a device left. The stay counts if it was shorter than `SHORT_STAY_S`."""
        if now_s - came_s < limits.SHORT_STAY_S:
            before_s = max(now_s, self._forgiven_s.get(device, now_s))
            self._forgiven_s[device] = before_s + limits.SHORT_STAY_REST_S

    def wait_s(self, device: int, now_s: float) -> float:
        """Return the seconds until a device may rejoin; 0 if it may rejoin now."""
        counted_s = self._forgiven_s.get(device, now_s) - now_s
        return max(0.0, counted_s - (limits.MAX_SHORT_STAYS - 1) * limits.SHORT_STAY_REST_S)

    def tick(self, now_s: float) -> None:
        """Forget short stays that have expired."""
        self._forgiven_s = {who: s for who, s in self._forgiven_s.items() if s > now_s}
