"""What the join page tells a device's owner about the project, at `/project.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Final

from cleave.server.api.overview import ServerFacts
from cleave.server.store.store import StoreError
from cleave.transport.http import NO_SNIFFING, HttpAnswer, HttpRequest

PATH: Final = "/project.json"

FRESH_S: Final = 5.0
"""Time for which a response is reused, because anybody may ask, and counting takes time."""


class Project:
    """Handles requests for `/project.json`, which anybody may read.

    Args:
        facts: facts about the server. The response contains `title` and `about`.
        flops_by_hour: returns the work of all devices in the last hours, as
            `Store.flops_by_hour` does. A page computes its device's share of a day from it.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self,
        facts: ServerFacts,
        flops_by_hour: Callable[[], list[tuple[int, float]]],
        clock: Callable[[], float],
    ) -> None:
        self._facts = facts
        self._flops_by_hour = flops_by_hour
        self._clock = clock
        self._made_s = -math.inf
        self._body = b""

    def answer(self, request: HttpRequest) -> HttpAnswer:
        """Return the project as a JSON object with `title`, `about` and `flops_by_hour`."""
        if self._clock() - self._made_s >= FRESH_S:
            self._made_s, self._body = self._clock(), json.dumps(self._described()).encode()
        headers = (("Content-Type", "application/json"), ("Cache-Control", "no-store"))
        return HttpAnswer(200, (*headers, NO_SNIFFING), self._body)

    def _described(self) -> dict[str, object]:
        try:
            hours = self._flops_by_hour()
        except StoreError:  # the rest is still worth showing, and operators see the error
            hours = []
        return {"title": self._facts.title, "about": self._facts.about, "flops_by_hour": hours}
