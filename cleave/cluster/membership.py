"""Share the list of admitted devices among the servers of a cluster.

Devices join the first server, which is the only server with a store. Before the first server moves
devices to another server, it sends that server the list of admitted devices. A device shows the
same credential to all servers. The other servers store nothing. They report all events about
devices to the first server, which stores them.
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
    Behavior,
    Refusal,
    one_is,
)
from cleave.server.auth.codes import hash_secret

RETRY_S: Final = 1.0
"""Seconds after which a device that this server does not know should retry at the first server."""


@dataclass(frozen=True, slots=True)
class Member:
    """A device that the first server has admitted.

    Attributes:
        credential_hash: hash of the device's credential.
        admission: the first server's admission of the device, without a new credential.
    """

    credential_hash: bytes
    admission: Admission


@dataclass(frozen=True, slots=True)
class Roll:
    """The list of admitted devices that the first server sends to the other servers.

    Attributes:
        version: version number of the list, which grows with every change.
        members: all devices that the other servers must admit.
        expelled: maps the identity of each expelled device to the error code and reason that the
            device gets.
    """

    version: int
    members: tuple[Member, ...] = ()
    expelled: Mapping[int, tuple[ErrorCode, str]] = field(default_factory=dict)


class Keeper(Authenticator, Protocol):
    """The interface that `Members` needs from an authenticator. `Access` implements it."""

    def arrived(self, identity: int) -> None:
        """Record that the session of an admitted device began on another server."""
        ...


Report = Callable[[Keeper], object]
"""A report about a device: a function that calls a method of the first server's authenticator."""


class Membership:
    """The authenticator of every server except the first. It implements `Authenticator`.

    Args:
        server: id of the first server. A device stores its credential under this id.
        fleet_credential: credential that admits any number of devices, which the first server does
            not store; empty to disable.
    """

    def __init__(self, server: str, fleet_credential: str = "") -> None:
        self.server = server
        self._fleet_credential = fleet_credential
        self._members: dict[bytes, Member] = {}
        # Maps a quarantined device to the number of the report about its quarantine. Until the
        # first server takes the report, the list of admitted devices may still contain the device.
        self._quarantined: dict[int, int] = {}
        self._reports: list[Report] = []
        self._taken = 0

    # --- calls by the first server ---

    def replace(self, roll: Roll) -> None:
        """Replace the list of admitted devices."""
        self._members = {member.credential_hash: member for member in roll.members}

    def reports(self, taken: int) -> tuple[list[Report], int]:
        """Return the reports that the first server has not yet taken.

        Args:
            taken: number of reports that the first server has taken since this process started.
                These reports are discarded, because the latest `replace` reflects them.

        Returns:
            The pending reports, and the number of all reports since this process started.
        """
        del self._reports[: max(0, taken - self._taken)]
        self._taken = max(taken, self._taken)
        known = [identity for identity, report in self._quarantined.items() if report <= taken]
        for identity in known:
            del self._quarantined[identity]
        return list(self._reports), self._taken + len(self._reports)

    def _report(self, method: str, *arguments: object, **named: object) -> None:
        self._reports.append(methodcaller(method, *arguments, **named))

    # --- calls by the session manager ---

    def admit(self, hello: Hello, address: str) -> AdmissionResult:
        """Admit a device if the first server admitted it, or if it shows the fleet credential."""
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
        """Refuse every operator and viewer, because they use the first server."""
        return Refusal(ErrorCode.CREDENTIAL, "this server of several takes no operators")

    def failed(self, address: str) -> bool:
        """Return True: the address has attempts left. Credentials are too long to guess.

        So failed attempts are not counted.
        """
        return True

    def departed(self, identity: int, reason: str, *, lost: bool) -> None:
        """Report to the first server that a device's session ended."""
        self._report("departed", identity, reason, lost=lost)

    def contributed(self, identity: int, done: DeviceCounters) -> None:
        """Report to the first server what a device contributed since the last call."""
        self._report("contributed", identity, replace(done))

    def record_behavior(self, identity: int, behavior: Behavior) -> None:
        """Report a device's behavior, such as its speed and failures, to the first server."""
        self._report("record_behavior", identity, behavior)

    def faulted(self, identity: int, fault: str, penalty: float) -> None:
        """Report a device's wrong result, and the penalty points for it, to the first server."""
        self._report("faulted", identity, fault, penalty)

    def quarantined(self, identity: int, reason: str) -> None:
        """Report to the first server that a device is quarantined, and refuse the device here."""
        self._report("quarantined", identity, reason)
        self._quarantined[identity] = self._taken + len(self._reports)


