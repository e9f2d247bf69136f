"""Who may come in, and what the others are told."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.errors import UsageError
from cleave.protocol.device_counters import DeviceCounters
from cleave.protocol.messages import ErrorCode, Hello, Role
from cleave.scheduler.sessions.admission import (
    MAX_NAME,
    AccessLevel,
    Admission,
    Refusal,
    clean_name,
)
from cleave.server.access import (
    ALPHABET,
    CODE_LENGTH,
    MAX_USES,
    MEASUREMENT_KEPT_S,
    Access,
    KeyState,
    hash_secret,
    new_code,
    read_code,
)
from cleave.server.fleet_server import RELAY
from cleave.server.store.store import AccessStatus, Departure, DeviceRecord, Store
from cleave.transport.connection_limits import BURST, REFILL_S
from tests.scheduler.test_probe import UNKNOWN, Joining, right
from tests.server.clocks import Clock

HELLO = Hello(Role.DEVICE, name="phone")
HERE = "192.0.2.1"
TOKEN = "operator's token"
VIEWER = "viewer's token"


@pytest.fixture
def access(clock: Clock) -> Iterator[Access]:
    access = Access(Store(None), TOKEN, VIEWER, clocks=clock.clocks)
    yield access
    access.close()
    access.store.close()


def come(access: Access, credential: str = "", code: str = "", **changes: Any) -> Any:
    """A device that is let in."""
    verdict = access.admit(replace(HELLO, credential=credential, join_code=code, **changes), HERE)
    assert isinstance(verdict, Admission), verdict
    return verdict


def refused(access: Access, credential: str = "", code: str = "", address: str = HERE) -> Refusal:
    """A device that is not."""
    verdict = access.admit(replace(HELLO, credential=credential, join_code=code), address)
    assert isinstance(verdict, Refusal), verdict
    return verdict


@pytest.mark.parametrize("kind", ["phone", "tablet"])
def test_a_phone_is_measured_once_a_day_also_by_a_server_that_starts_again(
    access: Access, clock: Clock, kind: str
) -> None:
    """It cost a known phone 41 MB after each restart."""
    credential = come(access, code=access.pair().text).credential
    hello = replace(UNKNOWN, credential=credential, kind=kind)

    def moved_bytes(address: str = HERE) -> int:
        device = Joining(right, hello, auth=access, address=address).run()
        assert device.manager.ready_devices == 1
        access.writer.flush(None)
        return device.down_bytes + device.up_bytes

    first = moved_bytes()
    assert first > 1e6
    clock.now_s += MEASUREMENT_KEPT_S - 1
    assert moved_bytes() < 1e5  # its arithmetic is tested each time
    assert moved_bytes("192.0.2.2") == first  # another network
    assert moved_bytes() == first
    clock.now_s += MEASUREMENT_KEPT_S + 1
    assert moved_bytes() == first
    # The name of a relay does not tell networks apart.
    assert (moved_bytes(RELAY), moved_bytes(RELAY)) == (first, first)


def test_a_computer_that_joins_again_is_measured_again(access: Access) -> None:
    """Its machine or network may have been busy the first time."""
    credential = come(access, code=access.pair().text).credential
    hello = replace(UNKNOWN, credential=credential, kind="laptop")
    moved = []
    for _ in range(2):
        device = Joining(right, hello, auth=access, address=HERE).run()
        access.writer.flush(None)
        moved.append(device.down_bytes + device.up_bytes)
    assert moved[1] == moved[0] > 1e6


# --- codes ---


@given(st.integers())
def test_codes_are_read_as_they_are_meant(seed: int) -> None:
    code = new_code(random.Random(seed).choice)
    plain = code.replace("-", "")
    assert len(plain) == CODE_LENGTH
    assert len(ALPHABET) ** CODE_LENGTH >= 2**50
    typed = [code, plain, code.lower(), f" {code.replace('-', ' ')}\t", plain.replace("0", "o")]
    typed += [plain.replace("1", "l"), plain.replace("1", "I").replace("0", "O")]
    assert {read_code(text) for text in typed} == {plain}


@given(st.text())
def test_anything_may_be_typed(text: str) -> None:
    read = read_code(text)
    assert read == "" or (len(read) == CODE_LENGTH and set(read) <= set(ALPHABET))


# --- devices ---


def test_a_code_is_exchanged_for_a_credential_that_lasts(access: Access) -> None:
    code = access.pair()
    first = come(access, code.text)
    assert first.identity is not None
    assert first.name == "phone"
    assert len(first.credential) >= 43
    refusal = refused(access, code.text)
    assert refusal.code is ErrorCode.CREDENTIAL
    assert "used already" in refusal.reason
    again = come(access, first.credential)
    assert (again.identity, again.name, again.credential) == (first.identity, "phone", "")
    reserve = come(access, first.credential, code.text)  # as `cleave join URL` comes again
    assert reserve.identity == first.identity


def test_a_page_learns_what_its_key_is_worth_before_it_joins(access: Access, clock: Clock) -> None:
    def worth(key: str) -> str:
        return access.key_state(key, HERE).state

    code, other = access.pair(), access.pair(life_s=5)
    assert worth(code.text) == worth(code.text.lower()) == "open"
    device = come(access, code.text)  # asking has not used it up
    assert worth(code.text) == "used up"
    assert worth(device.credential) == "known"
    clock.now_s += 6
    assert worth(other.text) == "expired"
    access.statuses.decide(device.identity, "device 1", AccessStatus.QUARANTINED, "wrong")
    assert access.key_state(device.credential, HERE) == KeyState("quarantined")
    access.statuses.decide(device.identity, "device 1", AccessStatus.REVOKED, "lent out")
    assert access.key_state(device.credential, HERE) == KeyState("revoked", reason="lent out")
    access.statuses.decide(device.identity, "device 1", AccessStatus.QUARANTINED, "wrong")
    own = access.pair(own=True)
    assert access.key_state(own.text, HERE) == KeyState("open", own=True)
    paired = come(access, code=own.text).credential
    assert access.key_state(paired, HERE) == KeyState("known", own=True)
    assert worth("") == worth("7KQ4-MWX2-PDH9") == "unknown"
    while access._attempts.wait_s(HERE) <= 0:
        assert worth("AAAA-BBBB-CCCC") == "unknown"
    assert worth("AAAA-BBBB-CCCC") == ""  # too many were tried
    assert worth(device.credential) == "quarantined"


def test_secrets_are_not_stored(access: Access) -> None:
    code = access.pair()
    admission = come(access, code.text)
    dump = "\n".join(access.store._db.iterdump())
    assert admission.credential not in dump
    assert code.text not in dump
    assert read_code(code.text) not in dump
    assert hash_secret(admission.credential).hex() in dump.lower()


def test_an_expired_code_is_refused(access: Access, clock: Clock) -> None:
    code = access.pair(life_s=600)
    clock.now_s += 599.9
    other = access.pair(uses=2, life_s=0.1)
    come(access, code.text)
    clock.now_s += 0.1
    assert "expired" in refused(access, other.text).reason


def test_who_comes_by_a_code_for_own_devices_is_the_operators_own(access: Access) -> None:
    mine, other = come(access, access.pair(own=True).text), come(access, access.pair().text)
    assert (mine.own, other.own) == (True, False)
    assert come(access, mine.credential).own
    later = access.pair(own=True).text
    assert not come(access, other.credential, later).own  # it is known, and needs no code
    assert not come(access, access.pair(own=True).text, measure=True).own


@pytest.mark.parametrize(("uses", "life_s"), [(0, 1), (MAX_USES + 1, 1), (1, 0), (1, 1e9)])
def test_codes_that_make_no_sense(access: Access, uses: int, life_s: float) -> None:
    with pytest.raises(UsageError, match="join code"):
        access.pair(uses, life_s)
    with pytest.raises(UsageError, match="at most 43200 minutes, not -1"):
        access.pair(1, -60)


def test_strangers_are_told_what_is_wrong(access: Access) -> None:
    assert "got neither" in refused(access).reason
    assert "does not know this join code" in refused(access, "0000-0000-0000").reason
    assert "is not a join code such as" in refused(access, "nonsense").reason
    assert "does not know this credential" in refused(access, "x" * 43).reason
    assert not access.store.devices()


def test_a_revoked_device_is_refused_until_it_has_a_new_code(access: Access, clock: Clock) -> None:
    device = come(access, access.pair().text)
    access.store.stand(device.identity, AccessStatus.REVOKED, "sold", clock())
    refusal = refused(access, device.credential, access.pair(life_s=1e-9).text)
    assert refusal.code is ErrorCode.CREDENTIAL
    assert "revoked: sold" in refusal.reason
    new = come(access, device.credential, access.pair().text)
    assert new.identity != device.identity
    assert new.name == "phone-2"


def test_quarantine_lasts_and_can_be_lifted(access: Access) -> None:
    device = come(access, access.pair().text)
    access.quarantined(device.identity, "3 wrong results")
    refusal = refused(access, device.credential, access.pair().text)
    assert refusal.code is ErrorCode.QUARANTINED
    assert "3 wrong results" in refusal.reason
    access.statuses.decide(device.identity, "phone", AccessStatus.ADMITTED, "")
    assert come(access, device.credential).identity == device.identity


def test_wrong_results_count_for_a_day(access: Access, clock: Clock) -> None:
    device = come(access, access.pair().text)
    access.faulted(device.identity, "wrong", 1.5)
    clock.now_s += 80000
    access.faulted(device.identity, "wrong", 1.5)
    assert come(access, device.credential).penalty == 3.0
    clock.now_s += 10000
    assert come(access, device.credential).faults == 1


def test_measuring_uses_no_code_up_and_is_nobody(access: Access) -> None:
    code = access.pair()
    assert come(access, code.text, measure=True) == Admission(measured_by="code 1")
    device = come(access, code.text)
    measured = come(access, device.credential, measure=True)
    assert measured == Admission(measured_by="device 1", measures=device.identity)
    assert (measured.identity, measured.known_as) == (None, device.identity)


def test_a_fleet_with_one_credential_is_not_kept() -> None:
    access = Access(Store(None), TOKEN, fleet_credential="shared")
    assert come(access, "shared") == come(access, "another server's", "shared") == Admission()
    assert not come(access, "shared").own
    assert not access.store.devices()
    assert come(access, access.pair().text).identity is not None
    access.close()


def test_the_device_on_the_servers_computer_is_own_and_not_kept() -> None:
    access = Access(Store(None), TOKEN, fleet_credential="shared", own_credential="mine")
    assert come(access, "mine") == Admission(own=True, here=True)
    assert not access.store.devices()
    assert refused(Access(Store(None), TOKEN), "").code is ErrorCode.CREDENTIAL
    access.close()


@pytest.mark.parametrize("name", ["", "\n", "a\x1b[31mb\nc", "x" * 4096, "\u202e", "ключ 📱"])
def test_names_can_be_shown(access: Access, name: str) -> None:
    shown = come(access, access.pair().text, name=name).name
    assert shown == clean_name(name) or shown == "device"
    assert 0 < len(shown) <= MAX_NAME
    assert shown.isprintable()


# --- attempts ---


def test_guessing_is_limited_per_address(access: Access, clock: Clock) -> None:
    code, known = access.pair(), come(access, access.pair().text)
    for _ in range(BURST):
        assert refused(access, "0000-0000-0000").code is ErrorCode.CREDENTIAL
    refusal = refused(access, code.text)  # even the right one
    assert refusal.code is ErrorCode.LIMIT
    assert HERE in refusal.reason
    assert come(access, known.credential).identity == known.identity  # it may share the address
    assert refused(access, "0000-0000-0000", address="192.0.2.2").code is ErrorCode.CREDENTIAL
    clock.now_s += REFILL_S
    come(access, code.text)


def test_operators_show_a_token(access: Access) -> None:
    assert access.admit_operator(TOKEN, HERE) is AccessLevel.OPERATOR
    assert access.admit_operator(VIEWER, HERE) is AccessLevel.VIEWER
    for _ in range(BURST):
        refusal = access.admit_operator("guess", HERE)
        assert isinstance(refusal, Refusal)
        assert refusal.code is ErrorCode.CREDENTIAL
    limited = access.admit_operator("guess", HERE)
    assert isinstance(limited, Refusal)
    assert limited.code is ErrorCode.LIMIT
    assert access.admit_operator(TOKEN, HERE) is AccessLevel.OPERATOR
    assert access.admit_operator(VIEWER, HERE) is AccessLevel.VIEWER


def test_without_a_viewers_token_nobody_only_looks(clock: Clock) -> None:
    with closing(Access(Store(None), TOKEN, clocks=clock.clocks)) as access:
        assert isinstance(access.admit_operator("", HERE), Refusal)


# --- what is written ---


def test_what_devices_did_is_written_in_batches(access: Access, clock: Clock) -> None:
    device = come(access, access.pair().text)
    id = device.identity
    for _ in range(1000):
        access.contributed(id, DeviceCounters(1, 2.0, 3, 4, 0.5, 0.25))
    clock.now_s += 5
    access.departed(id, "the connection broke", lost=True)
    access.writer.flush()
    found = access.store.device(id)
    assert found is not None
    assert found.done == DeviceCounters(1000, 2000.0, 3000, 4000, 500.0, 250.0)
    assert (found.sessions, found.losses, found.absence) == (1, 1, Departure.LOST)
    assert (found.absence_reason, found.seen_s) == ("the connection broke", clock())


def test_a_store_that_fails_refuses_and_says_so(clock: Clock, notes: list[str]) -> None:
    access = Access(Store(None), TOKEN, clocks=clock.clocks)
    device = come(access, access.pair().text)
    access.writer.flush()
    access.store.close()
    assert refused(access, device.credential).code is ErrorCode.LIMIT
    access.faulted(device.identity, "wrong", 1.5)
    access.contributed(device.identity, DeviceCounters(blocks=1))
    access.writer.flush()
    assert "cannot be used" in access.writer.trouble
    access.quarantined(device.identity, "lies")
    access.close()
    assert sum("cannot be used" in text for text in notes) == 2  # refused, and cannot be written
    what = f"device {device.identity} is quarantined (lies)"
    assert sum("this is in effect" in text and what in text for text in notes) == 1
    assert "never written" in notes[-1]
    assert what in notes[-1]


# --- what is decided holds, whatever becomes of the store ---


class Trouble:
    """A store on a file, and what keeps it from being written."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path = path
        self.clock = clock
        self.store = Store(path, busy_s=0.001)
        self.access = self.opened(self.store)
        self._locker: sqlite3.Connection | None = None

    def opened(self, store: Store) -> Access:
        return Access(store, TOKEN, clocks=self.clock.clocks, retry_s=0.001)

    def begin(self, kind: str) -> None:
        """Nothing can be written from now on."""
        self.access.writer.flush()
        if kind == "locked":
            self._locker = sqlite3.connect(self.path, isolation_level=None)
            self._locker.execute("BEGIN IMMEDIATE")
        else:
            self.store._db.execute("PRAGMA max_page_count = 1")  # SQLITE_FULL

    def end(self) -> None:
        """Everything can be written again; and is."""
        if self._locker is not None:
            self._locker.close()
        self.store._db.execute("PRAGMA max_page_count = 1000000")
        while self.access.writer.trouble:
            self.access.writer.flush()

    def again(self) -> Access:
        """The server is started again."""
        self.access.close()
        self.store.close()
        self.store = Store(self.path)
        self.access = self.opened(self.store)
        return self.access


