"""Devices are let in by all servers with one credential, and the first learns what others do."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from cleave.cluster.roster import Members, Roster
from cleave.protocol.device_counters import DeviceCounters
from cleave.protocol.messages import ErrorCode, Hello, Role
from cleave.scheduler.admission import Admission, Refusal
from cleave.scheduler.conduct import Conduct
from cleave.server.auth.access import Access
from cleave.server.store.store import AccessStatus, Departure, DeviceRecord, Store
from tests.server.clocks import Clock

HELLO = Hello(Role.DEVICE, name="phone")
HERE = "192.0.2.1"


@pytest.fixture
def access() -> Iterator[Access]:
    access = Access(Store(None), "token", clocks=Clock().clocks)
    yield access
    access.close()
    access.store.close()


@pytest.fixture
def members(access: Access) -> Members:
    return Members(access)


@pytest.fixture
def roster(access: Access) -> Roster:
    return Roster(access.server)


def joined(members: Members, access: Access, *, own: bool = False) -> tuple[Hello, int]:
    """A device that joined the first server with a code; what it says from then on, and who it
    is."""
    code = access.pair(own=own).text
    admission = members.admit(replace(HELLO, credential=code), HERE)
    assert isinstance(admission, Admission)
    assert admission.identity is not None
    return replace(HELLO, credential=admission.credential), admission.identity


def told(roster: Roster, members: Members) -> None:
    """What the first server says goes to another process."""
    roster.know(pickle.loads(pickle.dumps(members.news())))


def reported(roster: Roster, members: Members) -> None:
    for report in pickle.loads(pickle.dumps(roster.reports())):
        report(members)


def stored(access: Access, identity: int) -> DeviceRecord:
    access.writer.flush()
    return next(device for device in access.store.devices() if device.id == identity)


def test_a_device_shows_the_credential_of_the_first_server_at_all(
    members: Members, roster: Roster, access: Access
) -> None:
    hello, identity = joined(members, access, own=True)
    told(roster, members)
    admission = roster.admit(hello, HERE)
    assert isinstance(admission, Admission)
    assert (admission.identity, admission.own, admission.name) == (identity, True, "phone")
    assert admission.credential == ""
    assert roster.server == access.server  # the device keeps its credential under that id
    measured = roster.admit(replace(hello, measure=True), HERE)
    assert isinstance(measured, Admission)
    assert measured.identity is None


def test_nothing_is_told_twice_and_a_new_server_is_told_all(
    members: Members, access: Access
) -> None:
    joined(members, access)
    assert len(members.news()) == 1
    assert members.news() == []
    assert len(members.all()) == 1


@pytest.mark.parametrize("credential", ["", "guessed"])
def test_a_stranger_is_sent_back_and_not_refused_for_good(roster: Roster, credential: str) -> None:
    refusal = roster.admit(replace(HELLO, credential=credential), HERE)
    assert isinstance(refusal, Refusal)
    assert refusal.code is ErrorCode.LIMIT
    assert refusal.retry_after_s > 0


def test_no_operator_is_let_in(roster: Roster) -> None:
    assert isinstance(roster.admit_operator("token", HERE), Refusal)
    assert isinstance(roster.admit_operator("", HERE), Refusal)


def test_a_fleet_credential_lets_in_whoever_shows_it() -> None:
    roster = Roster("id", "shared secret")
    assert roster.admit(replace(HELLO, credential="shared secret"), HERE) == Admission()
    assert isinstance(roster.admit(replace(HELLO, credential="other"), HERE), Refusal)
    assert isinstance(Roster("id").admit(HELLO, HERE), Refusal)


def test_the_first_server_stores_what_others_report(
    members: Members, roster: Roster, access: Access
) -> None:
    hello, identity = joined(members, access)
    told(roster, members)
    before = stored(access, identity)
    roster.admit(hello, HERE)
    roster.contributed(identity, DeviceCounters(blocks=3, downlink_bytes=7))
    roster.conducted(identity, Conduct(slowness=2.0))
    roster.faulted(identity, "wrong", 1.0)
    roster.departed(identity, "gone", lost=True)
    reported(roster, members)
    assert roster.reports() == []
    after = stored(access, identity)
    assert after.sessions == before.sessions + 1
    assert after.done.blocks == 3
    assert after.conduct.slowness == 2.0
    assert after.absence is Departure.LOST
    # A device does not leave its faults behind by being sent on.
    told(roster, members)
    again = roster.admit(hello, HERE)
    assert isinstance(again, Admission)
    assert (again.faults, again.penalty, again.conduct.slowness) == (1, 1.0, 2.0)


def test_a_quarantine_holds_everywhere(members: Members, roster: Roster, access: Access) -> None:
    hello, identity = joined(members, access)
    told(roster, members)
    roster.quarantined(identity, "wrong results")
    assert isinstance(roster.admit(hello, HERE), Refusal)
    reported(roster, members)
    assert members.all() == []
    refusal = members.admit(hello, HERE)
    assert isinstance(refusal, Refusal)
    assert refusal.code is ErrorCode.QUARANTINED
    assert stored(access, identity).standing is AccessStatus.QUARANTINED


def test_one_that_is_thrown_out_is_not_made_known_again(
    members: Members, roster: Roster, access: Access
) -> None:
    hello, identity = joined(members, access)
    told(roster, members)
    members.conducted(identity, Conduct(slowness=3.0))
    members.forget(identity)
    roster.forget(identity)
    told(roster, members)
    assert isinstance(roster.admit(hello, HERE), Refusal)


def test_a_mark_reaches_all_servers(members: Members, roster: Roster, access: Access) -> None:
    hello, identity = joined(members, access)
    told(roster, members)
    members.mark_own(identity, own=True)
    told(roster, members)
    admission: Any = roster.admit(hello, HERE)
    assert admission.own
