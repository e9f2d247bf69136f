"""Devices that all servers of a cluster admit, and reports about them to the first server.

Devices join the first server, which alone has the store. Before it sends devices to another server,
it tells that server which ones it admitted. Devices show the same credential everywhere. The other
servers store nothing: they report to the first one, which stores it.
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
"""Seconds after which an unknown device is told to retry, at the first server."""


@dataclass(frozen=True, slots=True)
class Member:
    """A device that the first server has admitted.

    Attributes:
        credential_hash: hash of the credential that the device shows.
        admission: the first server's data about the device.
    """

    credential_hash: bytes
    admission: Admission


@dataclass(frozen=True, slots=True)
class Roll:
    """The complete list of devices that another server must admit.

    Attributes:
        version: grows with every change.
        members: admitted devices.
        expelled: formerly admitted devices: error to send, by identity.
    """

    version: int
    members: tuple[Member, ...] = ()
    expelled: Mapping[int, tuple[ErrorCode, str]] = field(default_factory=dict)


class Keeper(Authenticator, Protocol):
    """The authenticator of the first server. `Access` implements it."""

    def arrived(self, identity: int) -> None:
        """Record that a known device's session began on another server."""
        ...


Report = Callable[[Keeper], object]
"""News about a device: calls a method of the first server's authenticator."""


class Roster:
    """The authenticator of every server but the first; see `Authenticator`.

    Args:
        server: id of the first server, under which devices store their credential.
        fleet_credential: admits any number of devices, which are not stored; empty to disable.
    """

    def __init__(self, server: str, fleet_credential: str = "") -> None:
        self.server = server
        self._fleet_credential = fleet_credential
        self._members: dict[bytes, Member] = {}
        # Number of the report about each quarantined device. Until the first server takes that
        # report, its list may still contain the device.
        self._quarantined: dict[int, int] = {}
        self._reports: list[Report] = []
        self._taken = 0

    # --- calls by the first server ---

    def replace(self, roll: Roll) -> None:
        """Admit only these devices from now on."""
        self._members = {member.credential_hash: member for member in roll.members}

    def reports(self, taken: int) -> tuple[list[Report], int]:
        """Return the pending reports, and the number of reports up to the last one.

        Args:
            taken: number returned by the last call. Reports up to it are discarded: the most recent
                `replace` already reflects them.
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
        """Admit a device that the first server has admitted, or that has the fleet credential."""
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
        """Refuse: operators use the first server."""
        return Refusal(ErrorCode.CREDENTIAL, "this server of several takes no operators")

    def failed(self, address: str) -> bool:
        """Return True without counting: credentials cannot be guessed."""
        return True

    def departed(self, identity: int, reason: str, *, lost: bool) -> None:
        """Report that a device's session ended."""
        self._report("departed", identity, reason, lost=lost)

    def contributed(self, identity: int, done: DeviceCounters) -> None:
        """Report a device's work since the last call."""
        self._report("contributed", identity, replace(done))

    def conducted(self, identity: int, conduct: Conduct) -> None:
        """Report how a device works."""
        self._report("conducted", identity, conduct)

    def faulted(self, identity: int, fault: str, penalty: float) -> None:
        """Report a device's wrong result and its penalty points."""
        self._report("faulted", identity, fault, penalty)

    def quarantined(self, identity: int, reason: str) -> None:
        """Report a quarantined device, and refuse it from now on."""
        self._report("quarantined", identity, reason)
        self._quarantined[identity] = self._taken + len(self._reports)


class Members:
    """The first server's authenticator, which keeps a list of admitted devices.

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
        """Return the current list for other servers."""
        return Roll(self._version, tuple(self._members.values()), dict(self._expelled))

    def expel(self, identity: int, code: ErrorCode, reason: str) -> None:
        """Stop admitting a device, on any server.

        Args:
            identity: identity of the device.
            code, reason: error that the device gets where it is connected.
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
        """Set whether a device belongs to the operator."""
        self._changed(identity, lambda known: replace(known, own=own))

    def arrived(self, identity: int) -> None:
        """Record that a known device's session began on another server."""
        self._keeper.arrived(identity)

    def admit(self, hello: Hello, address: str) -> AdmissionResult:
        """Admit a device through the keeper, and add it to the list."""
        result = self._keeper.admit(hello, address)
        if isinstance(result, Admission) and result.identity is not None:
            shown = hash_secret(result.credential or hello.credential)
            self._members[result.identity] = Member(shown, replace(result, credential=""))
            self._expelled.pop(result.identity, None)
            self._version += 1
        return result

    def admit_operator(self, credential: str, address: str) -> AccessLevel | Refusal:
        """Return the access level of an operator or viewer, or a refusal."""
        return self._keeper.admit_operator(credential, address)

    def failed(self, address: str) -> bool:
        """Count a failed attempt; return whether the address had an attempt left."""
        return self._keeper.failed(address)

    def departed(self, identity: int, reason: str, *, lost: bool) -> None:
        """Record that a device's session ended."""
        self._keeper.departed(identity, reason, lost=lost)

    def contributed(self, identity: int, done: DeviceCounters) -> None:
        """Add a device's work since the last call."""
        self._keeper.contributed(identity, done)

    def conducted(self, identity: int, conduct: Conduct) -> None:
        """Store how a device works, for its next session."""
        self._keeper.conducted(identity, conduct)
        self._changed(identity, lambda known: replace(known, conduct=conduct))

    def faulted(self, identity: int, fault: str, penalty: float) -> None:
        """Record a device's wrong result and its penalty points."""
        self._keeper.faulted(identity, fault, penalty)
        self._changed(
            identity,
            lambda known: replace(known, faults=known.faults + 1, penalty=known.penalty + penalty),
        )

    def quarantined(self, identity: int, reason: str) -> None:
        """Quarantine a device and expel it."""
        if identity in self._members:  # else it was revoked meanwhile, which takes precedence
            self._keeper.quarantined(identity, reason)
            self.expel(identity, ErrorCode.QUARANTINED, reason)
