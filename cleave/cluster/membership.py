"""The list of admitted devices, shared by the servers of a cluster.

Devices join the first server, which is the only server with a store. The first server sends the
list of admitted devices to the other servers before it moves devices to them. A device sends the
same credential to all servers. The other servers store nothing and report device events to the
first server.
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
    Measurement,
    Refusal,
    one_is,
)
from cleave.server.access import hash_secret

RETRY_S: Final = 1.0
"""Time after which a device that this server refuses should connect to the first server."""


@dataclass(frozen=True, slots=True)
class Member:
    """A device that the first server has admitted."""

    credential_hash: bytes
    admission: Admission  # without a new credential


@dataclass(frozen=True, slots=True)
class Roll:
    """Lists of admitted and expelled devices, which the first server sends to other servers."""

    version: int  # grows with every change
    members: tuple[Member, ...] = ()
    expelled: Mapping[int, tuple[ErrorCode, str]] = field(default_factory=dict)  # by identity


class Keeper(Authenticator, Protocol):
    """Interface for the authenticator to which `Members` delegates. `Access` implements it."""

    def arrived(self, identity: int) -> None: ...


Report = Callable[[Keeper], object]
"""Type of a report about a device: a function that calls a method of a `Keeper`."""


class Membership:
    """The authenticator of every server except the first. `server` is the first server's id.

    `fleet_credential`, unless empty, also admits devices that are not in the list.
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
        """Return the pending reports, and the number of all reports since this process started.

        Discard the first `taken` reports, because the list of devices already reflects them.
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
        """Admit a device that the first server admitted, or that sends the fleet credential."""
        keys = [key for key in (hello.credential, hello.join_code) if key]
        if self._fleet_credential and one_is(keys, self._fleet_credential):
            return Admission()
        member = self._members.get(hash_secret(hello.credential))
        identity = member.admission.identity if member is not None else None
        if member is None or identity is None or identity in self._quarantined:
            reason = "this server does not know this device; join the first server first"
            return Refusal(ErrorCode.LIMIT, reason, RETRY_S)
        if hello.measure:
            return Admission(measured_by=f"device {identity}", measures=identity)
        self._report("arrived", identity)
        return member.admission

    def admit_operator(self, credential: str, address: str) -> AccessLevel | Refusal:
        """Refuse every operator and viewer, because they use the first server."""
        return Refusal(
            ErrorCode.CREDENTIAL, "this is not the first server, so it does not accept operators"
        )

    def failed(self, address: str) -> bool:
        """Return True to permit any number of attempts, because credentials cannot be guessed."""
        return True

    def departed(self, identity: int, reason: str, *, lost: bool) -> None:
        self._report("departed", identity, reason, lost=lost)

    def contributed(self, identity: int, done: DeviceCounters) -> None:
        self._report("contributed", identity, replace(done))

    def record_behavior(self, identity: int, behavior: Behavior) -> None:
        self._report("record_behavior", identity, behavior)

    def record_measurement(self, identity: int, measured: Measurement) -> None:
        """Store nothing: the first server's link to the device may differ."""

    def faulted(self, identity: int, fault: str, penalty: float) -> None:
        self._report("faulted", identity, fault, penalty)

    def quarantined(self, identity: int, reason: str) -> None:
        """Report a quarantined device to the first server and refuse the device at this server."""
        self._report("quarantined", identity, reason)
        self._quarantined[identity] = self._taken + len(self._reports)


class Members:
    """The first server's authenticator. It delegates to `keeper` and keeps the device lists."""

    def __init__(self, keeper: Keeper) -> None:
        self.server = keeper.server
        self._keeper = keeper
        self.admit_operator, self.failed = keeper.admit_operator, keeper.failed
        self.arrived, self.departed = keeper.arrived, keeper.departed
        self.contributed, self.record_measurement = keeper.contributed, keeper.record_measurement
        self._members: dict[int, Member] = {}
        self._expelled: dict[int, tuple[ErrorCode, str]] = {}
        self._version = 0

    def roll(self) -> Roll:
        """Return the current lists of admitted and expelled devices, for the other servers."""
        return Roll(self._version, tuple(self._members.values()), dict(self._expelled))

    def expel(self, identity: int, code: ErrorCode, reason: str) -> None:
        """Remove a device from the list. The other servers then end its sessions and refuse it."""
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
        """Record in the list of admitted devices whether the operator owns a device."""
        self._changed(identity, lambda known: replace(known, own=own))

    def admit(self, hello: Hello, address: str) -> AdmissionResult:
        """Admit a device if `keeper` admits it, and add it to the list of admitted devices."""
        result = self._keeper.admit(hello, address)
        if isinstance(result, Admission) and result.identity is not None:
            shown = hash_secret(result.credential or hello.credential)
            self._members[result.identity] = Member(
                shown, replace(result, credential="", measured=None)
            )
            self._expelled.pop(result.identity, None)
            self._version += 1
        return result

    def record_behavior(self, identity: int, behavior: Behavior) -> None:
        self._keeper.record_behavior(identity, behavior)
        self._changed(identity, lambda known: replace(known, behavior=behavior))

    def faulted(self, identity: int, fault: str, penalty: float) -> None:
        self._keeper.faulted(identity, fault, penalty)
        self._changed(
            identity,
            lambda known: replace(known, faults=known.faults + 1, penalty=known.penalty + penalty),
        )

    def quarantined(self, identity: int, reason: str) -> None:
        """Quarantine a device, and expel it from all servers."""
        if identity in self._members:  # otherwise, an operator already revoked the device
            self._keeper.quarantined(identity, reason)
            self.expel(identity, ErrorCode.QUARANTINED, reason)
