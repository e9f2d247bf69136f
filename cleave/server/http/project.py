"""What the join page tells a device's owner about the project, at `/project.json`.

A browser may send its join code or credential: `Authorization: Bearer KEY`. Then the response also
contains what the key is worth, as `key`. A key is never part of a URL, because URLs are logged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Final

from cleave.server.api.overview import ServerFacts, Training
from cleave.server.store.store import StoreError
from cleave.transport.http import NO_SNIFFING, HttpAnswer, HttpRequest

PATH: Final = "/project.json"

FRESH_S: Final = 5.0
"""Time for which the counted work is reused, because anybody may ask, and counting takes time."""


class Project:
    """Handles requests for `/project.json`, which anybody may read.

    Args:
        facts: facts about the server. The response contains `title` and `about`.
        flops_by_hour: returns the work of all devices in the last hours, as
            `Store.flops_by_hour` does. A page computes its device's share of a day from it.
        training: returns the state of the training, which the response contains as `training`.
        key_state: returns what a key from an IP address is worth, as `Access.key_state` does.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self,
        facts: ServerFacts,
        flops_by_hour: Callable[[], list[tuple[int, float]]],
        training: Callable[[], Training],
        key_state: Callable[[str, str], str],
        clock: Callable[[], float],
    ) -> None:
        self._facts = facts
        self._flops_by_hour = flops_by_hour
        self._training = training
        self._key_state = key_state
        self._clock = clock
        self._made_s = -math.inf
        self._hours: list[tuple[int, float]] = []

    def answer(self, request: HttpRequest) -> HttpAnswer:
        """Return the project as a JSON object."""
        if self._clock() - self._made_s >= FRESH_S:
            self._made_s = self._clock()
            try:
                self._hours = self._flops_by_hour()
            except StoreError:  # the rest is still worth showing, and operators see the error
                self._hours = []
        project: dict[str, object] = {
            "title": self._facts.title,
            "about": self._facts.about,
            "training": asdict(self._training()),
            "flops_by_hour": self._hours,
        }
        scheme, _, key = request.authorization.partition(" ")
        if scheme == "Bearer" and key:
            project["key"] = self._key_state(key, request.address)
        headers = (("Content-Type", "application/json"), ("Cache-Control", "no-store"))
        return HttpAnswer(200, (*headers, NO_SNIFFING), json.dumps(project).encode())
