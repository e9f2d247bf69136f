"""Which devices all servers of a cluster let in, and what they report of them to the first.

Devices join the first server, which alone has the store. It tells the others which devices it let
in before it sends them there; they show the same credential everywhere. The others keep nothing:
what they learn of a device they report, and the first server stores it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from operator import methodcaller
from typing import Final, Protocol

from cleave.protocol.device_counters import DeviceCounters
from cleave.protocol.messages import ErrorCode, Hello
from cleave.scheduler.sessions.admission import (
    AccessLevel,
    Admission,
    AdmissionResult,
    Authenticator,
    Refusal,
    one_is,
)
from cleave.scheduler.sessions.conduct import Conduct
from cleave.server.auth.codes import hash_secret

RETRY_S: Final = 1.0
"""A device that a server does not know is told to go back to the first one after that time."""


@dataclass(frozen=True, slots=True)
class Member:
    """Holds a device that the first server has let in.

    Attributes:
        credential_hash: of what the device shows.
        admission: what the first server knows of it.
    """

    credential_hash: bytes
    admission: Admission


@dataclass(frozen=True, slots=True)
class Roll:
    """Tells another server whom it lets in, all of them.

    Attributes:
        version: grows with every change.
        members: who is let in.
        expelled: who was let in once and is no more, by identity, with what it is to be told.
    """

    version: int
    members: tuple[Member, ...] = ()
    expelled: Mapping[int, tuple[ErrorCode, str]] = field(default_factory=dict)


class Keeper(Authenticator, Protocol):
    """The authenticator of the first server, as `Access` is."""

    def arrived(self, identity: int) -> None:
        """Note that a known device's session began on another server."""
        ...


Report = Callable[[Keeper], object]
"""What a server has learnt of a device: calls a method of the first server's authenticator."""


class Roster:
    """The authenticator of a server that is not the first; see `Authenticator`.

    Args:
        server: the id of the first server, under which devices keep their credential.
        fleet_credential: admits any number of devices of which nothing is kept; empty for none.
    """

    def __init__(self, server: str, fleet_credential: str = "") -> None:
        self.server = server
        self._fleet_credential = fleet_credential
        self._members: dict[bytes, Member] = {}
        # By identity, the number of the report of it: until that is taken, the first server does
        # not know, and a roll may still have the device.
        self._quarantined: dict[int, int] = {}
        self._reports: list[Report] = []
        self._taken = 0

    # --- what the first server says and asks ---

    def replace(self, roll: Roll) -> None:
        """Let in these devices from now on, and no others."""
        self._members = {member.credential_hash: member for member in roll.members}

    def reports(self, taken: int) -> tuple[list[Report], int]:
        """Return what was learnt, and the number of reports up to there.

        What is done about reports that were taken is in the roll that came last, see `replace`.

        Args:
            taken: the number that was returned last; what came before it is forgotten.
        """
        del self._reports[: max(0, taken - self._taken)]
        self._taken = max(taken, self._taken)
        known = [identity for identity, report in self._quarantined.items() if report <= taken]
        for identity in known:
            del self._quarantined[identity]
        return list(self._reports), self._taken + len(self._reports)

    def _report(self, method: str, *arguments: object, **named: object) -> None:
        self._reports.append(methodcaller(method, *arguments, **named))

    # --- what the session manager asks and says ---

    def admit(self, hello: Hello, address: str) -> AdmissionResult:
        """See `Authenticator.admit`."""
        keys = [key for key in (hello.credential, hello.join_code) if key]
        if self._fleet_credential and one_is(keys, self._fleet_credential):
            return Admission()
        member = self._members.get(hash_secret(hello.credential))
        identity = member.admission.identity if member is not None else None
        if member is None or identity is None or identity in self._quarantined:
            reason = "this server of several does not know this device; it is to join the first"
            return Refusal(ErrorCode.LIMIT, reason, RETRY_S)
        if hello.measure:
            return Admission(measured_by=f"device {identity}", measures=identity)
        self._report("arrived", identity)
        return member.admission

    def admit_operator(self, credential: str, address: str) -> AccessLevel | Refusal:
        """See `Authenticator.admit_operator`: operators are at the first server."""
        return Refusal(ErrorCode.CREDENTIAL, "this server of several takes no operators")

    def failed(self, address: str) -> bool:
        """See `Authenticator.failed`: credentials cannot be guessed, nothing is counted."""
        return True

    def departed(self, identity: int, reason: str, *, lost: bool) -> None:
        """See `Authenticator.departed`."""
        self._report("departed", identity, reason, lost=lost)

    def contributed(self, identity: int, done: DeviceCounters) -> None:
        """See `Authenticator.contributed`."""
        self._report("contributed", identity, replace(done))

    def conducted(self, identity: int, conduct: Conduct) -> None:
        """See `Authenticator.conducted`."""
        self._report("conducted", identity, conduct)

    def faulted(self, identity: int, fault: str, penalty: float) -> None:
        """See `Authenticator.faulted`."""
        self._report("faulted", identity, fault, penalty)

    def quarantined(self, identity: int, reason: str) -> None:
        """See `Authenticator.quarantined`."""
        self._report("quarantined", identity, reason)
        self._quarantined[identity] = self._taken + len(self._reports)


