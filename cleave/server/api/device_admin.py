"""Handle operators' requests about devices, device permissions, join codes and past jobs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, Protocol

from cleave.errors import CleaveError, UsageError, unknown
from cleave.protocol.messages import ErrorCode
from cleave.scheduler.counters import StepProgress
from cleave.scheduler.sessions.admission import clean_text
from cleave.server.access import CODE_LIFE_S, Access
from cleave.server.store.store import AccessStatus, CodeRecord, DeviceRecord, StoredJob

Answer = dict[str, Any]

_MAX_REASON: Final = 200
_FLUSH_S: Final = 2.0  # maximum time in seconds that the server's loop waits for the store
ACTIONS: Final = (  # the actions that `DeviceAdmin.answer` supports
    "pair", "codes", "void", "dashboard", "devices", "revoke", "release", "own", "history",
)  # fmt: skip


class Sessions(Protocol):
    """Interface to the device sessions of one server (`Server`) or of a cluster (`Servers`)."""

    dashboard_url: str

    def describe_devices(self) -> list[dict[str, object]]: ...
    def join_url(self, credential: str) -> str: ...
    def join_page_url(self, credential: str) -> str: ...
    def end_identity(self, identity: int, code: ErrorCode, reason: str) -> None: ...
    def mark_own(self, identity: int, own: bool) -> None: ...
    def credit(self) -> None: ...
    def progress(self) -> StepProgress | None: ...


class DeviceAdmin:
    """Handles operators' requests about devices, join codes and past jobs. Not thread-safe.

    Use it in the server's event loop. Without a running server, `sessions` is None.
    """

    def __init__(
        self, access: Access, jobs: Callable[[], list[StoredJob]], clock: Callable[[], float]
    ) -> None:
        self.sessions: Sessions | None = None
        self._access = access
        self._store = access.store
        self._jobs = jobs
        self._clock = clock

    def answer(self, action: str, arguments: Mapping[str, Any]) -> Answer:
        """Carry out an operator's action and return the data for the reply."""
        match action:
            case "pair":
                return self._pair(arguments)
            case "codes":
                return {"codes": self._codes()}
            case "void":
                return self._void(arguments)
            case "dashboard":
                return {"url": self._running().dashboard_url}
            case "devices":
                return self._devices()
            case "revoke":
                reason = clean_text(str(arguments.get("reason", "")), _MAX_REASON)
                return self._revoke(self._find(arguments), reason)
            case "release":
                return self._release(self._find(arguments))
            case "own":
                return self._mark_own(self._find(arguments), arguments.get("own", True))
            case "history":
                return {"jobs": [_job(job) for job in self._jobs()]}
            case _:
                raise UsageError(f"unknown request {action!r}")

    def flops_by_hour(self) -> list[tuple[int, float]]:
        """Return the work of all devices in the last hours, as `Store.flops_by_hour` does."""
        if self.sessions is not None:
            self.sessions.credit()
        return self._access.writer.flops_by_hour()

    def _pair(self, arguments: Mapping[str, Any]) -> Answer:
        sessions = self._running()
        uses, life_s = arguments.get("uses", 1), arguments.get("life_s", CODE_LIFE_S)
        own = arguments.get("own", False)
        if type(uses) is not int or type(life_s) not in (int, float) or type(own) is not bool:
            raise UsageError(
                "`uses` must be a count, `life_s` a number of seconds, and `own` a bool"
            )
        code = self._access.pair(uses, life_s, own=own)
        return {
            "id": code.record.id,
            "code": code.text,
            "url": sessions.join_url(code.text),
            "page_url": sessions.join_page_url(code.text),
            "uses": code.record.uses,
            "own": code.record.own,
            "expires_s": code.record.expires_s,
        }

    def _codes(self) -> list[Answer]:
        devices = self._store.devices()
        return [_describe_code(code, devices, self._clock()) for code in self._access.codes()]

    def _void(self, arguments: Mapping[str, Any]) -> Answer:
        wanted = arguments.get("code")
        found = [code for code in self._access.codes() if code.id == wanted]
        if not found or type(wanted) is not int:
            raise unknown("join code", wanted, [code.id for code in self._access.codes()])
        state = found[0].state(self._clock())
        if state != "open":
            raise UsageError(
                f"join code {wanted} is {state}, so nobody can join with it; nothing was changed"
            )
        self._access.statuses.void(wanted, "the server's operator voided it")
        return {"code": self._codes_by_id()[wanted], "unwritten": self._written()}

    def _codes_by_id(self) -> dict[int, Answer]:
        return {code["id"]: code for code in self._codes()}

    def _written(self) -> str:
        """Write pending decisions. Return the error message; empty on success.

        If no running server will retry the write, raise CleaveError instead.
        """
        self._access.writer.flush(_FLUSH_S if self.sessions is not None else None)
        trouble = self._access.writer.trouble
        if trouble and self.sessions is None:
            raise CleaveError(f"this change could not be written: {trouble}")
        return trouble

    def _running(self) -> Sessions:
        if self.sessions is None:
            raise CleaveError("no server runs here; start one with `cleave serve`")
        return self.sessions

    def _devices(self) -> Answer:
        here = self._here()
        devices = [self._describe(device, here) for device in self._store.devices()]
        # Devices that joined with the fleet credential are not stored.
        strangers = [
            {**session, "id": None}
            for session in (self.sessions.describe_devices() if self.sessions else [])
            if session["identity"] is None
        ]
        return {"devices": devices + strangers}

    def _here(self) -> dict[object, dict[str, object]]:
        """Map each connected device's identity to a description of the device's session."""
        if self.sessions is None:
            return {}
        self.sessions.credit()
        self._access.writer.flush(_FLUSH_S)
        return {s["identity"]: s for s in self.sessions.describe_devices()}

    def _describe(
        self, device: DeviceRecord, here: Mapping[object, Mapping[str, object]]
    ) -> Answer:
        session, device = here.get(device.id), self._access.statuses.of(device)
        if session is not None:
            state, reason = session["state"], session["reason"]
        elif device.standing is not AccessStatus.ADMITTED:
            state, reason = device.standing.value, device.reason
        else:
            state, reason = device.absence.value, device.absence_reason
        return {
            "id": device.id,
            "name": device.name,
            "own": device.own,
            "state": state,
            "reason": reason,
            "session": session["device"] if session is not None else None,
            "paired_s": device.paired_s,
            "seen_s": self._clock() if session is not None else device.seen_s,
            "sessions": device.sessions,
            "losses": device.losses,
            "wrong_results": device.faults,
            "code": device.code,
            "failure": session["failure"] if session is not None else device.behavior.failure,
            "rates": session.get("rates", {}) if session is not None else {},
            **asdict(device.done),
        }

    def _find(self, arguments: Mapping[str, Any]) -> DeviceRecord:
        wanted = str(arguments.get("device", ""))
        device = self._store.find_device(wanted)
        if device is None:
            known = [f"{device.id} ({device.name})" for device in self._store.devices()]
            raise unknown("device", wanted, known)
        return self._access.statuses.of(device)

    def _revoke(self, device: DeviceRecord, reason: str) -> Answer:
        self._access.statuses.decide(device.id, device.name, AccessStatus.REVOKED, reason)
        if self.sessions is not None:
            why = f": {reason}" if reason else ""
            text = f"the operator revoked this device's credential{why}; it needs a new join code"
            self.sessions.end_identity(device.id, ErrorCode.CREDENTIAL, text)
        void = [code.id for code in self._access.void_codes_of(device)]
        now, known = self._now(device), self._codes_by_id()
        return {**now, "codes": [known[id] for id in void]}

    def _release(self, device: DeviceRecord) -> Answer:
        if device.standing is AccessStatus.REVOKED:
            raise UsageError(
                f"{device.name} is revoked permanently; to let it join again, create a join code "
                "for it (`cleave pair`)"
            )
        if device.standing is not AccessStatus.QUARANTINED:
            raise UsageError(f"{device.name} is not in quarantine; nothing was changed")
        self._access.statuses.decide(device.id, device.name, AccessStatus.ADMITTED, "")
        return self._now(device)

    def _mark_own(self, device: DeviceRecord, own: object) -> Answer:
        if type(own) is not bool:
            raise UsageError("`own` must be a bool")
        if own and device.standing is AccessStatus.REVOKED:
            raise UsageError(
                f"{device.name} is revoked permanently; to let it join again as your own, create a "
                "join code for it (`cleave pair --own`)"
            )
        self._access.statuses.mark_own(device.id, device.name, own)
        if self.sessions is not None:
            self.sessions.mark_own(device.id, own)
        return self._now(device)

    def _now(self, device: DeviceRecord) -> Answer:
        """Write pending decisions. Return a description of a device, and any write error."""
        unwritten, found = self._written(), self._store.device(device.id)
        assert found is not None
        return {"device": self._describe(found, self._here()), "unwritten": unwritten}


def _describe_code(code: CodeRecord, devices: Sequence[DeviceRecord], now_s: float) -> Answer:
    return {
        "id": code.id,
        "state": code.state(now_s),
        "reason": code.void,
        "uses": code.uses,
        "used": code.used,
        "own": code.own,
        "made_s": code.made_s or None,
        "expires_s": code.expires_s,
        "devices": [device.name for device in devices if device.code == code.id],
    }


def _job(job: StoredJob) -> Answer:
    values = {name: getattr(job, name) for name in StoredJob.__slots__}
    request = json.loads(values.pop("request") or "{}")
    return {"job": f"job-{values.pop('number')}", **values, "name": str(request.get("name") or "")}
