"""What anybody may read about the project: who asks, for what, and how much was done."""

from __future__ import annotations

import json
from typing import Any

from cleave.server.access import KeyState
from cleave.server.api.overview import ServerFacts, Training
from cleave.server.http.pages import PROJECT_FRESH_S, PROJECT_PATH, Project
from cleave.server.store.store import StoreError
from cleave.transport.http import HttpRequest
from tests.server.clocks import Clock

NOTHING = {
    "state": "",
    "devices": 0,
    "bytes_per_device_s": None,
    "usual_bytes_per_device_s": None,
    "work": None,
    "settled": False,
    "layers_on": "own",
}


def key_state(key: str, address: str) -> KeyState:
    return KeyState(f"{key} from {address}", own=True, reason="lent")


def told(project: Project, authorization: str = "") -> Any:
    answer = project.answer(HttpRequest(PROJECT_PATH, address="::1", authorization=authorization))
    assert answer.status == 200
    assert ("Cache-Control", "no-store") in answer.headers
    return json.loads(answer.body)


def test_the_project_is_told_as_json_and_counted_again_after_a_while() -> None:
    clock, hours = Clock(), [(7, 1.5e9)]
    facts = ServerFacts(title='The "lab"', about="We train <b>Welsh</b>.")
    project = Project(facts, lambda: list(hours), Training, key_state, clock)
    first = {
        "title": facts.title,
        "about": facts.about,
        "training": NOTHING,
        "flops_by_hour": [[7, 1.5e9]],
    }
    assert told(project) == first
    hours.append((8, 2e9))
    assert told(project) == first
    clock.now_s += PROJECT_FRESH_S
    assert told(project)["flops_by_hour"] == [[7, 1.5e9], [8, 2e9]]


def test_a_store_that_cannot_be_read_hides_only_the_work() -> None:
    def unreadable() -> list[tuple[int, float]]:
        raise StoreError("the disk is gone")

    answer = told(Project(ServerFacts(title="A"), unreadable, Training, key_state, Clock()))
    assert (answer["title"], answer["flops_by_hour"]) == ("A", [])


def test_only_a_browser_that_sends_its_key_is_told_what_the_key_is_worth() -> None:
    project = Project(ServerFacts(), list, Training, key_state, Clock())
    assert "key" not in told(project)
    answer = told(project, "Bearer 7KQ4")
    assert answer["key"] == "7KQ4 from ::1"
    assert (answer["own"], answer["reason"]) == (True, "lent")
    assert "key" not in told(project, "Basic 7KQ4")
    assert "key" not in told(project)  # the next browser is not told of this one's
