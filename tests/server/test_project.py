"""What anybody may read about the project: who asks, for what, and how much was done."""

from __future__ import annotations

import json
from typing import Any

from cleave.server.api.overview import ServerFacts
from cleave.server.http.pages import PROJECT_FRESH_S, PROJECT_PATH, Project
from cleave.server.store.store import StoreError
from cleave.transport.http import HttpRequest
from tests.server.clocks import Clock


def told(project: Project) -> Any:
    answer = project.answer(HttpRequest(PROJECT_PATH))
    assert answer.status == 200
    assert ("Cache-Control", "no-store") in answer.headers
    return json.loads(answer.body)


def test_the_project_is_told_as_json_and_counted_again_after_a_while() -> None:
    clock, hours = Clock(), [(7, 1.5e9)]
    facts = ServerFacts(title='The "lab"', about="We train <b>Welsh</b>.")
    project = Project(facts, lambda: hours, clock)
    first = {"title": facts.title, "about": facts.about, "flops_by_hour": [[7, 1.5e9]]}
    assert told(project) == first
    hours.append((8, 2e9))
    assert told(project) == first
    clock.now_s += PROJECT_FRESH_S
    assert told(project)["flops_by_hour"] == [[7, 1.5e9], [8, 2e9]]


def test_a_store_that_cannot_be_read_hides_only_the_work() -> None:
    def unreadable() -> list[tuple[int, float]]:
        raise StoreError("the disk is gone")

    answer = told(Project(ServerFacts(title="A"), unreadable, Clock()))
    assert (answer["title"], answer["flops_by_hour"]) == ("A", [])
