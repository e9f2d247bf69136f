"""Fetch a snapshot of trained state from devices while they work on later steps.

An update creates new arrays instead of overwriting the old ones. A snapshot is the set of arrays
after one step. Each device keeps its arrays of the snapshot until it has returned them, in small
blocks of rows between its other work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cleave.scheduler.instructions import SendStage
from cleave.scheduler.stages.device import StageDevice
from cleave.scheduler.stages.resident import Snapshot
from cleave.scheduler.stages.work import RequestKind, StageOrder, StageRequest, StepWork


class SnapshotRun:
    """Fetches one snapshot: the trained state after one step. Methods return the messages to send.

    Args:
        work: the step after which the snapshot is taken.
        position: number of all updates until then.
        holders: maps a stage number to the record of the device that holds the stage's state.

    Attributes:
        model: the ID of the model; see `StepWork`.
        position: number of all updates until then.
    """

    def __init__(self, work: StepWork, position: int, holders: Mapping[int, StageDevice]) -> None:
        self.model = work.model
        self.position = position
        self._stores = {store.device: store for store in holders.values()}
        self._requests: dict[int, StageRequest] = {}
        assert work.resident is not None
        self._keep = work.resident.keep
        for number, store in holders.items():
            plan = work.planned[number]
            request = self._requests.setdefault(
                store.device, StageRequest(RequestKind.STATE, number, plan, -1, store.device)
            )
            store.begin_snapshot(request, work.resident.arrays_of(plan))
        self._held_by = {n: s.holding(work.planned[n]) for n, s in holders.items()}

    def owns(self, order: StageOrder) -> bool:
        """Return whether a task is part of this snapshot."""
        return self._requests.get(order.request.device) is order.request

    def involves(self, device: int) -> bool:
        """Return whether a device holds a part of this snapshot."""
        return device in self._stores

    def more(self, device: int) -> list[SendStage]:
        """Request a device's next block of rows, unless the device already owes one."""
        request, store = self._requests.get(device), self._stores.get(device)
        if request is None or store is None or request.answers or not request.rest:
            return []
        store.more_of_snapshot(request)
        return store.take()

    def begin(self) -> list[SendStage]:
        """Request the first block of rows from each device."""
        return [sent for device in self._requests for sent in self.more(device)]

    def arrived(self, order: StageOrder, run: int, payload: Any) -> list[SendStage]:
        """Record a block of rows. If the device is idle, request its next block."""
        request, store = order.request, self._stores[order.request.device]
        request.answers.pop(run, None)
        request.found[order.name] = self._keep(payload)
        store.answered(run)
        store.end_of_piece(request, order.name[0])
        out = store.take()
        return out + (self.more(request.device) if store.is_idle else [])

    @property
    def finished(self) -> Snapshot | None:
        """Return the snapshot; None until all blocks of rows have arrived."""
        if any(request.rest or request.answers for request in self._requests.values()):
            return None
        found = {k: v for request in self._requests.values() for k, v in request.found.items()}
        return Snapshot(self.position, found, self._held_by)

    def abandon(self) -> list[SendStage]:
        """Tell devices to drop the arrays that they keep only for the snapshot."""
        out: list[SendStage] = []
        for store in self._stores.values():
            store.end_snapshot()
            out += store.take()
        return out
