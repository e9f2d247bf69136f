"""Who may join: what the session manager asks, and an authenticator with one credential for all."""

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
"""Characters of a device's name that are kept."""


@dataclass(frozen=True, slots=True)
class Admission:
    """The device may join.

    Attributes:
        identity: which device it is, the same in all its sessions; None if none is recorded.
        name: the name under which it is known; empty for the name in its `hello`.
        credential: a new credential that the device is to keep; empty if it has one.
        faults: wrong results that still count against it.
        penalty: the sum of their points (`cleave.scheduler.sessions.reputation`).
        conduct: how it worked in its last session.
        measured_by: for a device that only has its link measured, the credential or code that let
            it in; empty where any number of devices may use that.
        at_once: how many devices may use `measured_by` at the same time.
        measures: the identity of a device that only has its link measured, where it is known. Such
            a session has no `identity`, because it does no work.
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
        """Return which device it is, whether it works or only has its link measured."""
        return self.identity if self.identity is not None else self.measures


@dataclass(frozen=True, slots=True)
class Refusal:
    """The peer may not join; the reason says what is wrong and what to do.

    Attributes:
        retry_after_s: seconds after which the same peer may be let in, where that is known; else 0.
    """

    code: ErrorCode
    reason: str
    retry_after_s: float = 0.0


class AccessLevel(Enum):
    """What a client that is not a device may do."""

    OPERATOR = "operator"
    """It may do everything."""

    VIEWER = "viewer"
    """It may only look at what the fleet is doing."""


AdmissionResult: TypeAlias = Admission | Refusal


class Authenticator(Protocol):
    """Decides who may join, and keeps what is learnt of devices. Called in the server's loop.

    Attributes:
        server: the server's id, which devices are told; empty if devices keep no credential for it.
    """

    server: str

    def admit(self, hello: Hello, address: str) -> AdmissionResult:
        """Let a device in, or say why not. This may use up a join code.

        Args:
            hello: its first message; everything else in it has been checked.
            address: where it connects from; empty where there is no network.
        """
        ...

    def admit_operator(self, credential: str, address: str) -> AccessLevel | Refusal:
        """Let an operator or a viewer in, or say why not."""
        ...

    def failed(self, address: str) -> bool:
        """Count a failed attempt: a peer at this address sent something that is not a `hello`.

        Returns:
            Whether it had an attempt left, and so is worth an answer.
        """
        ...

    def departed(self, identity: int, reason: str, *, lost: bool) -> None:
        """Note that a device's session ended: as intended, or because the device was lost."""
        ...

    def contributed(self, identity: int, done: DeviceCounters) -> None:
        """Add what a device did since the last call."""
        ...

    def conducted(self, identity: int, conduct: Conduct) -> None:
        """Remember how a device works for its next session."""
        ...

    def faulted(self, identity: int, fault: str, penalty: float) -> None:
        """Note that a device sent a wrong result, which costs it this many penalty points."""
        ...

    def quarantined(self, identity: int, reason: str) -> None:
        """Note that a device gets no tasks any more, until an operator releases it."""
        ...


class SharedSecretAuth:
    """One credential for all devices, without identities, and one for operators.

    A program's own fleet uses it. Its credentials are random and long, so guesses need no limit.
    Nothing tells its devices apart: all that the program gave the credential to are its own.

    Args:
        credential: what a device's `hello` must carry; empty for none.
        operator_credential: what an operator's `hello` must carry; empty for none.
    """

    server = ""

    def __init__(self, credential: str = "", operator_credential: str = "") -> None:
        self._credential = credential
        self._operator_credential = operator_credential

    def admit(self, hello: Hello, address: str) -> AdmissionResult:
        """See `Authenticator.admit`."""
        # A device may send a credential of another server, kept for this address, and ours as code.
        keys = (hello.credential, hello.join_code) if hello.join_code else (hello.credential,)
        if one_is(keys, self._credential):
            return Admission(own=True)
        reason = "the credential is not valid; use the join URL that the server printed"
        return Refusal(ErrorCode.CREDENTIAL, reason)

    def admit_operator(self, credential: str, address: str) -> AccessLevel | Refusal:
        """See `Authenticator.admit_operator`."""
        if same_secret(credential, self._operator_credential):
            return AccessLevel.OPERATOR
        reason = "the credential is not valid; use the operator's URL that the server printed"
        return Refusal(ErrorCode.CREDENTIAL, reason)

    def failed(self, address: str) -> bool:
        """See `Authenticator.failed`: nothing is kept."""
        return True

    def departed(self, identity: int, reason: str, *, lost: bool) -> None:
        """See `Authenticator.departed`: nothing is kept."""

    def contributed(self, identity: int, done: DeviceCounters) -> None:
        """See `Authenticator.contributed`: nothing is kept."""

    def conducted(self, identity: int, conduct: Conduct) -> None:
        """See `Authenticator.conducted`: nothing is kept."""

    def faulted(self, identity: int, fault: str, penalty: float) -> None:
        """See `Authenticator.faulted`: nothing is kept."""

    def quarantined(self, identity: int, reason: str) -> None:
        """See `Authenticator.quarantined`: nothing is kept."""


def one_is(keys: Iterable[str], secret: str) -> bool:
    """Say whether one of the keys is the secret; all of them are compared."""
    return sum([same_secret(key, secret) for key in keys]) > 0


def clean_name(name: str) -> str:
    """Return a device's name as it can be shown anywhere: printable, on one line, not too long."""
    return clean_text(name, MAX_NAME)


def clean_text(text: str, most: int) -> str:
    """Return a device's text as it can be shown anywhere: no line ends, no terminal codes."""
    return clean(text)[:most].strip()


def same_secret(one: str, other: str) -> bool:
    """Say whether two secrets are equal, in a time that does not tell where they differ."""
    return hmac.compare_digest(one.encode(), other.encode())
