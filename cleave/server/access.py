"""Admit devices by join codes and credentials, and operators by tokens.

A revoked or quarantined device must not be admitted even while the store is unwritable, for example
because the disk is full. Therefore a decision takes effect in memory first, and is then written to
the store. The writer retries a failed write until it succeeds.
"""

from __future__ import annotations

import hashlib
import logging
import math
import secrets
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar

from cleave.errors import UsageError
from cleave.protocol.device_counters import DeviceCounters
from cleave.protocol.messages import ErrorCode, Hello
from cleave.scheduler.sessions.admission import (
    AccessLevel,
    Admission,
    AdmissionResult,
    Behavior,
    Measurement,
    Refusal,
    clean_name,
    one_is,
    same_secret,
)
from cleave.server.store.store import (
    AccessStatus,
    CodeRecord,
    Departure,
    DeviceRecord,
    Store,
    StoreError,
)
from cleave.server.store.writer import RETRY_S, StoreWriter
from cleave.transport.connection_limits import RateLimit
from cleave.transport.join_url import SERVER_ID_LENGTH

_Pending = TypeVar("_Pending")
_Record = TypeVar("_Record", CodeRecord, DeviceRecord)


@dataclass(frozen=True, slots=True)
class _Decision:
    standing: AccessStatus
    reason: str
    at_s: float


class AccessStatuses:
    """Permissions and wrong results of devices, and void join codes. Thread-safe."""

    def __init__(self, store: Store, writer: StoreWriter, clock: Callable[[], float]) -> None:
        self._store = store
        self._writer = writer
        self._clock = clock
        self._lock = threading.Lock()
        self._last_s = 0.0
        # Decisions and wrong results that are not yet written to the store.
        self._decisions: dict[int, _Decision] = {}
        self._void: dict[int, str] = {}
        self._own: dict[int, tuple[bool, float]] = {}
        self._faults: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)

    def decide(self, device: int, name: str, standing: AccessStatus, reason: str) -> None:
        """Set a device's permission with immediate effect. `name` names the device in messages."""
        with self._lock:
            decision = self._decisions[device] = _Decision(standing, reason, self._now())
        write = partial(self._store.stand, device, standing, reason, decision.at_s)
        why = f" ({reason})" if reason else ""
        text = f"{name} is {standing.value}{why}"
        self._owe("standing", self._decisions, device, decision, write, text)

    def mark_own(self, device: int, name: str, own: bool) -> None:
        """Set with immediate effect whether the operator owns a device."""
        with self._lock:
            mark = self._own[device] = own, self._now()
        text = f"{name} is {'' if own else 'not '}the operator's own"
        write = partial(self._store.mark_own, device, own)
        self._owe("own", self._own, device, mark, write, text)

    def void(self, code: int, reason: str) -> None:
        """Void a join code immediately, so that no further device can join with it."""
        with self._lock:
            self._void[code] = reason
        text = f"join code {code} is void ({reason})"
        self._owe("code", self._void, code, reason, partial(self._store.void, code, reason), text)

    def _owe(
        self,
        kind: str,
        pending: dict[int, _Pending],
        id: int,
        value: _Pending,
        write: Callable[[], None],
        text: str,
    ) -> None:
        """Write a decision in the writer's thread, then remove it from memory.

        If a newer decision has replaced it, the newer decision stays in memory.
        """

        def write_and_forget() -> None:
            write()
            with self._lock:
                if pending.get(id) is value:
                    del pending[id]

        self._writer.owe((kind, id), write_and_forget, text)

    def fault(self, device: int, fault: str, penalty: float) -> None:
        """Record a device's wrong result, and the penalty points for the result."""
        with self._lock:
            at_s = self._now()
            self._faults[device].append((at_s, penalty))

        def write() -> None:
            self._store.fault(device, fault, penalty, at_s)
            with self._lock:
                self._faults[device].remove((at_s, penalty))
                if not self._faults[device]:
                    del self._faults[device]

        self._writer.owe(("fault", device, at_s), write)

    def faults_since(self, device: int, since_s: float) -> tuple[int, float]:
        """Return the number of a device's recent wrong results, and their total penalty points.

        Count only results since `since_s` and after the device's last release from quarantine.
        """
        with self._lock:  # read before the store, to miss no fault; a fault in both counts once
            decision = self._decisions.get(device)
            if decision is not None and decision.standing is AccessStatus.ADMITTED:
                since_s = max(since_s, math.nextafter(decision.at_s, math.inf))
            pending = [fault for fault in self._faults.get(device, ()) if fault[0] >= since_s]
        written = self._store.faults_since(device, since_s)
        faults = Counter(pending) | Counter(written)
        return faults.total(), sum(points * times for (_, points), times in faults.items())

    def _now(self) -> float:
        """Return the current Unix time, slightly increased if it would not be unique."""
        self._last_s = max(self._clock(), math.nextafter(self._last_s, math.inf))
        return self._last_s

    def of(self, device: DeviceRecord) -> DeviceRecord:
        """Return a device's stored record, updated with decisions that are not yet written."""
        with self._lock:
            decision = self._decisions.get(device.id)
            own, _ = self._own.get(device.id, (device.own, 0.0))
        device = replace(device, own=own)
        if decision is None:
            return device
        return replace(device, standing=decision.standing, reason=decision.reason)

    def device_of(self, credential_hash: bytes) -> DeviceRecord | None:
        """Return the current record of the device with this credential hash; None if unknown."""
        return self._settled(lambda: self._store.device_of(credential_hash), self.of)

    def code_of(self, hash: bytes) -> CodeRecord | None:
        """Return the current record of the join code with this hash; None if unknown."""
        return self._settled(lambda: self._store.code(hash), self.code)

    @staticmethod
    def _settled(
        read: Callable[[], _Record | None], now: Callable[[_Record], _Record]
    ) -> _Record | None:
        """Return a stored record, updated with decisions that are not yet written.

        A decision could be missed if it is written and removed from memory between reading the
        store and looking in memory. Therefore this method reads the store until two consecutive
        reads return the same record.
        """
        record = read()
        while record is not None:
            found, again = now(record), read()
            if found != record or again == record:
                return found
            record = again
        return None

    def code(self, code: CodeRecord) -> CodeRecord:
        """Return a join code's stored record, updated with decisions that are not yet written."""
        with self._lock:
            return replace(code, void=self._void.get(code.id, code.void))


