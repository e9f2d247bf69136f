"""Route plain HTTP requests, except for `/healthz`, to the pages or the metrics."""

from __future__ import annotations

from dataclasses import dataclass

from cleave.server.http import metrics
from cleave.server.http.metrics import Metrics
from cleave.server.http.pages import Pages
from cleave.transport.http import HttpAnswer, HttpRequest


@dataclass(frozen=True, slots=True)
class HttpRoutes:
    """Routes a request to the web pages or the metrics, depending on its path."""

    pages: Pages
    metrics: Metrics

    def answer(self, request: HttpRequest) -> HttpAnswer | None:
        """Return the response for the request's path; None for an unknown path."""
        if request.path == metrics.PATH:
            return self.metrics.answer(request)
        return self.pages.answer(request)