class Members:
    """The first server's authenticator, which remembers whom it let in; see `Authenticator`.

    Args:
        keeper: decides and stores.
    """

    def __init__(self, keeper: Keeper) -> None:
        self.server = keeper.server
        self._keeper = keeper
        self._members: dict[int, Member] = {}
        self._expelled: dict[int, tuple[ErrorCode, str]] = {}
        self._version = 0

    def roll(self) -> Roll:
        """Return what other servers are to know now."""
        return Roll(self._version, tuple(self._members.values()), dict(self._expelled))

    def expel(self, identity: int, code: ErrorCode, reason: str) -> None:
        """Let a device in no more, on any server.

        Args:
            identity: of the device.
            code, reason: what it is told where it is connected.
        """
        self._members.pop(identity, None)
        self._expelled[identity] = code, reason
        self._version += 1

    def _changed(self, identity: int, change: Callable[[Admission], Admission]) -> None:
        member = self._members.get(identity)
        if member is not None:
            admission = change(member.admission)
            self._members[identity] = replace(member, admission=admission)
            self._version += 1

    def mark_own(self, identity: int, *, own: bool) -> None:
        """Note that a device is the operator's own now, or is that no more."""
        self._changed(identity, lambda known: replace(known, own=own))

    def arrived(self, identity: int) -> None:
        """See `Keeper.arrived`."""
        self._keeper.arrived(identity)

    def admit(self, hello: Hello, address: str) -> AdmissionResult:
        """See `Authenticator.admit`."""
        result = self._keeper.admit(hello, address)
        if isinstance(result, Admission) and result.identity is not None:
            shown = hash_secret(result.credential or hello.credential)
            self._members[result.identity] = Member(shown, replace(result, credential=""))
            self._expelled.pop(result.identity, None)
            self._version += 1
        return result

    def admit_operator(self, credential: str, address: str) -> AccessLevel | Refusal:
        """See `Authenticator.admit_operator`."""
        return self._keeper.admit_operator(credential, address)

    def failed(self, address: str) -> bool:
        """See `Authenticator.failed`."""
        return self._keeper.failed(address)

    def departed(self, identity: int, reason: str, *, lost: bool) -> None:
        """See `Authenticator.departed`."""
        self._keeper.departed(identity, reason, lost=lost)

    def contributed(self, identity: int, done: DeviceCounters) -> None:
        """See `Authenticator.contributed`."""
        self._keeper.contributed(identity, done)

    def conducted(self, identity: int, conduct: Conduct) -> None:
        """See `Authenticator.conducted`."""
        self._keeper.conducted(identity, conduct)
        self._changed(identity, lambda known: replace(known, conduct=conduct))

    def faulted(self, identity: int, fault: str, penalty: float) -> None:
        """See `Authenticator.faulted`."""
        self._keeper.faulted(identity, fault, penalty)
        self._changed(
            identity,
            lambda known: replace(known, faults=known.faults + 1, penalty=known.penalty + penalty),
        )

    def quarantined(self, identity: int, reason: str) -> None:
        """See `Authenticator.quarantined`."""
        if identity in self._members:  # else it was revoked meanwhile, which counts more
            self._keeper.quarantined(identity, reason)
            self.expel(identity, ErrorCode.QUARANTINED, reason)
