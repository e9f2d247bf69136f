"""The authenticator interface, and an authenticator with one credential for all devices."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol, TypeAlias

from cleave.protocol.device_counters import DeviceCounters
from cleave.protocol.messages import ErrorCode, Hello, clean


@dataclass(frozen=True, slots=True)
class Behavior:
    """A device's failures and slowness in its last session, stored for its next session."""

    setbacks: int = 0  # see `Setbacks.times`
    failure: str = ""  # the error text of the device's last failed run; empty if no run failed
    slowness: float = 1.0  # factor by which tasks take longer than the rates predict
    late_s: float = 0.0  # delay of each answer beyond the predicted time, in seconds


# Speed claims within this factor count as equal, because benchmark results vary.
SAME_CLAIM: Final = 2.0


@dataclass(frozen=True, slots=True)
class Measurement:
    """A device's measured link and speed, stored so that a returning device is not measured again.

    Attributes:
        address: network address from which the device was measured.
        flops_per_s: the claimed speed, or the measured speed if the claim was too high.
    """

    address: str
    downlink_bytes_per_s: float
    uplink_bytes_per_s: float
    latency_s: float
    flops_per_s: float
    claimed_flops_per_s: float

    def flops_per_s_now(self, claimed: float) -> float | None:
        """Return the speed of a returning device; None if the speed must be measured again.

        The result is the claimed speed if the device reached its previous claim, or if the new
        claim does not exceed the measured speed. Otherwise, the result is the measured speed if the
        new claim is similar to the previous claim.
        """
        if self.flops_per_s >= self.claimed_flops_per_s or claimed <= self.flops_per_s:
            return claimed
        same = max(claimed, self.claimed_flops_per_s) <= SAME_CLAIM * min(
            claimed, self.claimed_flops_per_s
        )
        return self.flops_per_s if same else None


MAX_NAME: Final = 60  # maximum length of a device's name, in characters


@dataclass(frozen=True, slots=True)
class Admission:
    """Permission for a device to join.

    Attributes:
        faults, penalty: number of wrong results that still count against the device, and the
            penalty points for these results.
        measured_by: identifies the credential or join code of a device that joins only for a link
            measurement; empty if the number of simultaneous measurements is not limited.
        measures: the recorded ID of a device that joins only for a link measurement. The
            `identity` of such a device is None, because the device runs no tasks.
        measured: the device's stored link and speed; None if unknown or outdated.
    """

    # the device's ID, the same in all its sessions; None if identities are not recorded
    identity: int | None = None
    name: str = ""  # the device's recorded name; empty to use the name in the device's `hello`
    credential: str = ""  # a new credential for the device to store; empty if it already has one
    faults: int = 0
    penalty: float = 0.0
    behavior: Behavior = field(default_factory=Behavior)
    measured: Measurement | None = None
    measured_by: str = ""
    at_once: int = 1  # maximum number of devices that may use `measured_by` at the same time
    measures: int | None = None
    # whether the device belongs to the operator, and may therefore train whole layers
    own: bool = False
    here: bool = False  # whether the device is known to run on the server's computer

    @property
    def known_as(self) -> int | None:
        """Return the device's recorded ID, also for a link measurement; None without one."""
        return self.identity if self.identity is not None else self.measures


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal to admit a device, operator or viewer."""

    code: ErrorCode
    reason: str  # what is wrong and what to do about it
    retry_after_s: float = 0.0  # seconds after which the same client may be admitted; 0 if unknown


class AccessLevel(Enum):
    """The access level of a client that is not a device. A viewer cannot change anything."""

    OPERATOR = "operator"
    VIEWER = "viewer"


AdmissionResult: TypeAlias = Admission | Refusal


class Authenticator(Protocol):
    """Decides which clients may join and records facts about devices.

    All methods are called on the server's event loop. An authenticator that keeps no device records
    can inherit the methods that record facts. Their default implementations do nothing.

    Attributes:
        server: the server's ID, which is sent to devices; empty if devices need not store their
            credential for this server.
    """

    server: str

    def admit(self, hello: Hello, address: str) -> AdmissionResult:
        """Admit a device or refuse it with a reason. A call may consume a join code.

        Args:
            hello: the device's first message. All fields except the credentials have been checked.
            address: the device's network address; empty without a network.
        """
        ...

    def admit_operator(self, credential: str, address: str) -> AccessLevel | Refusal:
        """Admit an operator or a viewer, or refuse the client with a reason."""
        ...

    def failed(self, address: str) -> bool:
        """Count a connection without a valid `hello`. Return False if `address` has too many."""
        ...

    def departed(self, identity: int, reason: str, *, lost: bool) -> None:
        """Record the end of a session. `lost` says whether it ended unintentionally."""
        return

    def contributed(self, identity: int, done: DeviceCounters) -> None:
        """Record the tasks, bytes and energy that a device contributed since the previous call."""
        return

    def record_behavior(self, identity: int, behavior: Behavior) -> None:
        """Store a device's behavior for its next session."""
        return

    def record_measurement(self, identity: int, measured: Measurement) -> None:
        """Store a device's measured link and speed for its next sessions."""
        return

    def faulted(self, identity: int, fault: str, penalty: float) -> None:
        """Record a wrong result from a device, and the penalty points for that result."""
        return

    def quarantined(self, identity: int, reason: str) -> None:
        """Record that a device is quarantined until an operator releases it."""
        return


class SharedSecretAuth(Authenticator):
    """An authenticator with one credential for all devices and one credential for operators.

    This authenticator is for programs that manage their own fleets, and keeps no device records.
    Credentials are long and random, so the number of attempts is not limited. Every device with the
    credential counts as the operator's own device.

    Args:
        credential: the credential of devices; empty if devices need none.
        operator_credential: the credential of operators; empty if operators need none.
    """

    server = ""

    def __init__(self, credential: str = "", operator_credential: str = "") -> None:
        self._credential = credential
        self._operator_credential = operator_credential

    def admit(self, hello: Hello, address: str) -> AdmissionResult:
        """Admit every device that has the credential, as the operator's own device."""
        # A device may send another server's credential, and this server's as its join code.
        keys = (hello.credential, hello.join_code) if hello.join_code else (hello.credential,)
        if one_is(keys, self._credential):
            return Admission(own=True)
        reason = "the credential is not valid; use the join URL that the server printed"
        return Refusal(ErrorCode.CREDENTIAL, reason)

    def admit_operator(self, credential: str, address: str) -> AccessLevel | Refusal:
        """Admit every client that has the operator credential, as an operator."""
        if same_secret(credential, self._operator_credential):
            return AccessLevel.OPERATOR
        reason = "the credential is not valid; use the operator's URL that the server printed"
        return Refusal(ErrorCode.CREDENTIAL, reason)

    def failed(self, address: str) -> bool:
        """Return True because this authenticator does not limit attempts."""
        return True


def one_is(keys: Iterable[str], secret: str) -> bool:
    """Return whether any key equals the secret, in a time that does not reveal which one."""
    return sum([same_secret(key, secret) for key in keys]) > 0


def clean_name(name: str) -> str:
    """Return a device name that is safe to print: one line, at most `MAX_NAME` characters."""
    return clean_text(name, MAX_NAME)


def clean_text(text: str, most: int) -> str:
    """Return `text` without terminal control codes, cut to at most `most` characters."""
    return clean(text)[:most].strip()


def same_secret(one: str, other: str) -> bool:
    """Return whether two secrets are equal. The time taken does not reveal where they differ."""
    return hmac.compare_digest(one.encode(), other.encode())