@pytest.fixture
def trouble(tmp_path: Path, clock: Clock) -> Iterator[Trouble]:
    trouble = Trouble(tmp_path / "store.db", clock)
    yield trouble
    trouble.access.close()
    trouble.store.close()


LONG = "lies " * 2000  # more than a page of the database, so that a full one cannot take it


@pytest.mark.parametrize("kind", ["locked", "full"])
def test_what_is_decided_holds_at_once_and_is_written_when_it_can_be(
    trouble: Trouble, kind: str, notes: list[str]
) -> None:
    access, store = trouble.access, trouble.store
    code = access.pair(uses=5)
    liar, sold, honest = (come(access, code.text) for _ in range(3))
    trouble.begin(kind)
    access.quarantined(liar.identity, LONG)
    record = store.device(sold.identity)
    assert record is not None
    access.statuses.decide(sold.identity, "phone-2", AccessStatus.REVOKED, LONG)
    assert [void.id for void in access.void_codes_of(record)] == [code.record.id]
    while not any("is revoked" in text for text in notes):  # said by the writer's own thread
        access.writer.flush()
    assert "is revoked" in access.writer.trouble
    # Nothing of it is in the store, and all of it holds.
    for device in (liar, sold):
        written = store.device(device.identity)
        assert written is not None
        assert written.standing is AccessStatus.ADMITTED
    assert refused(access, liar.credential).code is ErrorCode.QUARANTINED
    assert refused(access, sold.credential).code is ErrorCode.CREDENTIAL
    assert refused(access, sold.credential, code.text).code is ErrorCode.CREDENTIAL
    assert "void" in refused(access, code.text).reason
    assert come(access, honest.credential).identity == honest.identity
    # It is said, once each.
    assert sum("is revoked" in text for text in notes) == 1
    assert sum("device 1 is quarantined" in text for text in notes) == 1
    trouble.end()
    assert "up to date" in notes[-1]
    again = trouble.again()
    assert refused(again, liar.credential).code is ErrorCode.QUARANTINED
    assert "void" in refused(again, code.text).reason
    assert come(again, honest.credential).identity == honest.identity


