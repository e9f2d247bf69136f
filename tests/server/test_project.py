"""What anybody may read about the project: who asks, for what, and how much was done."""

from __future__ import annotations

import json

from cleave.server.api.overview import ServerFacts
from cleave.server.http.project import PATH, Project
from cleave.server.store.store import StoreError
from cleave.transport.http import HttpRequest


def test_the_project_is_told_as_json_and_never_kept() -> None:
    facts = ServerFacts(title='The "lab"', about="We train <b>Welsh</b>.")
    answer = Project(facts, lambda: [(7, 1.5e9)]).answer(HttpRequest(PATH))
    assert answer.status == 200
    assert ("Cache-Control", "no-store") in answer.headers
    assert json.loads(answer.body) == {
        "title": facts.title,
        "about": facts.about,
        "flops_by_hour": [[7, 1.5e9]],
    }


def test_a_store_that_cannot_be_read_hides_only_the_work() -> None:
    answer = Project(ServerFacts(title="A"), _unreadable).answer(HttpRequest(PATH))
    told = json.loads(answer.body)
    assert (told["title"], told["flops_by_hour"]) == ("A", [])


def _unreadable() -> list[tuple[int, float]]:
    raise StoreError("the disk is gone")
