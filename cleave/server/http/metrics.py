"""Prometheus metrics at `/metrics`. The server creates a new overview for each request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from cleave.errors import CleaveError
from cleave.scheduler.sessions.admission import AccessLevel, Refusal
from cleave.server.api.overview import Overview, Question
from cleave.transport.addresses import LOOPBACK_NAMES, is_loopback_address
from cleave.transport.http import NO_SNIFFING, HttpAnswer, HttpRequest

PATH: Final = "/metrics"

_TOTALS: Final = {
    "blocks": ("cleave_blocks", "Device runs whose results were used."),
    "flops": ("cleave_flops", "Floating-point operations of used results."),
    "down_bytes": ("cleave_downlink_bytes", "Bytes sent to devices."),
    "up_bytes": ("cleave_uplink_bytes", "Bytes received from devices."),
    "reissued": ("cleave_reissued_units", "Tasks that were reassigned to other devices."),
    "wrong": ("cleave_wrong_results", "Checked results that were wrong."),
    "joined": ("cleave_devices_joined", "Device sessions that began."),
    "left": ("cleave_devices_left", "Device sessions that ended."),
}
_STEP: Final = {
    "loss": ("cleave_job_loss", "Training loss of that step."),
    "tokens": ("cleave_job_step_tokens", "Number of tokens in that step."),
    "wall_s": ("cleave_job_step_seconds", "Duration of that step."),
    "fleet_s": ("cleave_job_step_fleet_seconds", "Seconds of that step spent waiting for devices."),
    "ps_s": ("cleave_job_step_server_seconds", "Seconds of that step spent on the server."),
}
_ENERGY: Final = {
    "devices_j": ("cleave_devices_energy_joules", "Known energy that devices used."),
    "ps_j": ("cleave_server_energy_joules", "Energy that the server's machine used, if known."),
    "gco2e": (
        "cleave_devices_carbon_grams",
        "Emissions of that energy, in grams of CO2 equivalent.",
    ),
}

Admit = Callable[[str, str], AccessLevel | Refusal]
"""Function that checks a token from an IP address, such as `Authenticator.admit_operator`."""


class Metrics(Collector):
    """Handles requests for `/metrics` and collects an overview's known values.

    Programs on this machine need no token. Other clients must send a viewer's or operator's token,
    which `admit` checks.
    """

    def __init__(self, overview: Overview, admit: Admit) -> None:
        self._overview = overview
        self._admit = admit
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def answer(self, request: HttpRequest) -> HttpAnswer:
        """Return the metrics, status 401 if access is denied, or 503 while the server starts."""
        scheme, _, token = request.authorization.partition(" ")
        shown = token.strip() if scheme.lower() == "bearer" else ""
        if shown or not _is_local(request):
            refused = "send the viewer's token in the header Authorization: Bearer TOKEN"
            verdict = self._admit(shown, request.address) if shown else None
            if isinstance(verdict, Refusal):
                refused = verdict.reason
            if not isinstance(verdict, AccessLevel):
                answer = HttpAnswer.text(401, f"{refused}\n")
                return answer.having(("WWW-Authenticate", "Bearer"))
        headers = (("Content-Type", CONTENT_TYPE_LATEST), ("Cache-Control", "no-store"))
        try:
            text = generate_latest(self._registry)
        except CleaveError as error:
            return HttpAnswer.text(503, f"{error}\n")
        return HttpAnswer(200, (*headers, NO_SNIFFING), text)

    def collect(self) -> Iterator[Metric]:
        """Create an overview and yield its values as Prometheus metrics."""
        seen = self._overview.answer(Question())
        server = seen["server"]
        facts = {name: str(server[name]) for name in ("version", "name", "verify")}
        yield InfoMetricFamily("cleave_server", "The server.", value=facts)
        yield _gauge(
            "cleave_start_time_seconds",
            "Unix time at which the server started.",
            server["started_s"],
        )
        for key, (name, text) in _TOTALS.items():
            yield CounterMetricFamily(name, text, value=seen["totals"][key])
        yield _traffic(seen["traffic"])
        yield _devices(seen["devices"])
        for way in ("egress", "ingress"):
            rate = seen["card"][f"{way}_bytes_per_s"]
            if rate is not None:
                yield _gauge(
                    f"cleave_card_{way}_bytes_per_second",
                    "Rate of the server's network card.",
                    rate,
                )
        for key, (name, text) in _ENERGY.items():
            if seen["energy"][key] is not None:
                yield _gauge(name, text, seen["energy"][key])
        if seen["job"] is not None:
            yield from _job(seen["job"])


def _gauge(name: str, text: str, value: float, **labels: str) -> Metric:
    family = GaugeMetricFamily(name, text, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), value)
    return family


def _traffic(ways: dict[str, dict[str, int]]) -> Metric:
    family = CounterMetricFamily(
        "cleave_traffic_bytes",
        "Bytes sent to and received from devices, by kind of data.",
        labels=("way", "kind"),
    )
    for way, kinds in ways.items():
        for kind, nbytes in kinds.items():
            family.add_metric((way, kind), nbytes)
    return family


def _devices(table: dict[str, Any]) -> Metric:
    family = GaugeMetricFamily("cleave_devices", "Connected devices.", labels=("kind", "state"))
    for kind, state, count in table["by"]:
        family.add_metric((kind or "unknown", state), count)
    return family


def _job(job: dict[str, Any]) -> Iterator[Metric]:
    labels = {"job": job["job"], "model": job["model"]}
    running = job["state"] == "running"
    yield _gauge("cleave_job_steps", "Total number of optimizer steps.", job["steps"], **labels)
    yield _gauge("cleave_job_step", "The last completed optimizer step.", job["step"], **labels)
    yield _gauge("cleave_job_running", "Whether the job is running.", running, **labels)
    if (last := job["last_step"]) is not None:
        for key, (name, text) in _STEP.items():
            yield _gauge(name, text, last[key], **labels)


def _is_local(request: HttpRequest) -> bool:
    """Return whether a request comes directly from a program on this machine.

    Return False for requests that a proxy forwards. Also return False if the `Host` header is not a
    loopback name, because the domain of a malicious web page may resolve to this machine.
    """
    if request.forwarded or not is_loopback_address(request.address):
        return False
    host = request.host.rpartition(":")[0] if not request.host.endswith("]") else request.host
    return (host or request.host).strip("[]") in LOOPBACK_NAMES
