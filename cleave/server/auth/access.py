"""Admit devices by join codes and credentials, and operators by tokens."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from cleave.errors import UsageError
from cleave.protocol.device_counters import DeviceCounters
from cleave.protocol.messages import ErrorCode, Hello
from cleave.scheduler.sessions.admission import (
    AccessLevel,
    Admission,
    AdmissionResult,
    Behavior,
    Refusal,
    clean_name,
    one_is,
    same_secret,
)
from cleave.server.auth.codes import (
    ALPHABET,
    CODE_LIFE_S,
    CREDENTIAL_BYTES,
    hash_secret,
    new_code,
    read_code,
)
from cleave.server.store.access_status import AccessStatuses
from cleave.server.store.store import (
    AccessStatus,
    CodeRecord,
    Departure,
    DeviceRecord,
    Store,
    StoreError,
)
from cleave.server.store.writer import RETRY_S, StoreWriter
from cleave.transport.rate_limit import RateLimit

_logger = logging.getLogger(__name__)

FAULTS_COUNT_S: Final = 86400.0
"""Seconds after which a wrong result no longer counts, because bit flips occur on every machine."""

STORE_RETRY_S: Final = 10.0
"""Seconds after which a device should retry to join if the store is unusable."""

MAX_USES: Final = 100_000
MAX_LIFE_S: Final = 30 * 86400.0
"""Maximum number of uses, and maximum lifetime in seconds, of a join code."""

_SERVER_ID_LENGTH: Final = 10
_NEW_CODE: Final = "ask the server's operator for a new join code (`cleave pair`)"


@dataclass(frozen=True, slots=True)
class Clocks:
    """The wall clock and the monotonic clock that a server uses.

    Attributes:
        wall: returns Unix time, in seconds.
        steady: returns the time of a monotonic clock, in seconds.
    """

    wall: Callable[[], float] = time.time
    steady: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class JoinCode:
    """A new join code and its record. The store only contains a hash of the code.

    Attributes:
        text: the join code itself.
        record: the stored data about the join code.
    """

    text: str
    record: CodeRecord


class Redeemed(Protocol):
    """Callback that is called after a device has joined with a join code."""

    def __call__(self, code: CodeRecord, device: DeviceRecord, access: Access) -> None: ...


class Access:
    """The `Authenticator` of a server that stores its devices.

    A device shows its own credential, or a join code that the server exchanges for a credential.
    A correct credential is accepted even after many failed attempts from the device's address:
    other clients may share the address, and a credential cannot be guessed. Attempts with wrong
    credentials or with join codes are rate-limited per address.

    Args:
        store: database of devices and join codes.
        operator_token: token that admits operators.
        viewer_token: token that admits viewers; empty to admit no viewer.
        fleet_credential: credential that admits any number of devices, which are not stored; empty
            to disable.
        clocks: clocks to use.
        random_bytes: returns a text that encodes this number of random bytes, for credentials.
        choose: picks a random character of a string, for join codes.
        retry_s: seconds after which a failed write to the store is retried.

    Attributes:
        server: id of the server.
        writer: writes to the store in its own thread.
        statuses: current permissions of devices, and void join codes, even if not yet written to
            the store.
        on_redeemed: called in the server's loop after a device has joined with a join code.
    """

    def __init__(
        self,
        store: Store,
        operator_token: str,
        viewer_token: str = "",
        *,
        fleet_credential: str = "",
        clocks: Clocks = Clocks(),
        random_bytes: Callable[[int], str] = secrets.token_urlsafe,
        choose: Callable[[str], str] = secrets.choice,
        retry_s: float = RETRY_S,
    ) -> None:
        self.store = store
        self.on_redeemed: Redeemed | None = None
        self._operator_token = operator_token
        self._viewer_token = viewer_token
        self._fleet_credential = fleet_credential
        self._clocks = clocks
        self._random_bytes = random_bytes
        self._choose = choose
        self._attempts = RateLimit(clocks.steady)
        id = "".join(choose(ALPHABET) for _ in range(_SERVER_ID_LENGTH))
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
            reason = "the server cannot use its store just now; try again later"
            return Refusal(ErrorCode.LIMIT, reason, STORE_RETRY_S)

    def _admit(self, hello: Hello, address: str) -> AdmissionResult:
        """Identify a device by its credential, or exchange its join code for a credential."""
        keys = [key for key in (hello.credential, hello.join_code) if key]
        if self._fleet_credential and one_is(keys, self._fleet_credential):
            return Admission()
        device = self.statuses.device_of(hash_secret(hello.credential))
        if device is not None and device.standing is AccessStatus.ADMITTED:
            if hello.measure:
                return Admission(measured_by=f"device {device.id}", measures=device.id)
            return self._welcome(device)
        if device is not None and device.standing is AccessStatus.QUARANTINED:
            return Refusal(ErrorCode.QUARANTINED, _quarantined(device))
        wait_s = self._attempts.wait_s(address)
        if wait_s > 0:
            reason = f"too many failed attempts from {address}; try again in {wait_s:.0f} s"
            return Refusal(ErrorCode.LIMIT, reason, wait_s)
        verdict = self._redeem(hello, read_code(keys[-1]) if keys else "", device)
        if isinstance(verdict, Refusal):
            self._attempts.failed(address)
        return verdict

    def _redeem(self, hello: Hello, text: str, device: DeviceRecord | None) -> AdmissionResult:
        """Exchange a join code for a credential.

        Args:
            hello: the device's hello.
            text: normalized join code; empty if the device sent no join code.
            device: the revoked device whose credential the hello contains, if any.
        """
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
        """Return why neither the credential nor the join code in a hello admits the device."""
        if not hello.credential and not hello.join_code:
            return f"this server wants a join code or a credential, and got neither; {_NEW_CODE}"
        if not text:
            return f"this server does not know this credential, nor is it a join code; {_NEW_CODE}"
        if code is None:
            return f"this server knows no such join code; check it, or {_NEW_CODE}"
        if code.void:
            return f"this join code is void: {code.void}; {_NEW_CODE}"
        if code.used >= code.uses:
            return (
                f"this join code has been used already, and not by this device under this name; "
                f"{_NEW_CODE}"
            )
        return f"this join code has expired; {_NEW_CODE}"

    def _welcome(self, device: DeviceRecord, credential: str = "") -> Admission:
        """Return the admission of a stored device, with its faults and its last behavior."""
        self.arrived(device.id)
        counted = self.statuses.faults_since(device.id, self._clocks.wall() - FAULTS_COUNT_S)
        return Admission(
            device.id, device.name, credential, *counted, device.behavior, own=device.own
        )

    def failed(self, address: str) -> bool:
        """Count a failed attempt from `address`. Return whether the address had an attempt left."""
        had_one = self._attempts.wait_s(address) <= 0
        self._attempts.failed(address)
        return had_one

    def arrived(self, identity: int) -> None:
        """Record that a stored device began a session, here or on another server of the cluster."""
        now_s = self._clocks.wall()
        self.writer.soon(lambda: self.store.arrived(identity, now_s))

    def departed(self, identity: int, reason: str, *, lost: bool) -> None:
        """Record that a device's session ended, with the reason.

        Args:
            identity: identity of the device.
            reason: why the session ended.
            lost: whether the connection to the device was lost, rather than closed.
        """
        absence, now_s = Departure.LOST if lost else Departure.AWAY, self._clocks.wall()
        self.writer.soon(lambda: self.store.departed(identity, absence, reason, now_s))

    def contributed(self, identity: int, done: DeviceCounters) -> None:
        """Record what a device contributed since the last call."""
        self.writer.add(identity, done)

    def record_behavior(self, identity: int, behavior: Behavior) -> None:
        """Store a device's behavior, such as its speed and failures, for its next session."""
        self.writer.soon(lambda: self.store.record_behavior(identity, behavior))

    def faulted(self, identity: int, fault: str, penalty: float) -> None:
        """Record a device's wrong result and the penalty points for it."""
        self.statuses.fault(identity, fault, penalty)

    def quarantined(self, identity: int, reason: str) -> None:
        """Quarantine a device. The quarantine takes effect before it is written to the store."""
        name = f"device {identity}"
        self.statuses.decide(identity, name, AccessStatus.QUARANTINED, reason)

    def codes(self) -> list[CodeRecord]:
        """Return the current records of all stored join codes, oldest first."""
        return [self.statuses.code(code) for code in self.store.codes()]

    def void_codes_of(self, device: DeviceRecord) -> list[CodeRecord]:
        """Void the join codes that a device used or may have used.

        Otherwise the device could rejoin as another device.

        Returns:
            The join codes that were still usable and are now void.
        """
        now_s = self._clocks.wall()
        # For a device that joined with an older version of Cleave, the join code is unknown. It may
        # be any used code of that time.
        its = [
            code
            for code in self.codes()
            if code.is_open(now_s)
            and (code.id == device.code or (device.code is None and code.used and not code.made_s))
        ]
        for code in its:
            self.statuses.void(code.id, "a device that came by it was revoked")
        return its

    # --- operators ---

    def admit_operator(self, credential: str, address: str) -> AccessLevel | Refusal:
        """Check a token, and return the client's access level (operator or viewer) or a refusal."""
        operates = same_secret(credential, self._operator_token)
        views = same_secret(credential, self._viewer_token)
        if operates:
            return AccessLevel.OPERATOR
        if views and self._viewer_token:
            return AccessLevel.VIEWER
        wait_s = self._attempts.wait_s(address)
        if wait_s > 0:
            reason = f"too many failed attempts from {address}; try again in {wait_s:.0f} s"
            return Refusal(ErrorCode.LIMIT, reason, wait_s)
        self._attempts.failed(address)
        reason = (
            "the operator's token is not valid, nor is it a viewer's; use the operator's URL that "
            "the server wrote to operator.url in its data folder, or the address that "
            "`cleave dashboard` prints"
        )
        return Refusal(ErrorCode.CREDENTIAL, reason)

    def pair(self, uses: int = 1, life_s: float = CODE_LIFE_S, *, own: bool = False) -> JoinCode:
        """Create and store a join code.

        Args:
            uses: number of devices that may join with the code.
            life_s: seconds until the code expires.
            own: whether the operator owns the devices that join with the code.

        Raises:
            UsageError: when `uses` or `life_s` is out of range.
        """
        if not 1 <= uses <= MAX_USES:
            raise UsageError(f"a join code for {uses} devices is none; give 1 to {MAX_USES}")
        if not 0 < life_s <= MAX_LIFE_S:
            raise UsageError(
                f"a join code cannot be valid for {life_s:g} s; give up to {MAX_LIFE_S / 60:.0f} "
                f"minutes"
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
        f"then ask the server's operator to let it back in (`cleave devices release`)"
    )