class Members:
    """The first server's authenticator, which also maintains the list of admitted devices.

    Args:
        keeper: authenticator that decides about admissions and stores facts about devices.
    """

    def __init__(self, keeper: Keeper) -> None:
        self.server = keeper.server
        self._keeper = keeper
        self._members: dict[int, Member] = {}
        self._expelled: dict[int, tuple[ErrorCode, str]] = {}
        self._version = 0

    def roll(self) -> Roll:
        """Return the current list of admitted and expelled devices, for the other servers."""
        return Roll(self._version, tuple(self._members.values()), dict(self._expelled))

    def expel(self, identity: int, code: ErrorCode, reason: str) -> None:
        """Remove a device from the list. Other servers then end its sessions and refuse the device.

        Args:
            identity: identity of the device.
            code, reason: error code and text that a connected device gets.
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
        """Set, in the list of admitted devices, whether the operator owns a device."""
        self._changed(identity, lambda known: replace(known, own=own))

    def arrived(self, identity: int) -> None:
        """Record that the session of an admitted device began on another server."""
        self._keeper.arrived(identity)

    def admit(self, hello: Hello, address: str) -> AdmissionResult:
        """Ask the keeper whether to admit a device. Add an admitted device to the list."""
        result = self._keeper.admit(hello, address)
        if isinstance(result, Admission) and result.identity is not None:
            shown = hash_secret(result.credential or hello.credential)
            self._members[result.identity] = Member(shown, replace(result, credential=""))
            self._expelled.pop(result.identity, None)
            self._version += 1
        return result

    def admit_operator(self, credential: str, address: str) -> AccessLevel | Refusal:
        """Ask the keeper for the access level of an operator or viewer, or a refusal."""
        return self._keeper.admit_operator(credential, address)

    def failed(self, address: str) -> bool:
        """Count a failed attempt from `address`. Return whether the address had an attempt left."""
        return self._keeper.failed(address)

    def departed(self, identity: int, reason: str, *, lost: bool) -> None:
        """Record that a device's session ended on any server."""
        self._keeper.departed(identity, reason, lost=lost)

    def contributed(self, identity: int, done: DeviceCounters) -> None:
        """Record what a device contributed since the last call."""
        self._keeper.contributed(identity, done)

    def record_behavior(self, identity: int, behavior: Behavior) -> None:
        """Store a device's behavior, such as its speed and failures, for its next session."""
        self._keeper.record_behavior(identity, behavior)
        self._changed(identity, lambda known: replace(known, behavior=behavior))

    def faulted(self, identity: int, fault: str, penalty: float) -> None:
        """Record a device's wrong result and the penalty points for it."""
        self._keeper.faulted(identity, fault, penalty)
        self._changed(
            identity,
            lambda known: replace(known, faults=known.faults + 1, penalty=known.penalty + penalty),
        )

    def quarantined(self, identity: int, reason: str) -> None:
        """Record that a device is quarantined, and expel the device from all servers."""
        if identity in self._members:  # otherwise, an operator already revoked the device
            self._keeper.quarantined(identity, reason)
            self.expel(identity, ErrorCode.QUARANTINED, reason)
