"""Hot spares: devices without a stage of their own that can take over a stage immediately.

A hot spare follows one or more stages: it holds their trained state and keeps the state current. It
repeats each micro-batch after the stage's device has finished it, and the update at the end of the
step. If the stage's device is lost, the hot spare continues with the remaining micro-batches. A hot
spare that has fallen behind first repeats the steps in the log.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Final

from cleave.planner.plan import DeviceRates
from cleave.planner.stages.model import PlannedStage
from cleave.scheduler.instructions import SendStage
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.device import StageDevice
from cleave.scheduler.stages.passes import arrays_of
from cleave.scheduler.stages.takeover import Takeover
from cleave.scheduler.stages.work import (
    LoggedStep,
    RequestKind,
    Resident,
    StageGraph,
    StageOrder,
    StageRequest,
    StepWork,
    layers_of,
)
from cleave.scheduler.tiles.device_memory import Names

_MOST_BUSY: Final = 0.9  # share of a step's time in which a hot spare may repeat the step
_MOST_BEHIND: Final = 4  # number of steps by which a hot spare may fall further behind


@dataclass(slots=True, eq=False)
class _Copy:
    """A copy of a stage's state on a hot spare.

    Attributes:
        request: the hot spare's request, which repeats logged steps.
        updates: number of updates in the state once `request` has been answered.
        most: maximum number of steps left to repeat; with more, the device counts as too slow.
        step: the current step, once the device has begun to repeat it; None before.
        given: the micro-batches of `step` that were added to `request`.
    """

    stage: PlannedStage
    request: StageRequest
    updates: int
    most: int
    step: LoggedStep | None = None
    given: set[int] = field(default_factory=set)

    @property
    def is_busy(self) -> bool:
        """Return whether the device is repeating steps or has repeated part of a step."""
        return bool(self.request.answers or self.request.replay or self.request.sums)

    def leave_step(self) -> None:
        """Forget the current step. Requests that were already sent for it are not cancelled."""
        one = self.request
        left = {batch for step, batch in one.replay if step is self.step}
        one.added = self.given - {batch for batch in left if batch is not None}
        one.replay = deque(each for each in one.replay if each[0] is not self.step)
        self.step, self.given = None, set()


class HotSpares:
    """Chooses which device follows which stage, and requests the repetition of steps.

    Methods that request a repetition or handle an answer return the messages to send.

    Args:
        stores: maps a device to its `StageDevice`. This class adds missing devices.
    """

    def __init__(self, stores: dict[int, StageDevice], ids: Names) -> None:
        self._stores = stores
        self._ids = ids
        self._copies: dict[tuple[int, int], _Copy] = {}  # key: device, stage number
        self._unfit: set[int] = set()  # devices that failed or were too slow
        self._work: StepWork | None = None  # the last step

    @property
    def devices(self) -> set[int]:
        """Return the devices that follow a stage."""
        return {device for device, _ in self._copies}

    def is_busy(self, device: int) -> bool:
        """Return whether a device is repeating steps."""
        return any(copy.is_busy for (d, _), copy in self._copies.items() if d == device)

    def arrays_on(self, device: int, work: StepWork) -> set[StageArray | StageGraph]:
        """Return the arrays and graphs that a device needs for the stages that it follows."""
        stages = [copy.stage for (d, _), copy in self._copies.items() if d == device]
        return {array for stage in stages for array in arrays_of(work, stage)}

    def revise(self, work: StepWork, rates: Mapping[int, DeviceRates], holders: Set[int]) -> None:
        """Choose which devices follow which stages from now on.

        A device stops following a stage if the stage's layers changed or the device is too slow.

        Args:
            work: the step that begins, or is under way.
            rates: the devices that may train layers.
            holders: the devices that have a stage in this step.
        """
        assert work.resident is not None
        for (device, _), copy in self._copies.items():
            if self.is_busy(device):  # otherwise, `StageStep.begin` drops what is not needed
                self._stores[device].forget_step(self._work or work, work, copy.stage)
        for (device, number), copy in list(self._copies.items()):
            stage = work.stages[number] if number < len(work.stages) else None
            same = stage is not None and layers_of(copy.stage) == layers_of(stage)
            late = copy.updates < work.resident.position  # a snapshot has replaced the log
            slow = copy.request.steps_left > copy.most
            ahead = copy.updates > work.resident.now  # the last step was not logged
            # After a fetch of all state, the log is empty, so no device could have caught up.
            if slow or (late and work.resident.log):
                self._unfit.add(device)
            takes_over = stage is not None and device in stage.devices
            others = device in holders and not takes_over
            if late or slow or ahead or device not in rates or others or not same:
                self._leave(device, number)
        if (most := work.resident.copies) is not None:
            for key in list(self._copies)[most:]:
                self._leave(*key)
        self._work = work
        spares = {d: r for d, r in rates.items() if d not in holders and d not in self._unfit}
        for device, number in self._chosen(work, spares, rates):
            for key in [key for key in self._copies if key[1] == number]:
                self._leave(*key)
            stage, most = work.stages[number], len(work.resident.log) + _MOST_BEHIND
            request = StageRequest(RequestKind.RESTORE, number, stage, -1, device)
            self._copies[device, number] = _Copy(stage, request, work.resident.position - 1, most)

    def begin(self, work: StepWork, holders: Set[int]) -> list[SendStage]:
        """Request that hot spares repeat the steps logged since the last call.

        Args:
            work: the step that has begun.
            holders: the devices that have a stage in this step.
        """
        resident = work.resident
        assert resident is not None
        for device, number in [key for key in self._copies if key[0] in holders]:
            self._leave(device, number)
        for (device, _), copy in self._copies.items():
            self._repeat(device, copy, work, resident)
        return [sent for device in self.devices for sent in self._stores[device].take()]

    def follow(
        self, step: LoggedStep, number: int, done: Set[int], holders: Set[int]
    ) -> list[SendStage]:
        """Request that a stage's hot spare repeat micro-batches of the current step.

        Hot spares that still have logged steps to repeat, or are in `holders`, are skipped.

        Args:
            step: the current step. Its optimizer coefficients are not known yet.
            number: number of the stage.
            done: all micro-batches that the stage's device has finished.
            holders: the devices that have a stage in the step.
        """
        out: list[SendStage] = []
        for (device, stage), copy in self._copies.items():
            if stage == number and device not in holders and self._may_follow(copy, step):
                if copy.step is None:
                    copy.step = step
                copy.request.replay += ((copy.step, batch) for batch in sorted(done - copy.given))
                copy.given |= done
                out += self._more(device, copy)
        return out

    def complete(self, step: LoggedStep, holders: Set[int]) -> list[SendStage]:
        """Request that hot spares repeat the rest of a completed step, including its update.

        Args:
            step: the completed step, with its optimizer coefficients.
            holders: the devices that have a stage in the step.
        """
        out: list[SendStage] = []
        for (device, number), copy in self._copies.items():
            if device not in holders and self._may_follow(copy, step):
                rest = [batch for batch in step.backward(number) if batch not in copy.given]
                copy.request.replay += ((step, batch) for batch in (*rest, None))
                copy.step, copy.given = None, set()
                copy.updates += 1
                out += self._more(device, copy)
        self.abandon()
        return out

    def abandon(self) -> None:
        """Discard what hot spares have repeated of the current step."""
        for (device, _), copy in self._copies.items():
            if copy.step is not None:
                copy.leave_step()
                self._stores[device].drop(copy.request.sums.values())
                copy.request.sums.clear()

    def _may_follow(self, copy: _Copy, step: LoggedStep) -> bool:
        resident = step.work.resident
        assert resident is not None
        return copy.updates == resident.now and not copy.request.steps_left

    def _more(self, device: int, copy: _Copy) -> list[SendStage]:
        store = self._stores[device]
        store.more_replay(copy.request)
        return store.take()

    def _repeat(self, device: int, copy: _Copy, work: StepWork, resident: Resident) -> None:
        """Request all logged steps that a device has not been asked to repeat yet."""
        if device not in self._stores:
            self._stores[device] = StageDevice(device, self._ids, work)
        store = self._stores[device]
        store.work = work
        if copy.is_busy:
            store.repeat(copy.request, resident.log[copy.updates - resident.position :])
        elif copy.updates != resident.now:
            store.restore(copy.request)
        copy.updates = resident.now

    def _chosen(
        self,
        work: StepWork,
        spares: Mapping[int, DeviceRates],
        rates: Mapping[int, DeviceRates],
    ) -> list[tuple[int, int]]:
        """Choose a hot spare for each stage without one. Return (device, stage number) pairs.

        A device with newer state replaces a hot spare that must repeat more steps.
        """
        assert work.resident is not None
        now = work.resident.now
        step_s = max(
            (_step_s(work, s, rates[d]) for s in work.stages for d in s.devices if d in rates),
            default=0.0,
        )
        busy_s = defaultdict[int, float](float)
        for device, number in self._copies:
            busy_s[device] += _repeat_s(work, work.stages[number], rates[device])
        chosen: list[tuple[int, int]] = []
        # for each stage with a hot spare, the number of steps that the device must repeat
        behind = {n: c.request.steps_left + now - c.updates for (_, n), c in self._copies.items()}
        copies, most = {number for _, number in self._copies}, work.resident.copies
        for number, stage in enumerate(work.stages):
            too_many = most is not None and len(copies | {number}) > most
            if too_many or not any(work.resident.of_stage(stage)):
                continue
            fit: list[tuple[float, float, int]] = []
            for device, each in spares.items():
                store = self._stores.get(device)
                if store is not None:
                    store.work = work
                updates = None if store is None else store.updates_in(stage)
                missing = math.inf if updates is None else now - updates
                total_s = busy_s[device] + _repeat_s(work, stage, each)
                fits = updates is not None or Takeover(work, stage, frozenset()).fits(each, store)
                newer = number not in behind or missing < behind[number]
                if fits and newer and total_s <= _MOST_BUSY * step_s:
                    fit.append((missing, total_s, device))
            if fit:
                _, total_s, device = min(fit)
                busy_s[device] = total_s
                chosen.append((device, number))
                copies.add(number)
        return chosen

    def owns(self, order: StageOrder) -> bool:
        """Return whether a task was sent to a hot spare to follow a stage."""
        copy = self._copies.get((order.request.device, order.request.stage))
        return copy is not None and copy.request is order.request

    def answered(self, order: StageOrder, run: int) -> list[SendStage]:
        """Record the answer to a task. Request more logged passes."""
        request, store = order.request, self._stores[order.request.device]
        request.answers.pop(run, None)
        store.answered(run)
        store.more_replay(request)
        return store.take()

    def take_over(self, number: int, device: int) -> StageRequest | None:
        """Stop following a stage with a device. If it is repeating steps, return the request.

        The caller is then responsible for the request, which may already be answered. The request
        repeats no further micro-batches of the current step. `StageRequest.added` contains the
        micro-batches of the current step that it has repeated or is repeating.
        """
        copy = self._copies.pop((device, number), None)
        if copy is None or not copy.is_busy:
            return None
        copy.leave_step()
        store = self._stores[device]
        resident = store.work.resident
        assert resident is not None
        store.repeat(copy.request, resident.log[copy.updates - resident.position :])
        return copy.request

    def failed(self, device: int, holders: Set[int]) -> list[SendStage]:
        """Stop using a device as a hot spare after one of its requests failed.

        Args:
            holders: the devices that have a stage in the step.
        """
        if device not in self.devices:
            return []
        self._unfit.add(device)
        self.forget(device)
        store = self._stores[device]
        if device not in holders:
            store.start_over()  # later requests need the output of the failed one
        return store.take()

    def forget(self, device: int) -> None:
        """Forget which stages a device follows, because it has left."""
        for key in [key for key in self._copies if key[0] == device]:
            del self._copies[key]

    def _leave(self, device: int, number: int) -> None:
        """Stop following a stage. If the copy is unfinished, drop its partial results now."""
        copy = self._copies.pop((device, number))
        store = self._stores.get(device)
        if store is None or not copy.is_busy:
            return
        if copy.step is None:
            store.stop_restoring(copy.request)
        else:  # it has the state from before the step
            store.drop(copy.request.sums.values())


def _step_s(work: StepWork, stage: PlannedStage, rates: DeviceRates) -> float:
    """Return a lower bound on the time that a device needs for a stage in a step, in seconds."""
    flops = sum(work.tokens) * Takeover(work, stage, frozenset()).flops
    nbytes = 2 * sum(x.nbytes for x in work.x)
    slowest = min(rates.downlink_bytes_per_s, rates.uplink_bytes_per_s)
    return max(flops / rates.flops_per_s, nbytes / slowest)


def _repeat_s(work: StepWork, stage: PlannedStage, rates: DeviceRates) -> float:
    """Return the predicted time in which a device repeats one step of a stage, in seconds."""
    forward = sum(layer.forward_flops for layer in work.layers[stage.first : stage.stop])
    flops = sum(work.tokens) * (Takeover(work, stage, frozenset()).flops - forward)
    nbytes = 2 * sum(x.nbytes for x in work.x)
    return max(flops / rates.flops_per_s, nbytes / rates.downlink_bytes_per_s)
