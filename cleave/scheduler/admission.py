"""Who may come in: what the session manager asks, and a server with one credential for all."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Final, Protocol, TypeAlias

from cleave.protocol.messages import ErrorCode, Hello
from cleave.protocol.texts import clean
from cleave.scheduler.conduct import Conduct

MAX_NAME: Final = 60
"""Characters of a device's name that are kept."""


@dataclass(frozen=True, slots=True)
class Admission:
    """This device may come in.

    Attributes:
        identity: which device it is, whatever its session; None for one that nobody keeps track of.
        name: under which it is known; empty for the name in its `hello`.
        credential: a new one, that the device is to keep; empty if it has one.
        faults: wrong results that still count against it.
        penalty: what these add up to (`cleave.scheduler.reputation`).
        conduct: how it worked when it was here last.
        measured_by: of one that only wants its link measured, what it came by; empty where any
            number may come by that.
        at_once: how many may at once.
        measures: which device it is that only wants its link measured, where that is known; such a
            session has no `identity`, for it is no device's working one.
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

    @property
    def known_as(self) -> int | None:
        """Which device it is, whether it works or only has its link measured."""
        return self.identity if self.identity is not None else self.measures


@dataclass(frozen=True, slots=True)
class Refusal:
    """This peer may not come in; the reason says what is wrong and what to do.

    Attributes:
        retry_after_s: when the same peer may be let in, where that is known; else 0.
    """

    code: ErrorCode
    reason: str
    retry_after_s: float = 0.0


class AccessLevel(Enum):
    """What somebody who is no device may do."""

    OPERATOR = "operator"
    """Everything."""

    VIEWER = "viewer"
    """Look at what the fleet is doing."""


AdmissionResult: TypeAlias = Admission | Refusal


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a device did.

    Attributes:
        blocks: results that were asked for and came.
        flops: of these.
        downlink_bytes, uplink_bytes: encoded messages, to the device and from it.
        compute_s: as the device states it.
        energy_j: as its telemetry states it (`energy_j`); 0 where it does not.
        failures: runs that it could not do, or answered in another form than was asked for.
    """

    blocks: int = 0
    flops: float = 0.0
    downlink_bytes: int = 0
    uplink_bytes: int = 0
    compute_s: float = 0.0
    energy_j: float = 0.0
    failures: int = 0

    def __add__(self, other: Contribution) -> Contribution:
        return Contribution(*(getattr(self, n) + getattr(other, n) for n in CONTRIBUTION_FIELDS))

    def __sub__(self, other: Contribution) -> Contribution:
        return Contribution(*(getattr(self, n) - getattr(other, n) for n in CONTRIBUTION_FIELDS))


CONTRIBUTION_FIELDS: Final = tuple(field.name for field in fields(Contribution))


class Authenticator(Protocol):
    """Knows who may come in, and keeps what is learnt of devices. Called in the server's loop.

    Attributes:
        server: the server's id, which devices are told; empty for one that nobody comes back to.
    """

    server: str

    def admit(self, hello: Hello, address: str) -> AdmissionResult:
        """Let a device in, or say why not. A join code may be used up by it.

        Args:
            hello: its first message; everything else in it is in order.
            address: where it connects from; empty where there is no network.
        """
        ...

    def admit_operator(self, credential: str, address: str) -> AccessLevel | Refusal:
        """Let an operator or a viewer in, or say why not."""
        ...

    def failed(self, address: str) -> None:
        """Who came from this address said something that is no `hello`: a failed attempt."""
        ...

    def departed(self, identity: int, reason: str, *, lost: bool) -> None:
        """A device's session ended: because it wanted to, or because it was lost."""
        ...

    def contributed(self, identity: int, done: Contribution) -> None:
        """A device did this, since the last call."""
        ...

    def conducted(self, identity: int, conduct: Conduct) -> None:
        """How a device works is to be remembered for its next session."""
        ...

    def faulted(self, identity: int, fault: str, penalty: float) -> None:
        """A device sent a wrong result, which costs it so many points."""
        ...

    def quarantined(self, identity: int, reason: str) -> None:
        """A device gets no work any more, until an operator releases it."""
        ...


class SharedSecretAuth:
    """One credential for all devices, who have no identity, and one for operators.

    It is what a program's own fleet has. The credentials are random and long, so that guessing
    needs no limit.

    Args:
        credential: what `hello` must carry; empty for none.
        operator_credential: likewise for operators.
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
            return Admission()
        reason = "the credential is not valid; use the join URL that the server printed"
        return Refusal(ErrorCode.CREDENTIAL, reason)

    def admit_operator(self, credential: str, address: str) -> AccessLevel | Refusal:
        """See `Authenticator.admit_operator`."""
        if same_secret(credential, self._operator_credential):
            return AccessLevel.OPERATOR
        reason = "the credential is not valid; use the operator's URL that the server printed"
        return Refusal(ErrorCode.CREDENTIAL, reason)

    def failed(self, address: str) -> None:
        """Nothing is kept."""

    def departed(self, identity: int, reason: str, *, lost: bool) -> None:
        """Nothing is kept."""

    def contributed(self, identity: int, done: Contribution) -> None:
        """Nothing is kept."""

    def conducted(self, identity: int, conduct: Conduct) -> None:
        """Nothing is kept."""

    def faulted(self, identity: int, fault: str, penalty: float) -> None:
        """Nothing is kept."""

    def quarantined(self, identity: int, reason: str) -> None:
        """Nothing is kept."""


def one_is(keys: Iterable[str], secret: str) -> bool:
    """Whether one of some keys is the secret; every one is compared."""
    return sum([same_secret(key, secret) for key in keys]) > 0


def clean_name(name: str) -> str:
    """A device's name as it can be shown anywhere: printable, on one line, not too long."""
    return clean_text(name, MAX_NAME)


def clean_text(text: str, most: int) -> str:
    """What a device sent, as it can be shown anywhere: no line ends, no codes for terminals."""
    return clean(text)[:most].strip()


def same_secret(one: str, other: str) -> bool:
    """Whether two secrets are equal, in a time that does not tell where they differ."""
    return hmac.compare_digest(one.encode(), other.encode())