_logger = logging.getLogger(__name__)

ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
"""Alphabet of Crockford's base 32. It omits I, L and O, which resemble digits, and U."""

CODE_LENGTH: Final = 12
"""Number of characters in a join code. Its 60 random bits cannot be guessed before it expires."""

CODE_LIFE_S: Final = 600.0  # default lifetime of a join code, in seconds
CREDENTIAL_BYTES: Final = 32  # number of random bytes in a credential
_GROUP: Final = 4
_READ_AS: Final = str.maketrans("OIL", "011", "- \t")
FAULTS_COUNT_S: Final = 86400.0
"""Time after which a wrong result no longer counts, because bit flips occur on every machine."""

MEASUREMENT_KEPT_S: Final = 86400.0  # time after which a device's link is measured again
STORE_RETRY_S: Final = 10.0  # delay after which a device retries to join if the store is unusable
MAX_USES: Final = 100_000
MAX_LIFE_S: Final = 30 * 86400.0
"""Maximum number of uses, and maximum lifetime in seconds, of a join code."""

_NEW_CODE: Final = "ask the server's operator for a new join code (`cleave pair`)"


def new_code(choose: Callable[[str], str]) -> str:
    """Create a join code such as `7KQ4-MWX2-PDH9`. `choose` picks a random character."""
    code = "".join(choose(ALPHABET) for _ in range(CODE_LENGTH))
    return "-".join(code[i : i + _GROUP] for i in range(0, CODE_LENGTH, _GROUP))


def read_code(text: str) -> str:
    """Normalize a join code that a user typed. Return an empty string if it is malformed."""
    if len(text) > 4 * CODE_LENGTH:
        return ""
    code = text.upper().translate(_READ_AS)
    return code if len(code) == CODE_LENGTH and set(code) <= set(ALPHABET) else ""