def test_the_latest_decision_is_what_is_written(trouble: Trouble) -> None:
    access = trouble.access
    device = come(access, access.pair().text)
    trouble.begin("locked")
    for _ in range(2):
        access.faulted(device.identity, "wrong", 1.0)
    access.quarantined(device.identity, "lies")
    access.statuses.decide(device.identity, "phone", AccessStatus.ADMITTED, "")
    assert come(access, device.credential).faults == 0  # released: they count no more
    access.faulted(device.identity, "wrong", 1.0)
    assert come(access, device.credential).faults == 1
    trouble.end()
    assert come(trouble.again(), device.credential).faults == 1
    found = trouble.store.device(device.identity)
    assert found is not None
    assert (found.standing, found.faults) == (AccessStatus.ADMITTED, 3)


def test_whose_a_device_is_holds_at_once_and_the_latest_word_is_written(trouble: Trouble) -> None:
    access, store = trouble.access, trouble.store
    device = come(access, access.pair(own=True).text)
    trouble.begin("locked")
    for own in (False, True, False):
        access.statuses.mark_own(device.identity, "phone", own)
        assert come(access, device.credential).own is own
    access.writer.flush()
    assert "phone is not the operator's own" in access.writer.trouble
    found = store.device(device.identity)
    assert found is not None
    assert found.own
    trouble.end()
    assert not come(access, device.credential).own
    assert not come(trouble.again(), device.credential).own


