"""Find the devices that hold the trained state of stages, during and between steps.

A device that loses its connection may still have its trained state, so its stages wait for the
device. Before a device leaves, it returns the state that no other device has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Final

from cleave.planner.plan import DeviceRates
from cleave.planner.stages.model import NOTHING_KEPT, KeptBatches, PlannedStage
from cleave.scheduler.instructions import SendStage
from cleave.scheduler.sessions.session import Session
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.device import StageDevice
from cleave.scheduler.stages.resident import KeptState
from cleave.scheduler.stages.step import StageStep
from cleave.scheduler.stages.work import StepWork
from cleave.scheduler.tiles.device_memory import Names

# How long a stage waits for a device that lost its connection and may still have its state. Another
# device would first receive a snapshot and repeat the logged steps. After a cut of 5 s, a device
# returns within 13 s; see `Agent`.
RETURN_S: Final = 15.0

# Longest time in which devices may return their state because one of them wants to leave.
_HAND_OVER_S: Final = 20.0

# How long devices keep state from before a restart of the PS if no step needs it.
_EXPECTED_S: Final = 600.0

_ID_GAP: Final = 2**32  # more than the IDs that a PS assigns after it has recorded a step


@dataclass(slots=True)
class _Away:
    """The arrays of a device that lost its connection, if it still has them.

    Attributes:
        awaited: whether the device's stages wait for its return.
    """

    store: StageDevice
    left_s: float
    awaited: bool = True


class Holders:
    """Finds the devices that hold trained state.

    Args:
        stores: maps a device to its `StageDevice`. Entries are removed and added when devices leave
            and return.
        ids: the counters for new IDs.

    Attributes:
        leaving: devices that will leave once they have returned their trained state.
        return_s: how long a stage waits for a device that lost its connection, in seconds.
    """

    def __init__(self, stores: dict[int, StageDevice], ids: Names) -> None:
        self.leaving: set[int] = set()
        self.return_s = RETURN_S
        self._stores = stores
        self._ids = ids
        self._away: dict[str, _Away] = {}  # key: `Session.arrays`
        # State from before the PS was restarted, until the first step. The key is as above.
        self._expected: dict[str, KeptState] = {}
        self._expected_s: float | None = None  # since when

    # --- steps ---

    def begin(self, work: StepWork, now_s: float) -> None:
        """Set the work of a new step in all stores, and drop the state of withdrawn steps."""
        assert work.resident is not None
        for kept in work.resident.kept:
            if kept.arrays in self._expected:
                store = StageDevice(0, self._ids, work)
                store.adopt(kept)
                self._away[kept.arrays] = _Away(store, now_s)
        self._expected.clear()
        for store in (*self._stores.values(), *self._stores_away()):
            store.work = work
            store.drop_withdrawn()

    def withdraw(self) -> None:
        """Drop the state that disconnected devices updated in an unfinished step."""
        for store in self._stores_away():
            store.drop_withdrawn()

    def end(self) -> None:
        """Forget the arrays of disconnected devices."""
        self._away.clear()
        self._expected.clear()

    def _stores_away(self) -> Iterator[StageDevice]:
        return (away.store for away in self._away.values())

    def held(
        self, work: StepWork, stage: PlannedStage, there: Set[int], last: Sequence[int]
    ) -> PlannedStage:
        """Return the stage, reassigned to the device that holds its newest trained state.

        A stage without trained layers stays on its planned device. While the newest state is on a
        disconnected device that may return, the returned stage has no device.

        Args:
            there: the devices that can take part in the step.
            last: the devices of this stage in the last step.
        """
        assert work.resident is not None
        if not any(work.resident.of_stage(stage)):
            return replace(stage, devices=stage.devices[:1])
        found: dict[int, int] = {}
        for device, store in self._stores.items():
            if device in there and (updates := store.updates_in(stage)) is not None:
                found[device] = updates
        best = max(found, key=lambda d: (found[d], d in stage.devices, d in last), default=None)
        if best is not None:
            return replace(stage, devices=(best,))
        return replace(stage, devices=() if self.awaited(stage) else stage.devices[:1])

    def store_of(
        self, state: Iterable[StageArray], updates: int, able: Set[int]
    ) -> StageDevice | None:
        """Return the store of a device in `able` that has `state` after exactly `updates` updates.

        Return None if no device in `able` has this state."""
        state = list(state)
        for device, store in self._stores.items():
            if device in able and all(store.updates_of(array) == updates for array in state):
                return store
        return None

    # --- devices that leave, or lose their connection and return ---

    def hands_over(
        self,
        device: int,
        step: StageStep | None,
        able: Set[int],
        rates: Mapping[int, DeviceRates],
    ) -> bool:
        """Return whether a device that wants to leave should first return its trained state.

        If so, the training thread fetches the state of all devices. The state is not fetched if
        other devices also hold it, or if the upload would take too long.

        Args:
            step: the current or last step.
            able: the devices that may train layers.
            rates: the rates of all connected devices.
        """
        store = self._stores.get(device)
        if device in self.leaving:
            return True
        if step is None or store is None or device not in step.devices:
            return False
        resident = step.work.resident
        if resident is None or (resident.fetches and step.ended):
            return False
        others = [other for d, other in self._stores.items() if d in able]
        unique = any(
            store.has_state_of(stage) and not any(other.has_state_of(stage) for other in others)
            for stage in step.work.stages
        )
        uploads_s = [
            sum(array.nbytes for array in resident.arrays_of(stage)) / rates[d].uplink_bytes_per_s
            for stage in step.work.stages
            for d in stage.devices
            if d in rates
        ]
        if not unique or max(uploads_s, default=0.0) > _HAND_OVER_S:
            return False
        self.leaving.add(device)
        return True

    def keep(self, session: Session, now_s: float) -> bool:
        """Remember a disconnected device's trained state. Return False if the device has none."""
        store = self._stores.get(session.id)
        if store is None or not store.has_state:
            return False
        self._away[session.arrays] = _Away(self._stores.pop(session.id), now_s)
        return True

    def awaits(self, arrays: str) -> bool:
        """Return whether the device with these arrays (`Session.arrays`) is away and may return."""
        return arrays in self._away or arrays in self._expected

    def expect(self, kept: Sequence[KeptState]) -> None:
        """Let devices rejoin with the state that they had before the PS restarted.

        An earlier process assigned the IDs of their arrays. To avoid collisions, new IDs start far
        above the recorded IDs.
        """
        self._expected = {one.arrays: one for one in kept}
        largest = max((id for one in kept for id, _ in one.state.values()), default=0)
        self._ids.arrays = max(self._ids.arrays, largest + _ID_GAP if kept else 0)

    def expected_bytes(self, session: Session) -> int:
        """Return the size in bytes of the state on a device that rejoined before the first step."""
        kept = self._expected.get(session.arrays)
        return kept.nbytes if kept is not None and session.held is not None else 0

    def returned(self, session: Session, *, in_step: bool) -> list[SendStage]:
        """Let a returned device continue with the arrays that it still has.

        `in_step` says whether a step is running. Return the messages to send.
        """
        if session.held is not None and (kept := self._expected.get(session.arrays)):
            known = {id for id, _ in kept.state.values()}
            unknown, session.held = session.held - known, session.held & known
            session.reserved_bytes = kept.nbytes
            return StageDevice.dropped(session.id, unknown)
        held, session.held = session.held, None
        if held is None:
            return []
        away = self._away.pop(session.arrays, None)
        if away is None:
            return StageDevice.dropped(session.id, held)
        store = self._stores[session.id] = away.store
        store.resume(session.id, held)
        if in_step:
            store.drop_withdrawn()
        session.reserved_bytes = store.occupied_bytes
        return store.take()

    def expire(self, now_s: float) -> bool:
        """Stop waiting for devices that did not return in time. Return whether any wait ended."""
        if self._expected:
            self._expected_s = now_s if self._expected_s is None else self._expected_s
            if now_s >= self._expected_s + _EXPECTED_S:
                self._expected.clear()
                return True
        late = [a for a in self._away.values() if a.awaited and now_s >= a.left_s + self.return_s]
        for away in late:
            away.awaited = False
        return bool(late)

    def awaited(self, stage: PlannedStage) -> bool:
        """Return whether an absent device with the current state of a stage may still return."""
        return any(
            away.awaited and away.store.updates_in(stage) == away.store.now
            for away in self._away.values()
        )


def kept_by_holders(
    kept: Mapping[int, KeptBatches],
    planned: Sequence[PlannedStage],
    stages: Sequence[PlannedStage],
    rates: Mapping[int, DeviceRates],
) -> Mapping[int, KeptBatches]:
    """Return `StepWork.kept_batches`, adjusted for stages that are not on their planned devices.

    A new device retains as many micro-batches as the planned device if it has only this stage and
    at least as much memory. Otherwise, it retains no arrays.
    """
    found = dict(kept)
    held = Counter(device for stage in stages for device in stage.devices)
    for before, stage in zip(planned, stages, strict=True):
        for device in set(stage.devices).difference(before.devices):
            found.pop(device, None)
            there = [rates[d].memory_bytes for d in before.devices if d in rates]
            memory_bytes = rates[device].memory_bytes if device in rates else 0
            if held[device] == 1 and memory_bytes >= max(there, default=0):
                found[device] = kept.get(before.devices[0], NOTHING_KEPT)
    return found