def hash_secret(secret: str) -> bytes:
    """Return the SHA-256 hash by which the store finds a credential or join code.

    Credentials and join codes are random, so they need neither salt nor key stretching. A join code
    expires before an attacker could find it by trial. The timing of a lookup reveals information
    only about the hash.
    """
    return hashlib.sha256(secret.encode()).digest()


@dataclass(frozen=True, slots=True)
class Clocks:
    """The wall clock (Unix time) and the monotonic clock that a server uses, in seconds."""

    wall: Callable[[], float] = time.time
    steady: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class JoinCode:
    """A new join code and its record. The store contains only a hash of the code."""

    text: str
    record: CodeRecord


@dataclass(frozen=True, slots=True)
class KeyState:
    """What a join code or a credential is worth now.

    Attributes:
        state: `known` (a device's credential), `open`, `void`, `used up` or `expired` (a join
            code), `quarantined`, `revoked`, or `unknown`. Empty if the server does not tell.
        own: whether the operator owns the device.
        reason: why the operator revoked the device; empty if not revoked or not stated.
    """

    state: str
    own: bool = False
    reason: str = ""


class Access:
    """An `Authenticator` that keeps devices and join codes in a store.

    A device sends its own credential, or a join code that the server exchanges for a credential. A
    correct credential is accepted even after many failed attempts from the device's address,
    because other clients may share the address, and a credential cannot be guessed. Other attempts
    are rate-limited per address.

    Args:
        viewer_token: token that admits viewers; empty to admit no viewer.
        fleet_credential: credential that admits any number of devices, which are not stored; empty
            to disable.
        own_credential: credential that admits the device on the server's own computer. The device
            is not stored. Empty to disable.
        random_bytes: called with a number n; returns a string that encodes n random bytes.
        choose: picks a random character of a string, for join codes.
        retry_s: time after which a failed write to the store is retried, in seconds.

    Attributes:
        statuses: permissions of devices, and void join codes, including changes not yet stored.
        on_redeemed: called in the server's event loop after a device exchanges a join code.
    """

    def __init__(
        self,
        store: Store,
        operator_token: str,
        viewer_token: str = "",
        *,
        fleet_credential: str = "",
        own_credential: str = "",
        clocks: Clocks = Clocks(),
        random_bytes: Callable[[int], str] = secrets.token_urlsafe,
        choose: Callable[[str], str] = secrets.choice,
        retry_s: float = RETRY_S,
    ) -> None:
        self.store = store
        self.on_redeemed: Callable[[CodeRecord, DeviceRecord, Access], None] | None = None
        self._operator_token = operator_token
        self._viewer_token = viewer_token
        self._fleet_credential = fleet_credential
        self._own_credential = own_credential
        self._clocks = clocks
        self._random_bytes = random_bytes
        self._choose = choose
        self._attempts = RateLimit(clocks.steady)
        id = "".join(choose(ALPHABET) for _ in range(SERVER_ID_LENGTH))
        self.server = store.fact("server", id)
        self.writer = StoreWriter(store, clocks.wall, retry_s)
        self.statuses = AccessStatuses(store, self.writer, clocks.wall)

    # --- devices ---

    def admit(self, hello: Hello, address: str) -> AdmissionResult:
        """Admit or refuse a device. If the store is unusable, ask the device to retry later."""
        try:
            return self._admit(hello, address)
        except StoreError as error:
            _logger.error("%s", error)
            reason = "the server cannot use its store at the moment; try again later"
            return Refusal(ErrorCode.LIMIT, reason, STORE_RETRY_S)

    def _admit(self, hello: Hello, address: str) -> AdmissionResult:
        """Identify a device by its credential, or exchange its join code for a credential."""
        keys = [key for key in (hello.credential, hello.join_code) if key]
        if self._fleet_credential and one_is(keys, self._fleet_credential):
            return Admission()
        if self._own_credential and one_is(keys, self._own_credential):
            return Admission(own=True, here=True)
        device = self.statuses.device_of(hash_secret(hello.credential))
        if device is not None and device.standing is AccessStatus.ADMITTED:
            if hello.measure:
                return Admission(measured_by=f"device {device.id}", measures=device.id)
            return self._welcome(device)
        if device is not None and device.standing is AccessStatus.QUARANTINED:
            return Refusal(ErrorCode.QUARANTINED, _quarantined(device))
        if limited := self._limited(address):
            return limited
        verdict = self._redeem(hello, read_code(keys[-1]) if keys else "", device)
        if isinstance(verdict, Refusal):
            self._attempts.failed(address)
        return verdict

    def _redeem(self, hello: Hello, text: str, device: DeviceRecord | None) -> AdmissionResult:
        """Exchange a join code for a credential. `device` is the sender if revoked, else None."""
        code = self.statuses.code_of(hash_secret(text)) if text else None
        now_s = self._clocks.wall()
        if code is None or not code.is_open(now_s):
            if device is not None:
                why = f": {device.reason}" if device.reason else ""
                text = f"this device's credential was revoked{why}; to join again, {_NEW_CODE}"
                return Refusal(ErrorCode.CREDENTIAL, text)
            return Refusal(ErrorCode.CREDENTIAL, self._what_is_wrong(hello, text, code))
        if hello.measure:
            # A link measurement does not use up the join code. The remaining uses of the code limit
            # the number of simultaneous measurements.
            return Admission(measured_by=f"code {code.id}", at_once=code.uses - code.used)
        credential = self._random_bytes(CREDENTIAL_BYTES)
        hashed = hash_secret(credential)
        new = self.store.redeem(code.id, clean_name(hello.name) or "device", hashed, now_s)
        if new is None:
            return Refusal(ErrorCode.CREDENTIAL, f"this join code was just used; {_NEW_CODE}")
        if self.on_redeemed is not None:
            self.on_redeemed(code, new, self)
        return self._welcome(new, credential)

    def _what_is_wrong(self, hello: Hello, text: str, code: CodeRecord | None) -> str:
        """Return why neither the credential nor the join code in a `hello` admits the device."""
        if not hello.credential and not hello.join_code:
            return f"this server needs a join code or a credential, and got neither; {_NEW_CODE}"
        if not text and len(hello.join_code or hello.credential) <= 2 * CODE_LENGTH:
            return f"this is not a join code such as 7KQ4-MWX2-PDH9; check it, or {_NEW_CODE}"
        if not text:
            return f"this server does not know this credential; {_NEW_CODE}"
        if code is None:
            return f"this server does not know this join code; check it, or {_NEW_CODE}"
        if code.void:
            return f"this join code is void: {code.void}; {_NEW_CODE}"
        if code.used >= code.uses:
            return (
                f"this join code has been used already, by another device or under another name; "
                f"{_NEW_CODE}"
            )
        return f"this join code has expired; {_NEW_CODE}"

    def _welcome(self, device: DeviceRecord, credential: str = "") -> Admission:
        """Record a stored device's arrival. Return its admission, with its faults and behavior."""
        self.arrived(device.id)
        counted = self.statuses.faults_since(device.id, self._clocks.wall() - FAULTS_COUNT_S)
        since_s = self._clocks.wall() - MEASUREMENT_KEPT_S
        return Admission(
            device.id,
            device.name,
            credential,
            *counted,
            device.behavior,
            self.store.measurement(device.id, since_s),
            own=device.own,
        )

    def _limited(self, address: str) -> Refusal | None:
        if (wait_s := self._attempts.wait_s(address)) <= 0:
            return None
        reason = f"too many failed attempts from {address}; try again in {wait_s:.0f} s"
        return Refusal(ErrorCode.LIMIT, reason, wait_s)

    def failed(self, address: str) -> bool:
        had_one = self._attempts.wait_s(address) <= 0
        self._attempts.failed(address)
        return had_one

    def arrived(self, identity: int) -> None:
        """Record that a stored device began a session at this or another server."""
        now_s = self._clocks.wall()
        self.writer.soon(lambda: self.store.arrived(identity, now_s))

    def departed(self, identity: int, reason: str, *, lost: bool) -> None:
        absence, now_s = Departure.LOST if lost else Departure.AWAY, self._clocks.wall()
        self.writer.soon(lambda: self.store.departed(identity, absence, reason, now_s))

    def contributed(self, identity: int, done: DeviceCounters) -> None:
        self.writer.add(identity, done)

    def record_behavior(self, identity: int, behavior: Behavior) -> None:
        self.writer.soon(lambda: self.store.record_behavior(identity, behavior))

    def record_measurement(self, identity: int, measured: Measurement) -> None:
        now_s = self._clocks.wall()
        self.writer.soon(lambda: self.store.record_measurement(identity, measured, now_s))

    def faulted(self, identity: int, fault: str, penalty: float) -> None:
        self.statuses.fault(identity, fault, penalty)

    def quarantined(self, identity: int, reason: str) -> None:
        """Quarantine a device immediately. The store is updated later."""
        name = f"device {identity}"
        self.statuses.decide(identity, name, AccessStatus.QUARANTINED, reason)

    def codes(self) -> list[CodeRecord]:
        """Return the current records of all stored join codes, oldest first."""
        return [self.statuses.code(code) for code in self.store.codes()]

    def void_codes_of(self, device: DeviceRecord) -> list[CodeRecord]:
        """Void and return the open join codes that a revoked device could use to rejoin."""
        now_s = self._clocks.wall()
        its = [code for code in self.codes() if code.is_open(now_s) and code.id == device.code]
        for code in its:
            self.statuses.void(code.id, "a device that joined with it was revoked")
        return its

    def key_state(self, key: str, address: str) -> KeyState:
        """Return whether a join code or credential admits a device now, without using it up.

        The join page asks before its owner starts anything.

        Args:
            key: a join code, or a device's credential.
            address: IP address of the client, whose unknown keys count as failed attempts.
        """
        if self._fleet_credential and one_is([key], self._fleet_credential):
            return KeyState("open")
        try:
            device = self.statuses.device_of(hash_secret(key))
            if device is not None:
                if device.standing is AccessStatus.ADMITTED:
                    return KeyState("known", device.own)
                revoked = device.standing is AccessStatus.REVOKED
                return KeyState(device.standing.value, reason=device.reason if revoked else "")
            if self._attempts.wait_s(address) > 0:
                return KeyState("")
            text = read_code(key)
            code = self.statuses.code_of(hash_secret(text)) if text else None
        except StoreError:
            return KeyState("")
        if code is None:
            self._attempts.failed(address)
            return KeyState("unknown")
        return KeyState(code.state(self._clocks.wall()), code.own)

    # --- operators ---

    def admit_operator(self, credential: str, address: str) -> AccessLevel | Refusal:
        """Return the access level of an operator's or viewer's token. Refuse any other token."""
        operates = same_secret(credential, self._operator_token)
        views = same_secret(credential, self._viewer_token)
        if operates:
            return AccessLevel.OPERATOR
        if views and self._viewer_token:
            return AccessLevel.VIEWER
        if limited := self._limited(address):
            return limited
        self._attempts.failed(address)
        reason = (
            "the operator's token is not valid, and it is not a viewer's token; use the "
            "operator's URL in the file operator.url of the server's data folder, or the address "
            "that `cleave dashboard` prints"
        )
        return Refusal(ErrorCode.CREDENTIAL, reason)

    def pair(self, uses: int = 1, life_s: float = CODE_LIFE_S, *, own: bool = False) -> JoinCode:
        """Create a join code that admits up to `uses` devices and expires after `life_s` seconds.

        Raises:
            UsageError: if `uses` or `life_s` is out of range.
        """
        if not 1 <= uses <= MAX_USES:
            raise UsageError(f"a join code must be for 1 to {MAX_USES} devices, not {uses}")
        if not 0 < life_s <= MAX_LIFE_S:
            raise UsageError(
                f"a join code must be valid for more than 0 and at most {MAX_LIFE_S / 60:.0f} "
                f"minutes, not {life_s / 60:g}"
            )
        text, now_s = new_code(self._choose), self._clocks.wall()
        record = self.store.add_code(
            hash_secret(read_code(text)), uses, now_s + life_s, now_s, own=own
        )
        return JoinCode(text, record)

    def close(self) -> None:
        """Write all pending data to the store and end the writer's thread."""
        self.writer.close()


def _quarantined(device: DeviceRecord) -> str:
    return (
        f"this device is in quarantine: {device.reason}; find out why it computes wrong results, "
        f"then ask the server's operator to release it (`cleave devices release`)"
    )
