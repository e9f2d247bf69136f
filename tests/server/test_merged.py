"""Several servers are shown as one: what they did is added up, and nothing is shown twice."""

from __future__ import annotations

import dataclasses

import pytest

from cleave.cluster import servers as merging
from cleave.cluster.servers import ended, merged
from cleave.scheduler.counters import BytesByKind, FleetCounters, Traffic
from cleave.scheduler.sessions.session import EventKind
from cleave.server.api.overview import DEVICE_COLUMNS, Answer, Question
from cleave.server.block_times import Lane, TimeSpan
from tests.server.clocks import Clock
from tests.server.test_overview import POWERED, Fleet, overview_of


def seen(
    fleet: Fleet, clock: Clock, question: Question | None = None, card: float | None = None
) -> Answer:
    overview = overview_of(fleet, clock, card, card)
    overview.happened(EventKind.REISSUE, None, "something")
    clock.now_s += 20.0
    return overview.answer(question or Question())


def fleet_of(clock: Clock, *sessions: int, sent_bytes: int = 0) -> Fleet:
    fleet = Fleet(clock)
    for session in sessions:
        fleet.join(session, name=f"device {session}", profile=POWERED)
    traffic = Traffic(down=BytesByKind(other=sent_bytes))
    fleet.done = dataclasses.replace(FleetCounters(), traffic=traffic)
    return fleet


def test_one_server_is_shown_as_it_is() -> None:
    clock = Clock()
    own = seen(fleet_of(clock, 1, 3, sent_bytes=5), clock)
    assert merged(own, []) == own


def test_devices_and_bytes_are_those_of_all() -> None:
    clock = Clock()
    own = seen(fleet_of(clock, 1, 3, sent_bytes=5), clock, card=1e9)
    other = seen(fleet_of(clock, 2, sent_bytes=7), clock, card=1e9)
    whole = merged(own, [other])
    names = [row[DEVICE_COLUMNS.index("name")] for row in whole["devices"]["rows"]]
    assert names == ["device 1", "device 3", "device 2"]
    assert whole["devices"]["total"] == 3
    assert sum(count for _, _, count in whole["devices"]["by"]) == 3
    assert whole["totals"]["down_bytes"] == whole["traffic"]["down"]["other"] == 12
    assert whole["card"]["egress_bytes_per_s"] == 2e9
    assert whole["events"] == own["events"]  # those of others are added to the first one's log


def test_what_a_lost_server_did_still_counts() -> None:
    clock = Clock()
    own = seen(fleet_of(clock, 1, sent_bytes=5), clock, card=1e9)
    last = seen(fleet_of(clock, 2, sent_bytes=7), clock, card=1e9)
    last["totals"]["joined"] = 1
    lost = ended(last)
    assert lost["totals"]["left"] == 1
    whole = merged(own, [lost])
    assert whole["totals"]["down_bytes"] == 12
    assert whole["devices"] == own["devices"]
    assert whole["card"] == own["card"]
    assert whole["rates"] == own["rates"]


def test_a_rate_that_one_server_does_not_know_is_unknown() -> None:
    clock = Clock()
    own = seen(fleet_of(clock), clock, card=1e9)
    assert merged(own, [seen(fleet_of(clock), clock)])["card"]["egress_bytes_per_s"] is None


def test_the_stream_and_the_table_have_room_for_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, question = Clock(), Question(device=2, stream=True)
    first, second = fleet_of(clock, 1), fleet_of(clock, 2)
    for fleet in (first, second):
        fleet.spans = [TimeSpan(Lane.COMPUTE, clock() + 38.0, clock() + 39.0)]
    answers = [seen(first, clock, question), seen(second, clock, question)]
    assert merged(answers[0], answers[1:])["timeline"]["device"] == 2
    monkeypatch.setattr(merging, "MAX_STREAMS", 1)
    monkeypatch.setattr(merging, "MAX_DEVICES_BYTES", 300)
    whole = merged(answers[0], answers[1:])
    assert len(whole["stream"]["devices"]) == 1
    assert whole["stream"]["hidden"] == 1
    assert len(whole["devices"]["rows"]) == 1
    assert whole["devices"]["total"] == 2
