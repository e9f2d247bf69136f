"""Time that tests set."""

from __future__ import annotations

from cleave.server.access import Clocks


class Clock:
    """Seconds that pass when told to."""

    def __init__(self, now_s: float = 1e9) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    @property
    def clocks(self) -> Clocks:
        """As what the server reads."""
        return Clocks(self, self)
