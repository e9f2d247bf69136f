"""Queue the messages that restore, update and return trained state on one device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from copy import copy
from typing import Final

from cleave import graph_names as names
from cleave.planner.stages.model import UPDATE_FLOPS, PlannedStage
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.device_arrays import row_pieces
from cleave.scheduler.stages.passes import StagePasses, arrays_of
from cleave.scheduler.stages.resident import Holding, KeptState, Lineage
from cleave.scheduler.stages.work import (
    LoggedStep,
    Resident,
    StageGraph,
    StageRequest,
    StepWork,
)

_SNAPSHOT_BYTES: Final = 256 * 2**10  # size of a piece, which delays activations on a slow uplink
_REPLAYED: Final = 2  # logged micro-batches in flight
_FP32: Final = 4


class StageDevice(StagePasses):
    """Tracks one device's arrays for stages, and queues messages for passes and trained state.

    Trained state is the weights and optimizer moments that stay on the device between steps.
    """

    def updates_of(self, array: StageArray) -> int | None:
        """Return the number of updates in a weight or moment; None if the device lacks it."""
        return self._updates[array] if array in self._sent else None

    def holding(self, plan: PlannedStage) -> Holding:
        """Return this device as the holder of a stage's state, with the state's lineage."""
        found = {self._lineages.get(array) for array in self._resident.arrays_of(plan)}
        return Holding(self.device, found.pop() if len(found) == 1 else None)

    @property
    def now(self) -> int:
        """Return the number of all updates before the current step."""
        return self._resident.now

    @property
    def has_state(self) -> bool:
        """Return whether the device holds any trained state."""
        return any(array in self._sent for array in self._updates)

    def has_state_of(self, plan: PlannedStage) -> bool:
        """Return whether the device has a stage's trained state from the snapshot or later."""
        found = [self.updates_of(array) for array in self._resident.arrays_of(plan)]
        return bool(found) and all(n is not None and n >= self._resident.position for n in found)

    def resume(self, device: int, held: Set[int]) -> None:
        """Continue in a new session with the arrays and graphs that the device still has.

        The device drops arrays and graphs that the current step does not use.

        Args:
            device: the ID of the new session.
            held: wire IDs of all arrays and graphs that are still on the device.
        """
        needed = _all_arrays(self.work)
        sent = ((what, id) for what, id in self._sent.items() if id in held)
        self._restart(device, {w: id for w, id in sent if isinstance(w, StageGraph) or w in needed})
        self._out += self.dropped(device, held - {*self._sizes})

    def kept(self, arrays: str) -> KeptState:
        """Return a record of the trained state on the device. `arrays` is `Session.arrays`."""
        found = {k: a for k, a in self._resident.keyed.items() if a in self._sent}
        return KeptState(
            arrays,
            {key: (self._sent[array], self._updates[array]) for key, array in found.items()},
            sum(array.nbytes for array in found.values()),
        )

    def adopt(self, kept: KeptState) -> None:
        """Continue with the device's trained state, as recorded by an earlier PS process."""
        arrays, lineage = self._resident.keyed, Lineage(-1)
        for key, (id, updates) in kept.state.items():
            if (array := arrays.get(key)) is not None:
                self._sent[array], self._sizes[id] = id, array.nbytes
                self._updates[array], self._lineages[array] = updates, lineage
        self.occupied_bytes = sum(self._sizes.values())

    def drop_withdrawn(self) -> None:
        """Drop trained state that already contains updates of the current step."""
        ahead = [a for a, updates in self._updates.items() if updates > self.now]
        self.drop_state(ahead)

    def updates_in(self, plan: PlannedStage) -> int | None:
        """Return the number of updates in a stage's trained state on the device.

        Return None if the device lacks the state or the state is unusable, because it is older than
        the snapshot or contains updates of a withdrawn step.
        """
        resident = self._resident
        found = {self.updates_of(array) for array in resident.arrays_of(plan)}
        if not found:  # no layer of the stage is trained
            return resident.now
        updates = found.pop()
        if found or updates is None or not resident.position <= updates <= resident.now:
            return None
        return updates

    def restore(self, request: StageRequest) -> None:
        """Send a stage's trained state and request the repetition of the logged steps.

        If the device already has older state, it only repeats the steps that it missed. Steps
        beyond the limit on tasks in flight are requested later by `more_replay`.
        """
        resident = self._resident
        updates = self.updates_in(request.plan)
        if updates is None:
            updates = resident.position
            self.drop_state(resident.arrays_of(request.plan))
            lineage = Lineage(updates)
            for array in resident.arrays_of(request.plan):
                # The server compresses equal payload objects once. The snapshot's memory changes,
                # so each message has an object of its own.
                self._send_array(array, copy)
                self._updates[array] = updates
                self._lineages[array] = lineage
        request.dx_wanted = False
        self.repeat(request, resident.log[updates - resident.position :])

    def stop_restoring(self, request: StageRequest) -> None:
        """Drop the partly restored state of a request."""
        self.drop([*request.sums.values()])
        self.drop_state(self._resident.arrays_of(request.plan))
        for step, _ in list(request.replay)[:1]:
            self.forget_step(step.work, self.work, request.plan)

    def repeat(self, request: StageRequest, steps: Sequence[LoggedStep]) -> None:
        """Append logged steps to the steps that the request must repeat, and request them."""
        for step in steps:
            request.replay += ((step, batch) for batch in (*step.backward(request.stage), None))
        self.more_replay(request)

    def more_replay(self, request: StageRequest) -> None:
        """Request more logged micro-batches and updates, up to the limit on tasks in flight."""
        now = self.work
        most = _REPLAYED * max(1, len(request.layers))
        while request.replay and len(request.answers) <= most:
            step, batch = request.replay.popleft()
            self.work = step.work
            if batch is None:
                self.update(request, step.scalars)
                self.forget_step(step.work, now, request.plan)
            else:
                request.batch = batch
                x, dy = step.x[request.stage][batch], step.dy[request.stage].get(batch)
                if dy is None:
                    self.last(request, x)
                elif batch < step.work.batches:
                    self.backward(request, x, dy)
                else:
                    self.embedding_backward(request, x, dy)
        self.work = now

    def forget_step(self, before: StepWork, now: StepWork, plan: PlannedStage) -> None:
        """Drop the arrays and graphs of step `before`, such as masks, that step `now` lacks."""
        needed = _all_arrays(now)
        for array in dict.fromkeys(arrays_of(before, plan)):
            if array in self._sent and array not in needed:
                self._forget(array)

    def squares(self, request: StageRequest) -> None:
        """Request the sum of all squared elements of `request.sums`, unless there are no sums.

        No task overwrites its inputs, so a failed task can be repeated alone.
        """
        if array := self.sum_of_squares(request):
            self._fetch(request, names.SQUARES, array, 0, 1, 1, "fp32")
            self.drop([array])

    def sum_of_squares(self, request: StageRequest) -> int:
        """Request the sum of squared gradients. Return its wire ID; 0 if there are no gradients."""
        total, new = names.total(names.SQUARES), names.new_total(names.SQUARES)
        array = 0
        for (layer, name), gradient in request.sums.items():
            feed = {names.GRADIENT: gradient, total: array}
            weight = self._resident.parameters[layer, name].weight
            flops = 2 * weight.rows * weight.columns
            found = self._run(request, self._resident.squares, feed, {new: _FP32}, flops)
            self.drop([array] if array else [])
            array = found[new]
        return array

    def update(self, request: StageRequest, scalars: Sequence[StageArray]) -> None:
        """Request an optimizer step with the gradients in `request.sums`, and drop them."""
        self.update_with(request, [self._put(each) for each in scalars])
        for each in scalars:
            self._forget(each)

    def update_with(self, request: StageRequest, given: Sequence[int]) -> None:
        """Request an optimizer step. `given` contains the coefficients' wire IDs, by group."""
        resident = self._resident
        for (layer, name), gradient in request.sums.items():
            one = resident.parameters[layer, name]
            state = dict(zip(_state_names(len(one.moments)), one.arrays, strict=True))
            old = {key: self._sent[array] for key, array in state.items()}
            feed = old | {names.GRADIENT: gradient, names.SCALARS: given[one.group]}
            made = dict.fromkeys(map(names.updated, state), one.weight.nbytes)
            flops = UPDATE_FLOPS * one.weight.rows * one.weight.columns
            found = self._run(request, resident.update, feed, made, flops)
            for key, array in state.items():
                self._sent[array] = found[names.updated(key)]
                self._updates[array] += 1
            kept = self._snapshot.values()
            self.drop([*(id for id in old.values() if id not in kept), gradient])
        request.sums.clear()

    def state(self, request: StageRequest) -> None:
        """Fetch a stage's trained state. Answers are stored under the key (array, first row)."""
        for array in self._resident.arrays_of(request.plan):
            id = self._sent[array]
            request.rest += row_pieces((array,), id, array.rows, array.columns, "fp32")
        self.more_rows(request)

    def begin_snapshot(self, request: StageRequest, state: Iterable[StageArray]) -> None:
        """Keep the current trained state `state` on the device until `request` has returned it."""
        for array in state:
            id = self._snapshot[array] = self._sent[array]
            size = array.rows, array.columns
            request.rest += row_pieces((array,), id, *size, "fp32", _SNAPSHOT_BYTES)

    def more_of_snapshot(self, request: StageRequest) -> None:
        """Request the next block of rows of a snapshot."""
        self._next_rows(request)

    def end_of_piece(self, request: StageRequest, array: StageArray) -> None:
        """Drop a snapshot's array once it has been returned completely and is no longer current."""
        if request.rest and request.rest[0].name[0] is array:
            return
        id = self._snapshot.pop(array)
        if self._sent.get(array) != id:
            self.drop([id])

    def end_snapshot(self) -> None:
        """Drop the arrays that are kept only for a snapshot."""
        held, self._snapshot = self._snapshot, {}
        self.drop([id for array, id in held.items() if self._sent.get(array) != id])

    def drop_state(self, *states: Iterable[StageArray]) -> None:
        """Drop trained state, except arrays that are kept for a snapshot."""
        found = [self._sent.pop(a) for state in states for a in state if a in self._sent]
        kept = {*self._snapshot.values()}
        self.drop([id for id in found if id not in kept])

    @property
    def _resident(self) -> Resident:
        assert self.work.resident is not None
        return self.work.resident


def _all_arrays(work: StepWork) -> set[StageArray | StageGraph]:
    """Return all arrays and graphs that the stages of a step need before their first pass."""
    return {array for stage in work.planned for array in arrays_of(work, stage)}


def _state_names(moments: int) -> list[str]:
    return [names.WEIGHT, *map(names.moment, range(moments))]