# --- revoked devices and the codes they came by ---


def test_a_revoked_device_does_not_come_back_as_another(access: Access) -> None:
    classroom, other = access.pair(uses=30), access.pair(uses=2)
    thief, honest = come(access, classroom.text), come(access, classroom.text)
    come(access, other.text)
    record = access.store.device(thief.identity)
    assert record is not None
    access.statuses.decide(thief.identity, record.name, AccessStatus.REVOKED, "stolen")
    assert [code.id for code in access.void_codes_of(record)] == [classroom.record.id]
    for credential in ("", thief.credential, "x" * 43):
        refusal = refused(access, credential, classroom.text, address=f"192.0.2.{len(credential)}")
        assert refusal.code is ErrorCode.CREDENTIAL
        assert "stolen" not in refusal.reason or credential == thief.credential
    assert come(access, honest.credential).identity == honest.identity
    assert come(access, other.text).identity is not None
    assert access.void_codes_of(record) == []


def test_a_revocation_that_is_written_while_the_store_is_read_holds(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the store too late, and not in memory any more when that is asked."""
    with (
        closing(Store(tmp_path / "store.db")) as store,
        closing(Access(store, TOKEN, clocks=clock.clocks)) as access,
    ):
        first = come(access, access.pair(uses=9).text)
        (device,) = store.devices()
        read = store.device_of

        def then_revoked(hash: bytes) -> DeviceRecord | None:
            found = read(hash)
            monkeypatch.setattr(store, "device_of", read)
            access.statuses.decide(device.id, "phone", AccessStatus.REVOKED, "lost")
            access.writer.flush()
            return found

        monkeypatch.setattr(store, "device_of", then_revoked)
        assert "revoked" in refused(access, first.credential).reason
