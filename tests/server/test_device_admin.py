"""What operators ask, and how jobs are remembered."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cleave.errors import CleaveError, UsageError
from cleave.protocol.device_counters import DeviceCounters
from cleave.protocol.messages import ErrorCode, Hello, Role
from cleave.scheduler.sessions.admission import Admission
from cleave.server.access import Access
from cleave.server.api.device_admin import DeviceAdmin
from cleave.server.store.job_history import STEPS_WRITTEN_S, JobHistory
from cleave.server.store.store import Store
from tests.server.clocks import Clock


class Sessions:
    """A server with these sessions."""

    def __init__(self, access: Access) -> None:
        self.dashboard_url = "http://x/#c=look"
        self.here: list[dict[str, object]] = []
        self.ended: list[tuple[int, ErrorCode, str]] = []
        self.marked: list[tuple[int, bool]] = []
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

    def mark_own(self, identity: int, own: bool) -> None:
        self.marked.append((identity, own))

    def progress(self) -> None:
        return None

    def credit(self) -> None:
        for session in self.here:
            if isinstance(session["identity"], int):
                self._access.contributed(session["identity"], DeviceCounters(blocks=1))


@pytest.fixture
def access(clock: Clock) -> Iterator[Access]:
    access = Access(Store(None), "token", clocks=clock.clocks)
    yield access
    access.close()


@pytest.fixture
def device_admin(access: Access, clock: Clock) -> DeviceAdmin:
    device_admin = DeviceAdmin(access, access.store.jobs, clock)
    device_admin.sessions = Sessions(access)
    return device_admin


def sessions(device_admin: DeviceAdmin) -> Sessions:
    assert isinstance(device_admin.sessions, Sessions)
    return device_admin.sessions


def pair(device_admin: DeviceAdmin, access: Access, name: str) -> int:
    code = device_admin.answer("pair", {})
    assert code["url"] == f"ws://x/ws#c={code['code']}"
    assert code["page_url"] == f"http://x/join#c={code['code']}"
    verdict = access.admit(Hello(Role.DEVICE, name=name, credential=code["code"]), "")
    assert isinstance(verdict, Admission)
    assert verdict.identity is not None
    return verdict.identity


def here(identity: int | None, name: str = "x") -> dict[str, object]:
    return {
        "device": 1, "identity": identity, "own": False, "name": name, "state": "busy",
        "reason": "",
        "blocks": 1, "compute_s": 0.5, "failures": 0, "failure": "",
    }  # fmt: skip


def states(device_admin: DeviceAdmin) -> dict[str, tuple[str, str]]:
    devices = device_admin.answer("devices", {})["devices"]
    return {d["name"]: (d["state"], d["reason"]) for d in devices}


def test_every_device_has_a_state_and_a_reason(device_admin: DeviceAdmin, access: Access) -> None:
    ids = {name: pair(device_admin, access, name) for name in ("a", "b", "c", "d", "e")}
    sessions(device_admin).here = [here(ids["a"]), here(None, "stranger")]
    access.departed(ids["b"], "drained", lost=False)
    access.departed(ids["c"], "the connection broke", lost=True)
    access.quarantined(ids["d"], "3 wrong results")
    device_admin.answer("revoke", {"device": "e", "reason": "sold\n"})
    assert states(device_admin) == {
        "a": ("busy", ""),
        "b": ("away", "drained"),
        "c": ("lost", "the connection broke"),
        "d": ("quarantined", "3 wrong results"),
        "e": ("revoked", "sold"),
        "stranger": ("busy", ""),
    }
    devices = device_admin.answer("devices", {})["devices"]
    assert [d["blocks"] for d in devices if d["name"] == "a"] == [3]  # up to this moment


def test_work_counts_in_its_hour_before_and_after_it_is_written(
    device_admin: DeviceAdmin, access: Access, clock: Clock
) -> None:
    hour = int(clock.now_s // 3600)
    device = pair(device_admin, access, "a")
    access.contributed(device, DeviceCounters(flops=5.0))
    assert device_admin.flops_by_hour() == [(hour, 5.0)]
    assert access.writer.flush()
    access.contributed(device, DeviceCounters(flops=2.0))
    assert device_admin.flops_by_hour() == [(hour, 7.0)]
    clock.now_s += 3600
    assert access.writer.flush()
    assert device_admin.flops_by_hour() == [(hour, 5.0), (hour + 1, 2.0)]


def test_revoking_ends_the_session_and_lasts(device_admin: DeviceAdmin, access: Access) -> None:
    id = pair(device_admin, access, "a")
    sessions(device_admin).here = [here(id)]
    answer = device_admin.answer("revoke", {"device": "a", "reason": "sold"})
    assert answer["device"]["state"] == "revoked"
    ((ended, code, reason),) = sessions(device_admin).ended
    assert (ended, code) == (id, ErrorCode.CREDENTIAL)
    assert "sold" in reason
    with pytest.raises(UsageError, match="cleave pair"):
        device_admin.answer("release", {"device": "a"})


def test_codes_are_listed_and_made_void(
    device_admin: DeviceAdmin, access: Access, clock: Clock
) -> None:
    many = device_admin.answer("pair", {"uses": 3, "life_s": 60})
    for name in ("a", "b"):
        access.admit(Hello(Role.DEVICE, name=name, credential=many["code"]), "")
    once = device_admin.answer("pair", {"life_s": 600})
    (first, second) = device_admin.answer("codes", {})["codes"]
    assert (first["id"], first["used"], first["uses"]) == (many["id"], 2, 3)
    assert (first["state"], first["devices"]) == ("open", ["a", "b"])
    assert (first["made_s"], first["expires_s"]) == (clock(), clock() + 60)
    assert (second["id"], second["state"], second["devices"]) == (once["id"], "open", [])
    assert many["code"] not in str([first, second])
    answer = device_admin.answer("void", {"code": once["id"]})
    assert (answer["code"]["state"], answer["unwritten"]) == ("void", "")
    with pytest.raises(UsageError, match=r"is void.*nothing was changed"):
        device_admin.answer("void", {"code": once["id"]})
    clock.now_s += 60
    states = [code["state"] for code in device_admin.answer("codes", {})["codes"]]
    assert states == ["expired", "void"]
    for unknown in (99, "1", None, True):
        with pytest.raises(UsageError, match=r"no join code .*; use one of 1, 2"):
            device_admin.answer("void", {"code": unknown})


def owned(device_admin: DeviceAdmin) -> dict[str, bool]:
    return {d["name"]: d["own"] for d in device_admin.answer("devices", {})["devices"]}


def test_devices_are_the_operators_own_by_their_code_or_by_its_word(
    device_admin: DeviceAdmin, access: Access
) -> None:
    code = device_admin.answer("pair", {"own": True})
    access.admit(Hello(Role.DEVICE, name="mine", credential=code["code"]), "")
    id = pair(device_admin, access, "a")
    sessions(device_admin).here = [here(None, "stranger")]
    assert code["own"] is True
    assert [c["own"] for c in device_admin.answer("codes", {})["codes"]] == [True, False]
    assert owned(device_admin) == {"mine": True, "a": False, "stranger": False}
    answer = device_admin.answer("own", {"device": "a"})
    assert (answer["device"]["name"], answer["device"]["own"]) == ("a", True)
    assert answer["unwritten"] == ""
    device_admin.answer("own", {"device": "mine", "own": False})
    assert owned(device_admin) == {"mine": False, "a": True, "stranger": False}
    assert sessions(device_admin).marked == [(id, True), (1, False)]
    device_admin.answer("own", {"device": "a", "own": True})  # once more changes nothing
    device_admin.answer("revoke", {"device": "a"})
    with pytest.raises(UsageError, match="cleave pair --own"):
        device_admin.answer("own", {"device": "a"})
    device_admin.answer("own", {"device": "a", "own": False})
    assert owned(device_admin)["a"] is False


def test_without_a_server_what_cannot_be_written_is_refused(tmp_path: Path, clock: Clock) -> None:
    store = Store(tmp_path / "store.db", busy_s=0.001)
    access = Access(store, "token", clocks=clock.clocks)
    code = access.pair()
    access.admit(Hello(Role.DEVICE, name="a", credential=code.text), "")
    access.writer.flush()
    device_admin = DeviceAdmin(access, store.jobs, clock)
    other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(CleaveError, match=r"could not be written.*locked.*a is revoked"):
        device_admin.answer("revoke", {"device": "a"})
    other.close()
    access.close()
    store.close()


def test_releasing_ends_a_quarantine(device_admin: DeviceAdmin, access: Access) -> None:
    id = pair(device_admin, access, "a")
    with pytest.raises(UsageError, match="not in quarantine"):
        device_admin.answer("release", {"device": "a"})
    access.quarantined(id, "lies")
    assert device_admin.answer("release", {"device": str(id)})["device"]["state"] == "away"


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "no such device": ("revoke", {"device": "nobody"}),
    "no device": ("release", {}),
    "no count": ("pair", {"uses": "many"}),
    "no bool": ("pair", {"uses": True}),
    "no word": ("pair", {"own": 1}),
    "own of nobody": ("own", {"device": "nobody"}),
    "no time": ("pair", {"life_s": None}),
    "nan": ("pair", {"life_s": float("nan")}),
    "negative": ("pair", {"uses": -1}),
    "unknown": ("dance", {}),
}


@pytest.mark.parametrize(("action", "arguments"), BAD.values(), ids=BAD)
def test_bad_requests_are_refused(
    device_admin: DeviceAdmin, action: str, arguments: dict[str, Any]
) -> None:
    with pytest.raises(UsageError):
        device_admin.answer(action, arguments)


def test_without_a_server_devices_are_known_and_nobody_is_paired(
    device_admin: DeviceAdmin, access: Access
) -> None:
    pair(device_admin, access, "a")
    device_admin.sessions = None
    assert states(device_admin) == {"a": ("away", "")}
    assert device_admin.answer("own", {"device": "a"})["device"]["own"] is True
    with pytest.raises(UsageError, match="`own` must be a bool"):
        device_admin.answer("own", {"device": "a", "own": "yes"})
    assert device_admin.answer("revoke", {"device": "a"})["device"]["state"] == "revoked"
    with pytest.raises(CleaveError, match="cleave serve"):
        device_admin.answer("pair", {})


# --- jobs ---


def test_a_job_is_remembered_as_it_goes(
    access: Access, device_admin: DeviceAdmin, clock: Clock
) -> None:
    history = JobHistory(access.store, access.writer, clock)
    assert history.next_number == 1
    history.submitted(1, "opt-nano", {"job": {}, "name": "night"}, 9)
    clock.now_s += 1
    history.changed(1, "running")
    for step in (1, 2, 3):
        history.reported(1, {"event": "step", "step": step, "loss": 4.0 / step})
    access.writer.flush()
    (written,) = access.store.jobs()
    assert (written.state, written.steps) == ("running", 1)  # not each step by itself
    clock.now_s += STEPS_WRITTEN_S
    history.reported(1, {"event": "step", "step": 4, "loss": 1.0})
    history.reported(1, {"event": "step", "step": 5, "loss": 0.5})
    history.reported(1, {"event": "done", "run_folder": "runs/x"})
    history.changed(1, "done")
    access.writer.flush()
    (job,) = device_admin.answer("history", {})["jobs"]
    assert job == {
        "job": "job-1", "model": "opt-nano", "state": "done", "reason": "",
        "submitted_s": 1e9, "started_s": 1e9 + 1, "ended_s": clock(), "steps": 5, "loss": 0.5,
        "run_folder": "runs/x", "steps_in_all": 9, "name": "night",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("event", "waiting", "going_on"),
    [("fleet", "absent", "present"), ("disk", "full", "free"), ("servers", "waiting", "running")],
)
def test_a_job_that_waits_says_what_for(
    event: str, waiting: str, going_on: str, access: Access, device_admin: DeviceAdmin, clock: Clock
) -> None:
    history = JobHistory(access.store, access.writer, clock)

    def reason() -> object:
        access.writer.flush()
        return device_admin.answer("history", {})["jobs"][0]["reason"]

    history.submitted(1, "opt-nano", {"job": {}}, 9)
    history.changed(1, "running")
    history.reported(1, {"event": event, "state": waiting, "text": "no room"})
    history.reported(1, {"event": "note", "text": "a note"})
    clock.now_s += STEPS_WRITTEN_S
    history.reported(1, {"event": "step", "step": 4, "loss": 1.0})
    assert reason() == "no room"
    history.reported(1, {"event": event, "state": going_on, "text": "there is room"})
    clock.now_s += STEPS_WRITTEN_S
    history.reported(1, {"event": "step", "step": 5, "loss": 1.0})
    assert reason() == ""


def test_jobs_that_a_server_took_with_it_are_interrupted(access: Access, clock: Clock) -> None:
    history = JobHistory(access.store, access.writer, clock)
    for number in (1, 2, 3):
        history.submitted(number, "opt-nano", {"job": {}}, 9)
    history.changed(1, "done")
    history.changed(2, "running")
    history.reported(2, {"event": "start", "step": 0, "steps": 9, "run_folder": "/runs/a b"})
    access.writer.flush()
    later = JobHistory(access.store, access.writer, clock)
    assert later.next_number == 4
    assert [job.state for job in later.all()] == ["done", "interrupted", "interrupted"]
    assert [job.number for job in later.interrupted] == [2, 3]
    assert "server ended" in later.all()[1].reason
    assert "cleave jobs resume job-2" in later.all()[1].reason
    assert "cleave jobs resume job-3" in later.all()[2].reason  # it had not begun
    access.writer.flush()
    assert [job.state for job in access.store.jobs()] == ["done", "interrupted", "interrupted"]
