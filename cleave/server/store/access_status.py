"""What devices may do and which join codes are void: true at once, written as soon as it can be.

A store that cannot be written (a full disk, a locked file) must not keep a device in that was
revoked, nor let one back in that lies. So a decision is kept in memory first and asked there, and
is owed to the store until it is in it.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from cleave.server.store.store import AccessStatus, CodeRecord, DeviceRecord, Store
from cleave.server.store.writer import StoreWriter

_Record = TypeVar("_Record", CodeRecord, DeviceRecord)


@dataclass(frozen=True, slots=True)
class _Decision:
    standing: AccessStatus
    reason: str
    at_s: float


class AccessStatuses:
    """Decisions about devices and codes. Any thread may call it.

    Args:
        store: where they are kept.
        writer: whose thread writes them.
        clock: Unix time, in seconds.
    """

    def __init__(self, store: Store, writer: StoreWriter, clock: Callable[[], float]) -> None:
        self._store = store
        self._writer = writer
        self._clock = clock
        self._lock = threading.Lock()
        self._last_s = 0.0
        # What is not written yet.
        self._decisions: dict[int, _Decision] = {}
        self._void: dict[int, str] = {}
        self._faults: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)

    def decide(self, device: int, name: str, standing: AccessStatus, reason: str) -> None:
        """From now on a device may do this.

        Args:
            device, name: which; the name is for people.
            standing, reason: what, and why.
        """
        with self._lock:
            decision = _Decision(standing, reason, self._now())
            self._decisions[device] = decision

        def write() -> None:
            self._store.stand(device, decision.standing, decision.reason, decision.at_s)
            with self._lock:
                if self._decisions.get(device) is decision:
                    del self._decisions[device]

        why = f" ({reason})" if reason else ""
        self._writer.owe(("standing", device), write, f"{name} is {standing.value}{why}")

    def void(self, code: int, reason: str) -> None:
        """From now on nobody joins with this code."""
        with self._lock:
            self._void[code] = reason

        def write() -> None:
            self._store.void(code, reason)
            with self._lock:
                self._void.pop(code, None)

        self._writer.owe(("code", code), write, f"join code {code} is void ({reason})")

    def fault(self, device: int, fault: str, penalty: float) -> None:
        """A device sent a wrong result, which costs it so many points."""
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
        """Wrong results of a device since then, and since it was released; and their points."""
        with self._lock:  # first: what is written meanwhile is found in both, and counted once
            decision = self._decisions.get(device)
            if decision is not None and decision.standing is AccessStatus.ADMITTED:
                since_s = max(since_s, math.nextafter(decision.at_s, math.inf))
            pending = [fault for fault in self._faults.get(device, ()) if fault[0] >= since_s]
        written = self._store.faults_since(device, since_s)
        faults = Counter(pending) | Counter(written)
        return faults.total(), sum(points * times for (_, points), times in faults.items())

    def _now(self) -> float:
        """The time; never the same twice, so that a fault is known by it, and what came first."""
        self._last_s = max(self._clock(), math.nextafter(self._last_s, math.inf))
        return self._last_s

    def of(self, device: DeviceRecord) -> DeviceRecord:
        """A device as it stands now, whatever the store says."""
        with self._lock:
            decision = self._decisions.get(device.id)
        if decision is None:
            return device
        return replace(device, standing=decision.standing, reason=decision.reason)

    def device_of(self, credential_hash: bytes) -> DeviceRecord | None:
        """The device whose credential has this hash, as it stands now."""
        return self._settled(lambda: self._store.device_of(credential_hash), self.of)

    def code_of(self, hash: bytes) -> CodeRecord | None:
        """The join code with this hash, as it is now."""
        return self._settled(lambda: self._store.code(hash), self.code)

    @staticmethod
    def _settled(
        read: Callable[[], _Record | None], now: Callable[[_Record], _Record]
    ) -> _Record | None:
        """What the store says, corrected by what is not written yet.

        A decision that is written after the store was read, and forgotten before it is asked for
        here, would be missed: so the store is read until it says the same twice.
        """
        record = read()
        while record is not None:
            found, again = now(record), read()
            if found != record or again == record:
                return found
            record = again
        return None

    def code(self, code: CodeRecord) -> CodeRecord:
        """Likewise a join code."""
        with self._lock:
            return replace(code, void=self._void.get(code.id, code.void))
