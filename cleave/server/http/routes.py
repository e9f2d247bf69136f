"""Plain HTTP answers of a server, other than `/healthz`."""

from __future__ import annotations

from dataclasses import dataclass

from cleave.server.http import metrics
from cleave.server.http.metrics import Metrics
from cleave.server.http.pages import Pages
from cleave.transport.http import HttpAnswer, HttpRequest


@dataclass(frozen=True, slots=True)
class HttpRoutes:
    """Routes requests to the pages and the metrics, by path."""

    pages: Pages
    metrics: Metrics

    def answer(self, request: HttpRequest) -> HttpAnswer | None:
        """Return the answer at the request's path; None if the path is unknown."""
        if request.path == metrics.PATH:
            return self.metrics.answer(request)
        return self.pages.answer(request)
