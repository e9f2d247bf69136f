"""Devices are let in by all servers with one credential, and the first learns what others do."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace

import pytest

from cleave.cluster.membership import Members, Membership
from cleave.protocol.device_counters import DeviceCounters
from cleave.protocol.messages import ErrorCode, Hello, Role
from cleave.scheduler.sessions.admission import Admission, Behavior, Refusal
from cleave.server.access import Access
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
def membership(access: Access) -> Membership:
    return Membership(access.server)


def joined(members: Members, access: Access, *, own: bool = False) -> tuple[Hello, int]:
    """A device that joined the first server with a code; what it says from then on, and who it
    is."""
    code = access.pair(own=own).text
    admission = members.admit(replace(HELLO, credential=code), HERE)
    assert isinstance(admission, Admission)
    assert admission.identity is not None
    return replace(HELLO, credential=admission.credential), admission.identity


def told(membership: Membership, members: Members) -> None:
    """What the first server says goes to another process."""
    membership.replace(pickle.loads(pickle.dumps(members.roll())))


def reported(membership: Membership, members: Members, taken: int = 0) -> int:
    """Take what a server learnt; return the number of reports."""
    reports, number = pickle.loads(pickle.dumps(membership.reports(taken)))
    for report in reports:
        report(members)
    return int(number)


def stored(access: Access, identity: int) -> DeviceRecord:
    access.writer.flush()
    return next(device for device in access.store.devices() if device.id == identity)


def test_a_device_shows_the_credential_of_the_first_server_at_all(
    members: Members, membership: Membership, access: Access
) -> None:
    hello, identity = joined(members, access, own=True)
    told(membership, members)
    admission = membership.admit(hello, HERE)
    assert isinstance(admission, Admission)
    assert (admission.identity, admission.own, admission.name) == (identity, True, "phone")
    assert admission.credential == ""
    assert membership.server == access.server  # the device keeps its credential under that id
    measured = membership.admit(replace(hello, measure=True), HERE)
    assert isinstance(measured, Admission)
    assert measured.identity is None


def test_the_roll_has_a_new_version_with_every_change(members: Members, access: Access) -> None:
    before = members.roll()
    _, identity = joined(members, access)
    after = members.roll()
    assert (len(before.members), len(after.members)) == (0, 1)
    assert after.version > before.version
    assert members.roll() == after
    members.mark_own(identity, own=True)
    assert members.roll().version > after.version


def test_reports_are_kept_until_they_are_known_to_be_taken(
    members: Members, membership: Membership, access: Access
) -> None:
    hello, identity = joined(members, access)
    told(membership, members)
    membership.admit(hello, HERE)
    assert membership.reports(0)[1] == 1
    membership.faulted(identity, "wrong", 1.0)
    number = reported(membership, members)  # the answer before did not arrive
    assert number == 2
    assert access.statuses.faults_since(identity, 0.0) == (1, 1.0)
    assert membership.reports(number) == ([], 2)
    membership.departed(identity, "gone", lost=False)
    reports, number = membership.reports(number)
    assert (len(reports), number) == (1, 3)


@pytest.mark.parametrize("credential", ["", "guessed"])
def test_a_stranger_is_sent_back_and_not_refused_for_good(
    membership: Membership, credential: str
) -> None:
    refusal = membership.admit(replace(HELLO, credential=credential), HERE)
    assert isinstance(refusal, Refusal)
    assert refusal.code is ErrorCode.LIMIT
    assert refusal.retry_after_s > 0


def test_no_operator_is_let_in(membership: Membership) -> None:
    assert isinstance(membership.admit_operator("token", HERE), Refusal)
    assert isinstance(membership.admit_operator("", HERE), Refusal)


def test_a_fleet_credential_lets_in_whoever_shows_it() -> None:
    membership = Membership("id", "shared secret")
    assert membership.admit(replace(HELLO, credential="shared secret"), HERE) == Admission()
    assert isinstance(membership.admit(replace(HELLO, credential="other"), HERE), Refusal)
    assert isinstance(Membership("id").admit(HELLO, HERE), Refusal)


def test_the_first_server_stores_what_others_report(
    members: Members, membership: Membership, access: Access
) -> None:
    hello, identity = joined(members, access)
    told(membership, members)
    before = stored(access, identity)
    membership.admit(hello, HERE)
    membership.contributed(identity, DeviceCounters(blocks=3, downlink_bytes=7))
    membership.record_behavior(identity, Behavior(slowness=2.0))
    membership.faulted(identity, "wrong", 1.0)
    membership.departed(identity, "gone", lost=True)
    reported(membership, members)
    after = stored(access, identity)
    assert after.sessions == before.sessions + 1
    assert after.done.blocks == 3
    assert after.behavior.slowness == 2.0
    assert after.absence is Departure.LOST
    # A device does not leave its faults behind by being sent on.
    told(membership, members)
    again = membership.admit(hello, HERE)
    assert isinstance(again, Admission)
    assert (again.faults, again.penalty, again.behavior.slowness) == (1, 1.0, 2.0)


@pytest.mark.parametrize("where", ["the first", "another"])
def test_a_quarantine_holds_everywhere(members: Members, access: Access, where: str) -> None:
    hello, identity = joined(members, access)
    memberships = [Membership(access.server), Membership(access.server)]
    for membership in memberships:
        told(membership, members)
        assert isinstance(membership.admit(hello, HERE), Admission)
    if where == "the first":
        members.quarantined(identity, "wrong results")
    else:
        memberships[0].quarantined(identity, "wrong results")
        reported(memberships[0], members)
    assert members.roll().members == ()
    assert members.roll().expelled == {identity: (ErrorCode.QUARANTINED, "wrong results")}
    for membership in memberships:
        told(membership, members)
        assert isinstance(membership.admit(hello, HERE), Refusal)
    refusal = members.admit(hello, HERE)
    assert isinstance(refusal, Refusal)
    assert refusal.code is ErrorCode.QUARANTINED
    assert stored(access, identity).standing is AccessStatus.QUARANTINED


def test_a_quarantine_that_the_first_server_does_not_know_yet_is_not_undone(
    members: Members, membership: Membership, access: Access
) -> None:
    hello, identity = joined(members, access)
    told(membership, members)
    membership.faulted(identity, "wrong", 1.0)
    reported(membership, members)
    membership.quarantined(identity, "wrong results")
    told(membership, members)  # with the fault that was reported before
    membership.reports(1)
    assert isinstance(membership.admit(hello, HERE), Refusal)


@pytest.mark.parametrize("looks", [1, 0])
def test_one_that_was_let_in_again_is_let_in_everywhere(
    members: Members, membership: Membership, access: Access, looks: int
) -> None:
    """Also where all of that came about between two looks."""
    hello, identity = joined(members, access)
    told(membership, members)
    membership.quarantined(identity, "wrong results")
    taken = reported(membership, members)
    for _ in range(looks):
        told(membership, members)
        taken = reported(membership, members, taken)
        assert isinstance(membership.admit(hello, HERE), Refusal)
    access.statuses.decide(identity, "phone", AccessStatus.ADMITTED, "")
    assert isinstance(members.admit(hello, HERE), Admission)
    told(membership, members)
    reported(membership, members, taken)
    assert isinstance(membership.admit(hello, HERE), Admission)


def test_a_revocation_counts_more_than_a_quarantine_that_is_reported_late(
    members: Members, membership: Membership, access: Access
) -> None:
    hello, identity = joined(members, access)
    told(membership, members)
    membership.quarantined(identity, "wrong results")
    access.statuses.decide(identity, "phone", AccessStatus.REVOKED, "sold")
    members.expel(identity, ErrorCode.CREDENTIAL, "sold")
    members.record_behavior(identity, Behavior(slowness=3.0))
    reported(membership, members)
    told(membership, members)
    assert isinstance(membership.admit(hello, HERE), Refusal)
    assert stored(access, identity).standing is AccessStatus.REVOKED
