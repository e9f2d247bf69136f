"""What operators ask, and how jobs are remembered."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cleave.errors import CleaveError, UsageError
from cleave.protocol.messages import ErrorCode, Hello, Role
from cleave.scheduler.admission import Admission, Contribution, Refusal
from cleave.server.api.device_admin import Desk
from cleave.server.auth.access import Access
from cleave.server.store.job_history import STEPS_WRITTEN_S, JobHistory
from cleave.server.store.store import Store
from tests.server.clocks import Clock


class Sessions:
    """A server with these sessions."""

    def __init__(self, access: Access) -> None:
        self.dashboard_url = "http://x/#c=look"
        self.here: list[dict[str, object]] = []
        self.ended: list[tuple[int, ErrorCode, str]] = []
        self._access = access

    def describe_devices(self) -> list[dict[str, object]]:
        return self.here

    def join_page_url(self, credential: str) -> str:
        return f"http://x/join#c={credential}"

    def join_url(self, credential: str) -> str:
        return f"ws://x/ws#c={credential}"

    def end_identity(self, identity: int, code: ErrorCode, reason: str) -> None:
        self.ended.append((identity, code, reason))
        self.here = [s for s in self.here if s["identity"] != identity]

    def credit(self) -> None:
        for session in self.here:
            if isinstance(session["identity"], int):
                self._access.contributed(session["identity"], Contribution(blocks=1))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def access(clock: Clock) -> Iterator[Access]:
    access = Access(Store(None), "token", clocks=clock.clocks)
    yield access
    access.close()


@pytest.fixture
def desk(access: Access, clock: Clock) -> Desk:
    desk = Desk(access, access.store.jobs, clock)
    desk.sessions = Sessions(access)
    return desk


def sessions(desk: Desk) -> Sessions:
    assert isinstance(desk.sessions, Sessions)
    return desk.sessions


def pair(desk: Desk, access: Access, name: str) -> int:
    code = desk.answer("pair", {})
    assert code["url"] == f"ws://x/ws#c={code['code']}"
    assert code["page_url"] == f"http://x/join#c={code['code']}"
    verdict = access.admit(Hello(Role.DEVICE, name=name, credential=code["code"]), "")
    assert isinstance(verdict, Admission)
    assert verdict.identity is not None
    return verdict.identity


def here(identity: int | None, name: str = "x") -> dict[str, object]:
    return {
        "device": 1, "identity": identity, "name": name, "state": "busy", "reason": "",
        "blocks": 1, "compute_s": 0.5, "failures": 0, "failure": "",
    }  # fmt: skip


def states(desk: Desk) -> dict[str, tuple[str, str]]:
    devices = desk.answer("devices", {})["devices"]
    return {d["name"]: (d["state"], d["reason"]) for d in devices}


def test_every_device_has_a_state_and_a_reason(desk: Desk, access: Access) -> None:
    ids = {name: pair(desk, access, name) for name in ("a", "b", "c", "d", "e")}
    sessions(desk).here = [here(ids["a"]), here(None, "stranger")]
    access.departed(ids["b"], "drained", lost=False)
    access.departed(ids["c"], "the connection broke", lost=True)
    access.quarantined(ids["d"], "3 wrong results")
    desk.answer("revoke", {"device": "e", "reason": "sold\n"})
    assert states(desk) == {
        "a": ("busy", ""),
        "b": ("away", "drained"),
        "c": ("lost", "the connection broke"),
        "d": ("quarantined", "3 wrong results"),
        "e": ("revoked", "sold"),
        "stranger": ("busy", ""),
    }
    devices = desk.answer("devices", {})["devices"]
    assert [d["blocks"] for d in devices if d["name"] == "a"] == [3]  # up to this moment


def test_revoking_ends_the_session_and_lasts(desk: Desk, access: Access) -> None:
    id = pair(desk, access, "a")
    sessions(desk).here = [here(id)]
    answer = desk.answer("revoke", {"device": "a", "reason": "sold"})
    assert answer["device"]["state"] == "revoked"
    ((ended, code, reason),) = sessions(desk).ended
    assert (ended, code) == (id, ErrorCode.CREDENTIAL)
    assert "sold" in reason
    with pytest.raises(UsageError, match="cleave pair"):
        desk.answer("release", {"device": "a"})


def test_codes_are_listed_and_made_void(desk: Desk, access: Access, clock: Clock) -> None:
    many = desk.answer("pair", {"uses": 3, "life_s": 60})
    for name in ("a", "b"):
        access.admit(Hello(Role.DEVICE, name=name, credential=many["code"]), "")
    once = desk.answer("pair", {"life_s": 600})
    (first, second) = desk.answer("codes", {})["codes"]
    assert (first["id"], first["used"], first["uses"]) == (many["id"], 2, 3)
    assert (first["state"], first["devices"]) == ("open", ["a", "b"])
    assert (first["made_s"], first["expires_s"]) == (clock(), clock() + 60)
    assert (second["id"], second["state"], second["devices"]) == (once["id"], "open", [])
    assert many["code"] not in str([first, second])
    answer = desk.answer("void", {"code": once["id"]})
    assert (answer["code"]["state"], answer["unwritten"]) == ("void", "")
    with pytest.raises(UsageError, match=r"is void.*nothing was changed"):
        desk.answer("void", {"code": once["id"]})
    clock.now_s += 60
    states = [code["state"] for code in desk.answer("codes", {})["codes"]]
    assert states == ["expired", "void"]
    for unknown in (99, "1", None, True):
        with pytest.raises(UsageError, match="cleave pair --list"):
            desk.answer("void", {"code": unknown})


def test_revoking_makes_the_code_void_that_a_device_came_by(desk: Desk, access: Access) -> None:
    code = desk.answer("pair", {"uses": 5})
    for name in ("a", "b"):
        access.admit(Hello(Role.DEVICE, name=name, credential=code["code"]), "")
    answer = desk.answer("revoke", {"device": "a"})
    (void,) = answer["codes"]
    assert (void["id"], void["state"], void["used"], void["uses"]) == (code["id"], "void", 2, 5)
    assert desk.answer("revoke", {"device": "b"})["codes"] == []  # it was void already
    assert isinstance(access.admit(Hello(Role.DEVICE, credential=code["code"]), ""), Refusal)


def test_without_a_server_what_cannot_be_written_is_refused(tmp_path: Path, clock: Clock) -> None:
    store = Store(tmp_path / "store.db", busy_s=0.001)
    access = Access(store, "token", clocks=clock.clocks)
    code = access.pair()
    access.admit(Hello(Role.DEVICE, name="a", credential=code.text), "")
    access.ledger.flush()
    desk = Desk(access, store.jobs, clock)
    other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(CleaveError, match=r"could not be written.*locked.*a is revoked"):
        desk.answer("revoke", {"device": "a"})
    other.close()
    access.close()
    store.close()


def test_releasing_ends_a_quarantine(desk: Desk, access: Access) -> None:
    id = pair(desk, access, "a")
    with pytest.raises(UsageError, match="not in quarantine"):
        desk.answer("release", {"device": "a"})
    access.quarantined(id, "lies")
    assert desk.answer("release", {"device": str(id)})["device"]["state"] == "away"


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "no such device": ("revoke", {"device": "nobody"}),
    "no device": ("release", {}),
    "no count": ("pair", {"uses": "many"}),
    "no bool": ("pair", {"uses": True}),
    "no time": ("pair", {"life_s": None}),
    "nan": ("pair", {"life_s": float("nan")}),
    "negative": ("pair", {"uses": -1}),
    "unknown": ("dance", {}),
}


@pytest.mark.parametrize(("action", "arguments"), BAD.values(), ids=BAD)
def test_bad_requests_are_refused(desk: Desk, action: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        desk.answer(action, arguments)


def test_without_a_server_devices_are_known_and_nobody_is_paired(
    desk: Desk, access: Access
) -> None:
    pair(desk, access, "a")
    desk.sessions = None
    assert states(desk) == {"a": ("away", "")}
    assert desk.answer("revoke", {"device": "a"})["device"]["state"] == "revoked"
    with pytest.raises(CleaveError, match="cleave serve"):
        desk.answer("pair", {})


# --- jobs ---


def test_a_job_is_remembered_as_it_goes(access: Access, desk: Desk, clock: Clock) -> None:
    history = JobHistory(access.store, access.ledger, clock)
    assert history.next_number == 1
    history.submitted(1, "opt-nano")
    clock.now_s += 1
    history.changed(1, "running")
    for step in (1, 2, 3):
        history.reported(1, {"event": "step", "step": step, "loss": 4.0 / step})
    access.ledger.flush()
    (written,) = access.store.jobs()
    assert (written.state, written.steps) == ("running", 1)  # not each step by itself
    clock.now_s += STEPS_WRITTEN_S
    history.reported(1, {"event": "step", "step": 4, "loss": 1.0})
    history.reported(1, {"event": "step", "step": 5, "loss": 0.5})
    history.reported(1, {"event": "done", "run_folder": "runs/x"})
    history.changed(1, "done")
    access.ledger.flush()
    (job,) = desk.answer("history", {})["jobs"]
    assert job == {
        "job": "job-1", "model": "opt-nano", "state": "done", "reason": "",
        "submitted_s": 1e9, "started_s": 1e9 + 1, "ended_s": clock(), "steps": 5, "loss": 0.5,
        "run_folder": "runs/x",
    }  # fmt: skip


def test_jobs_that_a_server_took_with_it_are_interrupted(access: Access, clock: Clock) -> None:
    history = JobHistory(access.store, access.ledger, clock)
    for number in (1, 2, 3):
        history.submitted(number, "opt-nano")
    history.changed(1, "done")
    history.changed(2, "running")
    history.reported(2, {"event": "start", "step": 0, "steps": 9, "run_folder": "/runs/a b"})
    access.ledger.flush()
    later = JobHistory(access.store, access.ledger, clock)
    assert later.next_number == 4
    assert [job.state for job in later.all()] == ["done", "interrupted", "interrupted"]
    assert [job.number for job in later.interrupted] == [2, 3]
    assert "server ended" in later.all()[1].reason
    assert "--resume '/runs/a b'" in later.all()[1].reason
    assert "submit it again" in later.all()[2].reason
    access.ledger.flush()
    assert [job.state for job in access.store.jobs()] == ["done", "interrupted", "interrupted"]
