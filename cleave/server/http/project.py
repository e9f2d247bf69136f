"""What the join page tells a device's owner about the project, at `/project.json`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

from cleave.server.api.overview import ServerFacts
from cleave.server.store.store import StoreError
from cleave.transport.http import NO_SNIFFING, HttpAnswer, HttpRequest

PATH: Final = "/project.json"


class Project:
    """Handles requests for `/project.json`, which anybody may read.

    Args:
        facts: facts about the server. The response contains `title` and `about`.
        flops_by_hour: returns the work of all devices in the last hours, as
            `Store.flops_by_hour` does. A page computes its device's share of a day from it.
    """

    def __init__(
        self, facts: ServerFacts, flops_by_hour: Callable[[], list[tuple[int, float]]]
    ) -> None:
        self._facts = facts
        self._flops_by_hour = flops_by_hour

    def answer(self, request: HttpRequest) -> HttpAnswer:
        """Return the project as a JSON object with `title`, `about` and `flops_by_hour`."""
        try:
            hours = self._flops_by_hour()
        except StoreError:  # the rest is still worth showing, and operators see the error
            hours = []
        told = {"title": self._facts.title, "about": self._facts.about, "flops_by_hour": hours}
        headers = (("Content-Type", "application/json"), ("Cache-Control", "no-store"))
        return HttpAnswer(200, (*headers, NO_SNIFFING), json.dumps(told).encode())
