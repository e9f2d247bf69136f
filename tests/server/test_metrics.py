"""`/metrics`: what it says, to whom, and that the example dashboard asks for nothing else."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cleave.protocol.messages import ErrorCode
from cleave.scheduler.counters import BytesByKind, FleetCounters, Traffic
from cleave.scheduler.sessions.admission import AccessLevel, Refusal
from cleave.server.http.metrics import Metrics
from cleave.server.jobs.jobs import FINAL_STATES, Jobs
from cleave.server.store.job_history import JobHistory
from cleave.training.loop.records import StepRecord, to_dict
from cleave.transport.http import HttpAnswer, HttpRequest
from tests.server.clocks import Clock
from tests.server.test_overview import POWERED, Fleet, overview_of

STEP = StepRecord(3, 2.5, 1024, 1e-3, "wall", "tiles", 4.0, 3.0, 1.0, 0.1, 10, 5, 8, 2, 4, 0)
GRAFANA = Path(__file__).parents[2] / "docs" / "grafana.json"


class Runner:
    """Trains three steps, and says so."""

    def check(self, arguments: Mapping[str, Any]) -> tuple[str, int]:
        return "opt-tiny", 3

    def check_pause(self, arguments: Mapping[str, Any]) -> None:
        pass

    def run(self, arguments: Any, fleet: Any, report: Any, stop: Any) -> None:
        report({"event": "note", "text": "preparing"})
        report(to_dict(STEP))


@pytest.fixture
def metrics(history: JobHistory) -> Metrics:
    clock = Clock()
    fleet = Fleet(clock)
    overview = overview_of(fleet, clock, 1e8, 2e8)
    fleet.join(1, profile=POWERED)
    fleet.join(2)
    fleet.done = FleetCounters(
        traffic=Traffic(BytesByKind(weights=900, other=100), BytesByKind(tiles=500))
    )
    jobs = overview.jobs = Jobs(fleet, Runner(), history)  # type: ignore[arg-type]
    job, ended = jobs.submit({"job": {"model": "opt-tiny"}}), threading.Event()

    def look() -> None:
        if job.state in FINAL_STATES:
            ended.set()

    jobs.follow(job, look)
    look()
    assert ended.wait(60)
    jobs.close(60)
    return Metrics(overview, admit)


def admit(token: str, address: str) -> AccessLevel | Refusal:
    if token == "look":
        return AccessLevel.VIEWER
    return Refusal(ErrorCode.CREDENTIAL, "not this one")


def get(metrics: Metrics, **request: Any) -> HttpAnswer:
    asked: dict[str, Any] = {"address": "127.0.0.1", "host": "localhost:8765", **request}
    return metrics.answer(HttpRequest("/metrics", **asked))


def samples(metrics: Metrics) -> dict[str, float]:
    text = get(metrics).body.decode()
    return {
        sample.name + "".join(f" {value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_figures_are_the_overviews(metrics: Metrics) -> None:
    found = samples(metrics)
    assert found["cleave_downlink_bytes_total"] == 1000
    assert found["cleave_uplink_bytes_total"] == 500
    assert found["cleave_traffic_bytes_total weights down"] == 900
    assert found["cleave_traffic_bytes_total other down"] == 100
    assert found["cleave_traffic_bytes_total tiles up"] == 500
    assert found["cleave_traffic_bytes_total gradients up"] == 0
    assert found["cleave_devices sbc ready"] == found["cleave_devices unknown ready"] == 1
    assert found["cleave_card_ingress_bytes_per_second"] == 2e8
    assert found["cleave_job_loss job-1 opt-tiny"] == 2.5
    assert found["cleave_job_step_server_seconds job-1 opt-tiny"] == 1.0
    assert found["cleave_job_running job-1 opt-tiny"] == 0
    assert found["cleave_server_info box auto 1.2"] == 1


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ({}, 200),
        ({"address": "::1", "host": "[::1]:8765"}, 200),
        ({"host": "127.0.0.1"}, 200),
        ({"address": "192.0.2.1"}, 401),
        ({"forwarded": True}, 401),
        ({"address": "192.0.2.1", "authorization": "Bearer look"}, 200),
        ({"address": "192.0.2.1", "authorization": "bearer  look "}, 200),
        ({"address": "192.0.2.1", "authorization": "Bearer guess"}, 401),
        ({"address": "192.0.2.1", "authorization": "Basic look"}, 401),
        ({"authorization": "Bearer guess"}, 401),
        ({"host": "rebound.example:8765"}, 401),
        ({"host": ""}, 401),
        ({"address": ""}, 401),
    ],
)
def test_this_machine_may_look_and_others_with_a_token(
    metrics: Metrics, request_: dict[str, str], status: int
) -> None:
    answer = get(metrics, **request_)
    assert answer.status == status
    assert (status == 401) == ("WWW-Authenticate" in dict(answer.headers))
    assert (status == 200) == (b"cleave_blocks_total" in answer.body)


def test_the_example_dashboard_asks_for_what_exists(metrics: Metrics) -> None:
    names = {name.partition(" ")[0] for name in samples(metrics)}
    panels = json.loads(GRAFANA.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(queries) > 10
    for query in queries:
        asked = re.findall(r"cleave_\w+", query)
        assert asked, query
        assert set(asked) <= names, query
