"""The authenticator interface, and an authenticator with one credential for all devices."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol, TypeAlias

from cleave.protocol.device_counters import DeviceCounters
from cleave.protocol.messages import ErrorCode, Hello
from cleave.protocol.texts import clean
from cleave.scheduler.sessions.conduct import Conduct

MAX_NAME: Final = 60
"""Maximum length of a device's name, in characters."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Permission for a device to join.

    Attributes:
        identity: the device's identity, the same in all its sessions; None if none is recorded.
        name: the device's recorded name; empty to use the name in its `hello`.
        credential: a new credential for the device to keep; empty if it has one.
        faults: number of wrong results that still count against the device.
        penalty: the sum of their points (`cleave.scheduler.sessions.reputation`).
        conduct: the device's behavior in its last session.
        measured_by: for a link measurement only, the credential or code that admitted the device;
            empty if any number of devices may use it.
        at_once: maximum number of devices that may use `measured_by` at the same time.
        measures: the identity, if known, of a device that only has its link measured. Such a
            session has no `identity` because it does no work.
        own: whether the device is the operator's own, and may train whole layers.
    """

    identity: int | None = None
    name: str = ""
    credential: str = ""
    faults: int = 0
    penalty: float = 0.0
    conduct: Conduct = field(default_factory=Conduct)
    measured_by: str = ""
    at_once: int = 1
    measures: int | None = None
    own: bool = False

    @property
    def known_as(self) -> int | None:
        """Return the device's identity, whether it works or only has its link measured."""
        return self.identity if self.identity is not None else self.measures


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refusal of a peer; the reason says what is wrong and what to do.

    Attributes:
        retry_after_s: seconds after which the same peer may be admitted, if known; 0 otherwise.
    """

    code: ErrorCode
    reason: str
    retry_after_s: float = 0.0


class AccessLevel(Enum):
    """Access level of a client that is not a device."""

    OPERATOR = "operator"
    """May do everything."""

    VIEWER = "viewer"
    """May only watch the fleet."""


AdmissionResult: TypeAlias = Admission | Refusal


class Authenticator(Protocol):
    """Decides who may join, and records facts about devices. The server's event loop calls it.

    Attributes:
        server: the server's id, sent to devices; empty if devices keep no credential for it.
    """

    server: str

    def admit(self, hello: Hello, address: str) -> AdmissionResult:
        """Admit a device or refuse it with a reason. This may use up a join code.

        Args:
            hello: the device's first message, whose other fields have been checked.
            address: the address that it connects from; empty without a network.
        """
        ...

    def admit_operator(self, credential: str, address: str) -> AccessLevel | Refusal:
        """Admit an operator or a viewer, or refuse them with a reason."""
        ...

    def failed(self, address: str) -> bool:
        """Count an attempt that sent no `hello`; return whether the address had an attempt left."""
        ...

    def departed(self, identity: int, reason: str, *, lost: bool) -> None:
        """Record that a device's session ended, intentionally or because the device was lost."""
        ...

    def contributed(self, identity: int, done: DeviceCounters) -> None:
        """Add a device's contribution since the last call."""
        ...

    def conducted(self, identity: int, conduct: Conduct) -> None:
        """Remember a device's behavior for its next session."""
        ...

    def faulted(self, identity: int, fault: str, penalty: float) -> None:
        """Record a wrong result of a device and its penalty points."""
        ...

    def quarantined(self, identity: int, reason: str) -> None:
        """Record that a device is quarantined until an operator releases it."""
        ...


class SharedSecretAuth:
    """One credential for all devices, without identities, and one for operators.

    A program's own fleet uses it. Its credentials are random and long, so guesses need no limit.
    Devices cannot be told apart; every device with the credential is the operator's own.

    Args:
        credential: the credential that a device's `hello` must carry; empty if none is needed.
        operator_credential: the credential that an operator's `hello` must carry; empty if none is
            needed.
    """

    server = ""

    def __init__(self, credential: str = "", operator_credential: str = "") -> None:
        self._credential = credential
        self._operator_credential = operator_credential

    def admit(self, hello: Hello, address: str) -> AdmissionResult:
        """Admit every device with the credential as the operator's own."""
        # A device may send another server's credential, kept for this address, and ours as a code.
        keys = (hello.credential, hello.join_code) if hello.join_code else (hello.credential,)
        if one_is(keys, self._credential):
            return Admission(own=True)
        reason = "the credential is not valid; use the join URL that the server printed"
        return Refusal(ErrorCode.CREDENTIAL, reason)

    def admit_operator(self, credential: str, address: str) -> AccessLevel | Refusal:
        """Admit every client with the operator's credential as an operator."""
        if same_secret(credential, self._operator_credential):
            return AccessLevel.OPERATOR
        reason = "the credential is not valid; use the operator's URL that the server printed"
        return Refusal(ErrorCode.CREDENTIAL, reason)

    def failed(self, address: str) -> bool:
        """Return True; attempts are not counted."""
        return True

    def departed(self, identity: int, reason: str, *, lost: bool) -> None:
        """Do nothing; no device is recorded."""

    def contributed(self, identity: int, done: DeviceCounters) -> None:
        """Do nothing; no device is recorded."""

    def conducted(self, identity: int, conduct: Conduct) -> None:
        """Do nothing; no device is recorded."""

    def faulted(self, identity: int, fault: str, penalty: float) -> None:
        """Do nothing; no device is recorded."""

    def quarantined(self, identity: int, reason: str) -> None:
        """Do nothing; no device is recorded."""


def one_is(keys: Iterable[str], secret: str) -> bool:
    """Return whether any key is the secret, comparing all of them."""
    return sum([same_secret(key, secret) for key in keys]) > 0


def clean_name(name: str) -> str:
    """Return a device's name, safe to print: printable, on one line, not too long."""
    return clean_text(name, MAX_NAME)


def clean_text(text: str, most: int) -> str:
    """Return a device's text, safe to print: at most `most` characters, no terminal codes."""
    return clean(text)[:most].strip()


def same_secret(one: str, other: str) -> bool:
    """Return whether two secrets are equal, in a time independent of where they differ."""
    return hmac.compare_digest(one.encode(), other.encode())
