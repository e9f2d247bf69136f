"""Track which device has a stage's trained state in a step, and choose the device's next request.

A device gets passes of a stage once it has the stage's trained state. After all passes, the device
returns the sum of its squared gradients, waits for the coefficients of the optimizer step, and
updates the state. In a step that only fetches state, the device returns the state instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

from cleave.planner.stages.model import PlannedStage
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.device import StageDevice
from cleave.scheduler.stages.state import StageState
from cleave.scheduler.stages.work import RequestKind, Resident, StageRequest

_CHANGES: Final = (RequestKind.RESTORE, RequestKind.UPDATE)


@dataclass(eq=False)
class TrainedState:
    """Decides what devices do with trained state in one step. This class sends no messages.

    Args:
        stages: the stages of the step. The step modifies this sequence.
        stores: maps a device to its `StageDevice`.
        requests: all unanswered requests to devices. The step modifies this set.

    Attributes:
        scalars: coefficients of the optimizer step; None until the training thread provides them.
    """

    resident: Resident
    stages: Sequence[StageState]
    stores: Mapping[int, StageDevice]
    requests: Set[StageRequest]
    scalars: Sequence[StageArray] | None = None
    _squares_told: bool = False

    def may_run(self, number: int, device: int) -> bool:
        """Return whether a device has the state of stage `number`, including all logged updates."""
        return not self._restores(number, device) and self._is_on(device, self.stages[number].plan)

    def missing(self) -> Iterator[tuple[int, int]]:
        """Yield (stage number, device) for each device that lacks its stage's trained state."""
        for number, stage in enumerate(self.stages):
            for device in stage.devices:
                there = self._restores(number, device) or self._is_on(device, stage.plan)
                if not stage.has_landed and not there:
                    yield number, device

    def due(self) -> Iterator[tuple[int, int, RequestKind]]:
        """Yield (stage number, device, next request) for each stage with all passes done."""
        for number, stage in enumerate(self.stages):
            if stage.left or stage.has_landed or any(r.stage == number for r in self.requests):
                continue
            for device in stage.devices:
                kind = self._next(stage)
                if kind is not None and self.may_run(number, device):
                    yield number, device, kind

    def all_squares(self) -> float | None:
        """Return the sum of all squared gradients, once, when all stages have returned theirs."""
        found = [stage.squares for stage in self.stages if stage.squares is not None]
        if self._squares_told or len(found) < len(self.stages):
            return None
        self._squares_told = True
        return math.fsum(found)

    def unfinished(self, device: int) -> list[set[StageArray]]:
        """Return the arrays of each stage whose state a device is still restoring or updating."""
        return [
            set(self.resident.arrays_of(request.plan))
            for request in self.requests
            if request.device == device and request.kind in _CHANGES
        ]

    def updated(self, device: int) -> list[set[StageArray]]:
        """Return the arrays that a device has updated; an empty list if all stages are updated."""
        if self.resident.fetches or all(stage.has_landed for stage in self.stages):
            return []
        mine = (s for s in self.stages if s.has_landed and device in s.devices)
        return [set(self.resident.arrays_of(stage.plan)) for stage in mine]

    def _is_on(self, device: int, plan: PlannedStage) -> bool:
        """Return whether a device has a stage's state from before or after this step's update."""
        store, now = self.stores.get(device), self.resident.now
        return store is not None and all(
            store.updates_of(array) in (now, now + 1) for array in self.resident.arrays_of(plan)
        )

    def _restores(self, number: int, device: int) -> bool:
        return any(
            request.stage == number
            and request.device == device
            and request.kind is RequestKind.RESTORE
            for request in self.requests
        )

    def _next(self, stage: StageState) -> RequestKind | None:
        """Return the next request for a stage without passes left; None if the device must wait."""
        if stage.owes_state:
            return RequestKind.STATE
        if stage.squares is None:
            return RequestKind.SQUARES
        return RequestKind.UPDATE if self.scalars is not None else None
