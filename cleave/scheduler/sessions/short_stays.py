"""Limits devices that repeatedly leave soon after joining: each time, work is replanned."""

from __future__ import annotations

from cleave.protocol import limits


class ShortStays:
    """Counts devices' short stays, and decides how long a device has to wait.

    A device may make `MAX_SHORT_STAYS` at once, and one more every `SHORT_STAY_REST_S` seconds.
    """

    def __init__(self) -> None:
        self._forgiven_s: dict[int, float] = {}  # by device, when its short stays expire

    def left(self, device: int, came_s: float, now_s: float) -> None:
        """Record that a device left."""
        if now_s - came_s < limits.SHORT_STAY_S:
            before_s = max(now_s, self._forgiven_s.get(device, now_s))
            self._forgiven_s[device] = before_s + limits.SHORT_STAY_REST_S

    def wait_s(self, device: int, now_s: float) -> float:
        """Return the seconds until a device may join."""
        counted_s = self._forgiven_s.get(device, now_s) - now_s
        return max(0.0, counted_s - (limits.MAX_SHORT_STAYS - 1) * limits.SHORT_STAY_REST_S)

    def tick(self, now_s: float) -> None:
        """Forget expired short stays."""
        self._forgiven_s = {who: s for who, s in self._forgiven_s.items() if s > now_s}
