"""Decisions about devices and join codes that take effect before they are stored.

A revoked or quarantined device must not be admitted even while the store is unwritable, for example
because the disk is full. So a decision takes effect in memory first and is then written to the
store. The writer retries a failed write until it succeeds.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from cleave.server.store.store import AccessStatus, CodeRecord, DeviceRecord, Store
from cleave.server.store.writer import StoreWriter

_Pending = TypeVar("_Pending")
_Record = TypeVar("_Record", CodeRecord, DeviceRecord)


@dataclass(frozen=True, slots=True)
class _Decision:
    standing: AccessStatus
    reason: str
    at_s: float


class AccessStatuses:
    """The permissions and wrong results of devices, and the void join codes. Thread-safe."""

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

        def write() -> None:
            self._store.stand(device, standing, reason, decision.at_s)

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
        store and looking in memory. So this method reads the store until two consecutive reads
        return the same record.
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
