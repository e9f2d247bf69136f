"""Assign micro-batch passes to devices in one step by stages. This module does no I/O.

Until the step ends, the PS retains each stage's input and output gradient for every micro-batch and
repeats lost passes from these arrays. The PS uses all gradients of an accumulator or none of them.
In each stage, or each part of a divided stage, every micro-batch is in exactly one used
accumulator.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from cleave import arrays
from cleave import graph_names as names
from cleave.arrays import DType
from cleave.planner.plan import DeviceRates
from cleave.planner.stages import rules
from cleave.planner.stages.model import NOTHING_KEPT, Keep, PlannedStage
from cleave.planner.stages.rules import Pass
from cleave.scheduler.instructions import ForSteps, Note, TellStep
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.device import StageDevice
from cleave.scheduler.stages.hot_spares import HotSpares
from cleave.scheduler.stages.outcomes import (
    GradientWanted,
    InputWanted,
    OutputReady,
    PassDone,
    SlicesBack,
    SlicesReady,
    StageDone,
    StageRecord,
    StepFailed,
    StepResult,
    SumsRecord,
    Suspect,
    UpdateWanted,
)
from cleave.scheduler.stages.passes import GradientAccumulator, arrays_of
from cleave.scheduler.stages.state import StageState, StepView
from cleave.scheduler.stages.takeover import Candidate, Takeover, all_sums, soonest, soonest_parts
from cleave.scheduler.stages.trained_state import TrainedState
from cleave.scheduler.stages.usual_sizes import Place, Returned, UsualSizes
from cleave.scheduler.stages.work import (
    LoggedStep,
    RequestKind,
    StageGraph,
    StageOrder,
    StageRequest,
    StepWork,
    layers_of,
)
from cleave.scheduler.tiles.device_memory import Names

MAX_FAILURES: Final = 4  # number of failed devices at which the step fails


class StageStep:
    """The state machine of one step by stages. Event handlers return the instructions to carry out.

    Args:
        stores: maps a device to its `StageDevice`. The step adds missing devices.
        present: returns the rates of the devices that may train whole layers now, by device.
        usual: usual magnitudes of the arrays that devices return for this model.
        awaited: returns whether a stage waits for a device that may return with its trained state.
        spares: the devices that follow stages; None if no device does.
    """

    def __init__(
        self,
        work: StepWork,
        stores: dict[int, StageDevice],
        present: Callable[[], Mapping[int, DeviceRates]],
        ids: Names,
        usual: UsualSizes | None = None,
        awaited: Callable[[PlannedStage], bool] = lambda stage: False,
        spares: HotSpares | None = None,
    ) -> None:
        self._awaited = awaited
        self._spares = spares or HotSpares(stores, ids)
        self.work = work
        self.ended = False
        self.failures = 0
        self.repeated = 0  # micro-batch passes that must be repeated
        self._restored = 0  # see `StepResult`
        self._stores = stores
        self._present = present
        self._ids = ids
        resident = work.resident
        batches = 0 if resident is not None and resident.fetches else work.batches
        self._stages = [
            StageState(plan, batches, frozenset(all_sums(work, plan)), list(plan.devices))
            for plan in work.planned
        ]
        for stage in self._stages:
            stage.owes_state = resident is not None and resident.fetches
        # Stages are in layer order. Loss slices and parts of divided stages follow.
        self._last = self._stages[len(work.stages) - 1]
        self._slices = self._stages[len(work.stages) :]
        if work.embedding is not None and work.inner_embedding is None:
            self._last.embeds = work.batches
            self._last.batches *= 1 + work.embeds
        self._requests: set[StageRequest] = set()
        # None if the PS sends parameters and fetches gradients
        self._trained = (
            TrainedState(resident, self._stages, stores, self._requests) if resident else None
        )
        self._taking: dict[StageRequest, GradientAccumulator] = {}
        self._went_back: set[int] = set()  # devices whose latest request was a backward pass
        self._request_s: dict[int, float] = {}  # key: device; value: predicted seconds per request
        self._failed: dict[int, str] = {}  # key: excluded device; value: reason
        self._losses: dict[int, Any] = {}
        self._dx: dict[int, Any] = {}
        self._out: list[ForSteps] = []
        self._noted = False  # whether a stage without devices was reported
        self._usual = usual or UsualSizes()
        self._suspects: deque[StageRequest] = deque()  # the caller is examining the first request
        self._diverged = False  # the caller confirmed a non-finite value
        if self._last.embeds is None:
            x = work.x if work.embedding is None else work.ids
            self._stages[0].x = dict(enumerate(x[:batches]))
        else:
            self._last.x = {work.batches + n: ids for n, ids in enumerate(work.ids[:batches])}

    @property
    def devices(self) -> set[int]:
        """Return the devices of all stages."""
        return {device for stage in self._stages for device in stage.devices}

    def devices_of(self, plan: PlannedStage) -> list[int]:
        """Return the devices of the stage with the same layers as `plan`, or an empty list."""
        for stage in self._stages:
            if layers_of(stage.plan) == layers_of(plan):
                return stage.devices
        return []

    # --- events ---

    def begin(self) -> list[ForSteps]:
        """Start the step: drop unneeded arrays, send parameters, and request the first passes."""
        wanted: dict[int, set[Any]] = {device: set() for device in self._stores}
        for stage in self._stages:
            for device in stage.devices:
                wanted.setdefault(device, set()).update(self._arrays_of(stage, device))
        for device, arrays_wanted in wanted.items():
            if not self._spares.is_busy(device):
                arrays_wanted |= self._spares.arrays_on(device, self.work)
                self._store(device).end(arrays_wanted)
            self._out += self._store(device).take()
        out = self._go_on()
        # Later stages receive their parameters while the first stage computes.
        for stage in self._stages[1:]:
            for device in stage.devices:
                self._store(device).load(self._arrays_of(stage, device))
                out += self._store(device).take()
        return out

    def fetched(self, order: StageOrder, run: int, payload: Any) -> list[ForSteps]:
        """Record an array that a device returned in answer to a task."""
        if order.request.kind is RequestKind.STATE and self.work.resident is not None:
            payload = self.work.resident.keep(payload)
        order.request.found[order.name] = payload
        values = isinstance(payload, bytes | bytearray | memoryview)  # emulated arrays have none
        if values and order.name == names.SQUARES and _number(payload) < 0:
            return self.failed(order.request.device, "it returned a negative sum of squares")
        usual = order.request.kind.is_pass or order.request.kind is RequestKind.SUMS
        if values and usual and order.request in self._requests:
            size = arrays.largest(payload, DType(order.out))
            order.request.note_size(self._place(order), size)
        return self.computed(order, run)

    def resolve(self, *, right: bool, reason: str = "") -> list[ForSteps]:
        """Accept or reject the values of the first unresolved `Suspect`.

        Args:
            right: whether the values are correct. If not, the device counts as failed, and another
                device repeats the pass.
            reason: what is wrong with the values.
        """
        if not self._suspects:  # the step has ended
            return []
        request = self._suspects.popleft()
        out: list[ForSteps] = []
        if request in self._requests and right:
            self._accept(request, repeated=True)
        elif request in self._requests:
            out = self.failed(request.device, reason)
        while self._suspects and not self._stands_out(self._suspects[0]):
            self._accept(self._suspects.popleft())
        if self._suspects:
            self._tell_suspect()
        return out + self._go_on()

    def failed(self, device: int, reason: str) -> list[ForSteps]:
        """Record that a device failed. The device gets no more tasks in this step."""
        if device in self._failed:
            return []
        self.failures += 1
        self._failed[device] = reason
        if (store := self._stores.get(device)) is not None:
            store.start_over()
            self._out += store.take()
        return self.lost(device)

    def refused(self, order: StageOrder, run: int, *, of_spare: bool = False) -> list[ForSteps]:
        """Repeat a task that failed on a device.

        If the task cannot be repeated alone, repeat all of the device's passes whose results have
        not arrived at the PS.

        Args:
            of_spare: whether the task was for another stage, which the device followed.
        """
        request = order.request
        store = self._stores.get(request.device)
        if store is None:
            return []
        if request not in self._requests and not (of_spare and request.device in self.devices):
            store.answered(run)  # the request's step has ended
            return [*store.take()]
        if not of_spare and store.ask_again(run, request):
            return [*store.take()]
        device, present = request.device, self._present()
        store.be_careful(present[device].memory_bytes if device in present else 0)
        stages = [stage for stage in self._stages if device in stage.devices]
        kept = {array for one in stages for array in self._arrays_of(one, device)}
        if self._trained is not None:
            kept = kept.difference(*self._trained.unfinished(device))
        self._spares.forget(device)
        store.start_over(kept)
        self._out += store.take()
        self._lose_work(device)
        return self._go_on()

    def lost(self, device: int) -> list[ForSteps]:
        """Record that a device left and that all arrays on the device are lost."""
        self._stores.pop(device, None)
        if self.ended:
            out, self._out = self._out, []
            return out
        left = [stage for stage in self._stages if device in stage.devices]
        self._lose_work(device)
        for stage in left:
            stage.devices.remove(device)
        for stage in left:
            if stage.has_landed:
                continue
            if stage.devices or stage.accumulators or self._trained is not None:
                self._reinforce(stage)
            else:
                self._divide(stage)
        return self._go_on()

    def _lose_work(self, device: int) -> None:
        """Discard a device's requests and results, so that its unfinished passes are repeated."""
        for request in [request for request in self._requests if request.device == device]:
            self._requests.discard(request)
            self._taking.pop(request, None)
            self.repeated += request.kind.is_pass
            if request.kind is RequestKind.FORWARD:
                self._stages[request.stage].forward.discard(request.batch)
        self.repeated += sum(stage.forget(device) for stage in self._stages)

    def changed(self) -> list[ForSteps]:
        """Continue the step after a device became available, because a stage may need a device."""
        if self.ended:
            return []
        if self._trained is not None:
            self._stop_restoring(self._trained)
        return self._go_on()

    def give(self, batch: int, made: StageArray, after: int | None = None) -> list[ForSteps]:
        """Record an array that the training thread computed for a micro-batch.

        Args:
            made: without `after`, the gradient of the last stage's output. With loss slices, the
                first call for a micro-batch passes the log-sum-exp over the whole vocabulary
                instead. With `after`, the first call for a micro-batch passes the next stage's
                input, and the second call passes the gradient of stage `after`'s output.
            after: number of the stage before the PS's own layers; None if these layers did not
                compute the array.
        """
        if self.ended:
            return []
        if after is not None:
            following = self._stages[after + 1]
            to = self._stages[after].dy if batch in following.x else following.x
            to[batch] = made
        elif any(batch not in stage.dy for stage in self._slices):
            for stage in self._slices:
                stage.dy[batch] = made
        else:
            self._last.dy[batch] = made
        return self._go_on()

    def update(self, scalars: Sequence[StageArray]) -> list[ForSteps]:
        """Tell devices to update their trained state.

        Args:
            scalars: coefficients of the optimizer step, by `ResidentParameter.group`.
        """
        if self.ended or self._trained is None:
            return []
        self._trained.scalars = scalars
        return self._go_on()

    def withdraw(self) -> None:
        """End the step and discard its unfinished requests.

        If the step is not complete, devices drop the trained state that it has already updated,
        because this state would be ahead of the log.
        """
        if (trained := self._trained) is not None and not self.ended:
            self._spares.abandon()
            for device, store in self._stores.items():
                store.drop_state(*trained.unfinished(device), *trained.updated(device))
                if self._spares.is_busy(device):  # the next step drops nothing else on it
                    store.drop(self._made_on(device))
        self.ended = True
        self._requests.clear()
        self._suspects.clear()

    def _made_on(self, device: int) -> set[int]:
        """Return the wire IDs of the gradient sums and retained arrays on a device."""
        sums = [g.sums for s in self._stages for g in s.accumulators if g.device == device]
        restores = (r for r in self._requests if r.kind is RequestKind.RESTORE)
        sums += [request.sums for request in restores if request.device == device]
        kept = [
            layer
            for s in self._stages
            for d, each in s.kept.values()
            if d == device
            for layer in each
        ]
        return {id for each in sums for id in each.values() if id}.union(*kept)

    def view(self) -> StepView:
        """Return a snapshot of the step's progress."""
        flying = Counter(
            (request.kind is RequestKind.FORWARD, request.stage, request.device)
            for request in self._requests
            if request.kind.is_pass
        )
        stages = sorted(enumerate(self._stages), key=lambda each: each[1].plan.first)
        views = tuple(stage.view(number, flying) for number, stage in stages)
        resident = self.work.resident
        logged = None if resident is None else len(resident.log)
        return StepView(self.work.batches, self.ended, self.repeated, views, logged)

    def tasks(self) -> tuple[int, int]:
        """Return the number of completed tasks and the total number of tasks. Thread-safe.

        A task is one pass of a micro-batch through a stage, or the transfer of one stage's gradient
        sums.
        """
        counts = [stage.tasks() for stage in tuple(self._stages)]
        return sum(done for done, _ in counts), sum(of for _, of in counts)

    def validate(self) -> None:
        """Check that the step's state is consistent.

        Raises:
            AssertionError: if the state is inconsistent.
        """
        for number, stage in enumerate(self._stages):
            stage.validate()
            for request in self._requests:
                if request.stage == number and request.kind.is_pass:
                    known = stage.forward if request.kind is RequestKind.FORWARD else stage.backward
                    if request.batch not in known:
                        raise AssertionError(
                            f"{request.kind.value} of {request.batch} is not noted"
                        )

    # --- answers ---

    def computed(self, order: StageOrder, run: int) -> list[ForSteps]:
        """Record the answer to a task. The last answer of a request completes the request."""
        request = order.request
        request.answers.pop(run, None)
        store = self._stores.get(request.device)
        if store is None:
            return []
        store.answered(run)
        if request not in self._requests:
            return [*store.take()]
        if request.rest:
            store.more_rows(request)
            return [*store.take()]
        if request.replay:
            store.more_replay(request)
            return [*store.take()]
        if request.answers:
            return [*store.take()]
        if not self._stands_out(request):
            self._accept(request)
        else:
            self._suspects.append(request)
            if len(self._suspects) == 1:
                self._tell_suspect()
        self._out += store.take()
        return self._go_on()

    def _place(self, order: StageOrder) -> Place:
        """Return the place under which the usual magnitude of a fetched array is stored."""
        request, plan = order.request, self._stages[order.request.stage].plan
        if request.kind is RequestKind.SUMS:
            layer, parameter, _ = order.name
            return Returned.SUM, parameter, layer
        slice = "" if plan.slice is None else plan.named
        match order.name[0] if isinstance(order.name, tuple) else order.name:
            case names.Y:
                return Returned.OUTPUT, slice, plan.stop
            case names.LOSS:
                return Returned.LOSS, "", 0
            case _:
                return Returned.GRADIENT, slice, plan.first

    def _stands_out(self, request: StageRequest) -> dict[Place, float]:
        """Return the unusual magnitudes in a request's results, keyed by place."""
        if self._diverged or request not in self._requests or self._trained is not None:
            return {}  # the PS lacks the weights that it would need to repeat resident stages
        return {p: size for p, size in request.sizes.items() if not self._usual.explains(p, size)}

    def _tell_suspect(self) -> None:
        request = self._suspects[0]
        stage, batches = self._stages[request.stage], {request.batch}
        y: dict[int, Any] = {}
        dx: dict[int, Any] = {}
        sums = []
        if request.kind is RequestKind.SUMS:
            batches = self._taking[request].batches
            sums = [SumsRecord(request.device, frozenset(batches), dict(request.found))]
        elif request.kind is RequestKind.FORWARD:
            y = {request.batch: request.fetched(names.Y)}
        else:
            dx = {request.batch: request.fetched(names.DX)}
        record = StageRecord(
            stage.plan,
            {batch: stage.x[batch] for batch in batches},
            {batch: stage.dy[batch] for batch in batches if batch in stage.dy},
            y,
            dx,
            dict.fromkeys(y, request.device),
            dict.fromkeys(dx, request.device),
            sums,
        )
        losses = {request.batch: request.found[names.LOSS]} if names.LOSS in request.found else {}
        suspect = Suspect(request.device, record, losses, self._stands_out(request))
        self._out.append(TellStep(suspect, self.work))

    def _accept(self, request: StageRequest, *, repeated: bool = False) -> None:
        """Use a request's results. `repeated` says whether the PS recomputed and confirmed them."""
        if request not in self._requests:
            return
        self._requests.discard(request)
        for place, size in request.sizes.items():
            if math.isfinite(size):
                self._usual.saw(place, size, repeated=repeated)
            else:  # training diverges, or the model's weights are not finite
                self._diverged = True
        self._finish(request)

    def _finish(self, request: StageRequest) -> None:
        stage = self._stages[request.stage]
        match request.kind:
            case RequestKind.FORWARD:
                if request.kept:
                    stage.kept[request.batch] = request.device, request.kept
                self._passed(request, request.fetched(names.Y))
            case RequestKind.BACKWARD | RequestKind.LAST:
                self._added(stage, request)
            case RequestKind.SUMS:
                accumulator = self._taking.pop(request)
                accumulator.found, accumulator.landed = request.found, True
                store = self._store(request.device)
                store.drop(accumulator.sums.values())
                self._out += store.take()
            case RequestKind.SQUARES:
                stage.squares = 0.0
                if (found := request.found.get(names.SQUARES)) is not None:
                    stage.squares = _number(found)
            case RequestKind.UPDATE:
                accumulator = stage.accumulator_on(request.device)
                accumulator.taken = accumulator.landed = True
            case RequestKind.RESTORE if request.added:
                stage.accumulators.append(
                    GradientAccumulator(request.device, request.sums, batches=request.added)
                )
                stage.backward |= request.added
                self.repeated -= len(request.added)
            case RequestKind.STATE:
                stage.state, stage.owes_state = request.found, False
                stage.held_by = self._store(request.device).holding(stage.plan)

    def _passed(self, request: StageRequest, payload: Any) -> None:
        """Record a forward pass. Send its output to the next stage or the training thread."""
        stage = self._stages[request.stage]
        is_new = request.batch not in stage.y
        if is_new:
            stage.y[request.batch], stage.forward_by[request.batch] = payload, request.device
        if stage.plan.slice is not None:
            if is_new and all(request.batch in one.y for one in self._slices):
                found = [one.y[request.batch] for one in self._slices]
                self._out.append(TellStep(SlicesReady(request.batch, found), self.work))
            return
        if stage.is_embedding(request.batch):
            number = request.batch - self.work.batches
            self._stages[0].x.setdefault(number, self._activation(number, payload))
            return
        if stage is self._last and self._slices:
            x = self._activation(request.batch, payload)
            for one in self._slices:
                one.x.setdefault(request.batch, x)
            return
        if stage is self._last:
            self._out.append(TellStep(OutputReady(request.batch, payload), self.work))
            return
        if request.stage in self.work.ps_after:
            if is_new:
                wanted = InputWanted(request.stage, request.batch, payload)
                self._out.append(TellStep(wanted, self.work))
            return
        following = self._stages[request.stage + 1]
        if request.batch not in following.x:  # a repeated pass must not replace the input
            following.x[request.batch] = self._activation(request.batch, payload)

    def _added(self, stage: StageState, request: StageRequest) -> None:
        """Record a backward pass. Send its `dx` to the previous stage or the training thread."""
        for accumulator in stage.accumulators:
            if accumulator.device == request.device and request.batch in accumulator.asked:
                accumulator.asked.discard(request.batch)
                accumulator.batches.add(request.batch)
                if self._trained is not None and not self.work.evaluates:
                    finished = accumulator.batches
                    step, number = self._logged(), request.stage
                    self._out += self._spares.follow(step, number, finished, self.devices)
        if request.kind is RequestKind.LAST:
            self._losses.setdefault(request.batch, request.found[names.LOSS])
            stage.backward_by.setdefault(request.batch, request.device)
        dx = request.fetched(names.DX)
        is_new = dx is not None and request.batch not in stage.dx
        if is_new:
            stage.dx[request.batch], stage.backward_by[request.batch] = dx, request.device
        if (request.stage, request.device) in self.work.watched:
            one, losses = stage.record_of(request.batch), self._losses
            mine = {request.batch: losses[request.batch]} if request.batch in losses else {}
            done = PassDone(request.stage, request.device, request.batch, one, mine)
            self._out.append(TellStep(done, self.work))
        if dx is None:
            return
        if stage.plan.slice is not None:
            if is_new and all(request.batch in one.dx for one in self._slices):
                found = [one.dx[request.batch] for one in self._slices]
                self._out.append(TellStep(SlicesBack(request.batch, found), self.work))
        elif request.stage == 0 and self.work.embedding is not None:
            number = self.work.batches + request.batch
            self._last.dy.setdefault(number, self._activation(request.batch, dx))
        elif request.stage == 0:
            self._dx.setdefault(request.batch, dx)
        elif request.stage - 1 in self.work.ps_after:
            if is_new:
                wanted = GradientWanted(request.stage - 1, request.batch, dx)
                self._out.append(TellStep(wanted, self.work))
        elif request.batch not in self._stages[request.stage - 1].dy:
            self._stages[request.stage - 1].dy[request.batch] = self._activation(request.batch, dx)

    def _activation(self, batch: int, payload: Any) -> StageArray:
        return StageArray(self.work.tokens[batch], self.work.width, self.work.dtype, payload)

    # --- scheduling ---

    def _go_on(self) -> list[ForSteps]:
        """Request all passes that can start now. If the step is complete or has failed, end it."""
        if not self.ended and self.failures >= MAX_FAILURES:
            self._end_failed("too many devices failed")
        while not self.ended and self._ask_once():
            pass
        if not self.ended:
            if self._trained is None:
                self._take_sums()
            elif not self.work.evaluates:
                self._use_gradients(self._trained)
            self._tell_done()
            self._finish_step()
        out, self._out = self._out, []
        return out

    def _ask_once(self) -> bool:
        """Send each eligible device at most one request. Return whether any request was sent."""
        self._replace_missing()
        if self.ended:
            return False
        if self._trained is not None:
            self._restore_missing(self._trained)
        busy = Counter(request.device for request in self._requests)
        asked = [self._ask(device) for device in self._turns(busy)]
        return any(asked)

    def _turns(self, busy: Counter[int]) -> list[int]:
        """Return the devices that may run another request, in the order of `rules.turn`."""
        able = self.devices
        if not able <= self._request_s.keys():
            self._time_units()
        free = [device for device in able if rules.may_have_another(busy[device])]
        return sorted(free, key=lambda d: rules.turn(busy[d], self._request_s[d], d))

    def _time_units(self) -> None:
        """Predict the seconds that each device needs per request of its first stage."""
        present, tokens = self._present(), max(self.work.tokens)
        activation = max(x.nbytes for x in self.work.x)
        for stage in self._stages:
            flops = tokens * Takeover(self.work, stage.plan, stage.sums).flops
            for device in stage.devices:
                rates = present.get(device)
                request_s = rates.request_s(activation, flops) if rates is not None else math.inf
                self._request_s.setdefault(device, request_s)

    def _ask(self, device: int) -> bool:
        """Send a device its next request. Return False if no request is ready."""
        mine = [
            (n, s)
            for n, s in enumerate(self._stages)
            if device in s.devices and (self._trained is None or self._trained.may_run(n, device))
        ]
        mine.sort(key=lambda each: (each[1].passes, each[0]), reverse=True)
        backward = _first((n, stage, stage.next_backward(device)) for n, stage in mine)
        forward = _first((n, stage, stage.next_forward()) for n, stage in mine)
        direction = rules.next_pass(
            forward=forward is not None,
            backward=backward is not None,
            last_was_backward=device in self._went_back,
            forward_first=self.work.forward_first,
        )
        if direction is Pass.BACKWARD and backward is not None:
            self._went_back.add(device)
            number, stage, batch = backward
            self._ask_backward(number, stage, device, batch)
        elif direction is Pass.FORWARD and forward is not None:
            self._went_back.discard(device)
            number, stage, batch = forward
            self._ask_forward(number, stage, device, batch)
        return direction is not None

    def _ask_forward(self, number: int, stage: StageState, device: int, batch: int) -> None:
        embeds = stage.is_embedding(batch)
        keep = Keep.NOTHING if embeds else self._next_kept(stage, device)
        request = self._request(RequestKind.FORWARD, number, batch, device, keep)
        stage.forward.add(batch)
        store = self._store(device)
        if embeds:
            store.embedding_forward(request, stage.x[batch])
        else:
            ask = store.forward if stage.plan.slice is None else store.slice_forward
            ask(request, stage.x[batch])
        self._out += store.take()

    def _next_kept(self, stage: StageState, device: int) -> Keep:
        """Return which arrays a device retains from its next micro-batch for the backward pass."""
        if self.work.evaluates:
            return Keep.NOTHING
        kept = [
            layers for s in self._stages for place, layers in s.kept.values() if place == device
        ]
        kept += [
            request.kept for request in self._requests if request.device == device and request.kept
        ]
        activations = sum(len(layers[0]) > 1 for layers in kept if layers)
        return rules.next_kept(
            self.work.kept_batches.get(device, NOTHING_KEPT),
            len(kept) - activations,
            activations,
            planned=device in stage.plan.devices,
        )

    def _ask_backward(self, number: int, stage: StageState, device: int, batch: int) -> None:
        """Request a backward pass and, in a stage with the loss, the forward pass and the loss."""
        accumulator = stage.accumulator_on(device)
        accumulator.asked.add(batch)
        stage.backward.add(batch)
        store = self._store(device)
        embeds = stage.is_embedding(batch)
        dx_wanted = stage.passes and batch not in stage.dx and not embeds
        kind, keep = RequestKind.BACKWARD, Keep.NOTHING
        if stage.plan.loss and not embeds:
            kind, keep = RequestKind.LAST, self._next_kept(stage, device)
        request = self._request(kind, number, batch, device, keep)
        request.sums, request.dx_wanted = accumulator.sums, dx_wanted
        if embeds:
            store.embedding_backward(request, stage.x[batch], stage.dy[batch])
        elif stage.plan.loss:
            store.last(request, stage.x[batch])
        else:
            kept = stage.kept.pop(batch, None)
            given = stage.x[batch] if kept is None else kept[1]
            ask = store.backward if stage.plan.slice is None else store.slice_backward
            ask(request, given, stage.dy[batch])
        self._out += store.take()

    def _request(
        self, kind: RequestKind, stage: int, batch: int, device: int, keep: Keep = Keep.NOTHING
    ) -> StageRequest:
        request = StageRequest(kind, stage, self._stages[stage].plan, batch, device, keep)
        self._requests.add(request)
        return request

    def _take_sums(self) -> None:
        """Request sums of completed stages from devices with no more input gradients to return."""
        for number, stage in enumerate(self._stages):
            left = stage.left
            for accumulator in stage.accumulators:
                awaited = not left and self._is_waited_for(accumulator.device)
                if accumulator.taken or not rules.may_take_sums(left, gradients_awaited=awaited):
                    continue
                accumulator.taken = True
                if not accumulator.sums:
                    accumulator.landed = True
                    continue
                request = self._request(RequestKind.SUMS, number, -1, accumulator.device)
                self._taking[request] = accumulator
                store = self._store(accumulator.device)
                store.sums(request, accumulator, stage.sums)
                self._out += store.take()

    def _restore_missing(self, trained: TrainedState) -> None:
        """Send the trained state of stages to devices that lack it."""
        for number, stage in enumerate(self._stages):
            for device in stage.devices:
                request = self._spares.take_over(number, device)
                if request is not None:
                    self._requests.add(request)
                    if not request.answers:
                        self._accept(request)
                    self._out += self._store(device).take()
        for number, device in trained.missing():
            store = self._store(device)
            request = self._request(RequestKind.RESTORE, number, -1, device)
            self._restored += store.updates_in(request.plan) is None
            store.restore(request)
            if not request.answers:  # nothing was logged since the snapshot
                self._requests.discard(request)
            self._out += store.take()

    def _stop_restoring(self, trained: TrainedState) -> None:
        """Move stages that are being restored to devices that have newer state."""
        for request in [r for r in self._requests if r.kind is RequestKind.RESTORE]:
            stage = self._stages[request.stage]
            able = self._present().keys() - self._failed.keys() - {request.device}
            holder = next((d for d in able if trained.may_run(request.stage, d)), None)
            if holder is None:
                able -= self.devices
                repeats = {d: self._steps_to_repeat(stage, d) for d in able}
                holder = min(able, key=lambda d: (repeats[d], d), default=None)
                if holder is None or repeats[holder] >= request.steps_left:
                    continue
            self._requests.discard(request)
            stage.devices = [holder]
            store = self._store(request.device)
            store.stop_restoring(request)
            self._out += store.take()

    def _use_gradients(self, trained: TrainedState) -> None:
        """Request squared gradients, updates or trained state from stages without passes left."""
        for number, device, kind in list(trained.due()):
            if self._is_waited_for(device):
                continue
            request = self._request(kind, number, -1, device)
            store = self._store(device)
            if kind is RequestKind.STATE:
                store.state(request)
            else:
                request.sums = self._stages[number].accumulator_on(device).sums
                if kind is RequestKind.SQUARES:
                    store.squares(request)
                else:
                    assert trained.scalars is not None
                    store.update(request, trained.scalars)
            if not request.answers:  # no layer of the stage is trained
                self._accept(request)
            self._out += store.take()
        if (squares := trained.all_squares()) is not None:
            wanted = UpdateWanted(squares, self._losses, self._dx)
            self._out.append(TellStep(wanted, self.work))

    def _logged(self) -> LoggedStep:
        """Return this step's log entry, as far as its contents are known."""
        assert self._trained is not None
        x, dy = [stage.x for stage in self._stages], [stage.dy for stage in self._stages]
        return LoggedStep(self.work, x, dy, self._trained.scalars or ())

    def _is_waited_for(self, device: int) -> bool:
        """Return whether a device must still return input gradients that an earlier stage needs."""
        return any(
            stage.passes and device in stage.devices and stage.owes_dx for stage in self._stages[1:]
        )

    def _tell_done(self) -> None:
        """Tell the training thread which stages have finished since the last call."""
        for number, stage in enumerate(self._stages):
            if stage.has_landed and not stage.told:
                stage.told = True
                losses = self._losses if stage.plan.loss else {}
                done = StageDone(number, stage.record, losses, stage.gradients)
                self._out.append(TellStep(done, self.work))

    def _finish_step(self) -> None:
        """End the step successfully if all gradient sums of all stages have arrived at the PS.

        An evaluation ends when all losses, or all outputs of the last stage, have arrived.
        """
        if self.work.evaluates:
            if len(self._losses if self._last.plan.loss else self._last.y) == self.work.batches:
                records = [stage.record for stage in self._stages]
                self._drop_sums()
                self._end(StepResult(self._losses, {}, {}, records))
            return
        if not all(stage.has_landed for stage in self._stages):
            return
        gradients = {k: v for stage in self._stages for k, v in stage.gradients.items()}
        records = [stage.record for stage in self._stages]
        state = {k: v for stage in self._stages for k, v in stage.state.items()}
        restored = self._restored if self.work.resident and self.work.resident.log else 0
        holders = {n: s.held_by for n, s in enumerate(self._stages) if s.held_by is not None}
        squares = [s.squares for s in self._stages if s.squares is not None]
        if self._trained is not None and self._trained.scalars is not None:
            self._out += self._spares.complete(self._logged(), self.devices)
        self._end(
            StepResult(
                self._losses,
                self._dx,
                gradients,
                records,
                state=state,
                holders=holders,
                squares=squares,
                restored=restored,
            )
        )

    def _drop_sums(self) -> None:
        """Drop the gradient sums that the graph of the loss has made in an evaluation."""
        for stage in self._stages:
            for accumulator in stage.accumulators:
                store = self._store(accumulator.device)
                store.drop(filter(None, accumulator.sums.values()))
                self._out += store.take()
            stage.accumulators, stage.backward = [], set()

    def _end_failed(self, why: str) -> None:
        reasons = "; ".join(f"device {d}: {reason}" for d, reason in self._failed.items())
        self._end(StepFailed(f"{why}: {reasons}"))

    def _end(self, outcome: StepResult | StepFailed) -> None:
        self.withdraw()
        self._out.append(TellStep(outcome, self.work))

    # --- devices ---

    def _replace_missing(self) -> None:
        """Assign new devices to unfinished stages that have no devices left."""
        missing = [
            s for s in self._stages if not s.devices and not s.has_landed and not self._waits(s)
        ]
        if not missing:
            return
        for stage in missing:
            self._reinforce(stage)
        if self._failed and not self._present().keys() - self._failed.keys():
            self._end_failed("no device is left that did not fail")
            return
        if not self._noted and not all(stage.devices for stage in missing):
            self._noted = True
            what = ", ".join(s.plan.named for s in missing)
            self._out.append(Note(f"{what} wait for a device that can run them"))

    def _waits(self, stage: StageState) -> bool:
        """Return whether a stage waits for a device that may return with its trained state."""
        if self._trained is None or not self._awaited(stage.plan):
            return False
        able = self._present().keys() - self._failed.keys()
        stores = (store for device, store in self._stores.items() if device in able)
        return all(store.updates_in(stage.plan) is None for store in stores)

    def _reinforce(self, stage: StageState) -> None:
        """Add the devices that are predicted to finish a stage's micro-batches earliest."""
        if self._waits(stage):
            return
        candidates = self._candidates(stage)
        if self._trained is not None and candidates:  # the state is on one device
            left = max(1, stage.left)

            def finish_s(candidate: Candidate) -> float:
                steps = self._steps_to_repeat(stage, candidate.device)
                return candidate.other_s + (left + steps * self.work.batches) * candidate.each_s

            candidates = [min(candidates, key=finish_s)]
        chosen = soonest(candidates, stage.left)
        stage.devices = sorted({*stage.devices, *chosen})

    def _divide(self, stage: StageState) -> None:
        """Split a stage that has no devices and no accumulators, and assign devices to the parts.

        Each part returns some of the stage's gradient sums. The number of parts is chosen for the
        earliest predicted finish. Without available devices, the stage is not changed.
        """
        groups = soonest_parts(
            lambda parts: self._candidates(stage, parts), stage.left, max(1, len(stage.sums))
        )
        if not groups:
            return
        takeover = Takeover(self.work, stage.plan, stage.sums)
        stage.sums, *others = takeover.divided(len(groups))
        stage.devices = groups[0]
        for sums, devices in zip(others, groups[1:], strict=True):
            self._stages.append(stage.part(sums, devices))

    def _candidates(self, stage: StageState, parts: int = 1) -> list[Candidate]:
        """Return the devices that can take over a part of a stage, with their predicted times."""
        able = {d: rates for d, rates in self._present().items() if d not in self._failed}
        if not able:
            return []
        self._noted = False
        takeover = Takeover(self.work, stage.plan, stage.sums)
        fitting = [
            rates
            for d, rates in able.items()
            if d in stage.devices or takeover.fits(rates, self._stores.get(d))
        ]
        if not fitting:  # no device has enough memory, so try the one with the most
            fitting = [max(able.values(), key=lambda r: (r.memory_bytes, -r.device))]
        return [
            takeover.candidate(
                r, self._stores.get(r.device), self._own_s(r, stage), parts, stage.returned
            )
            for r in fitting
        ]

    def _steps_to_repeat(self, stage: StageState, device: int) -> int:
        """Return how many logged steps a device must repeat before it can run a stage."""
        resident = self.work.resident
        assert resident is not None
        store = self._stores.get(device)
        updates = None if store is None else store.updates_in(stage.plan)
        return resident.now - (resident.position if updates is None else updates)

    def _own_s(self, rates: DeviceRates, besides: StageState) -> float:
        """Return a device's predicted time for all stages except `besides`, in seconds."""
        total_s = 0.0
        for stage in self._stages:
            if stage is not besides and rates.device in stage.devices:
                takeover = Takeover(self.work, stage.plan, stage.sums)
                each_s = takeover.batch_s(rates, stage.returned)
                total_s += stage.left / len(stage.devices) * each_s
                total_s += self._sums_left(stage, rates.device) * takeover.sums_s(rates)
        return total_s

    def _sums_left(self, stage: StageState, device: int) -> float:
        """Return the fraction of a stage's gradient sums that a device must still return."""
        if stage.has_landed:
            return 0.0
        for request, accumulator in self._taking.items():
            if accumulator.device == device and accumulator in stage.accumulators:
                left = len(request.answers) + len(request.rest)
                return left / (left + len(request.found))
        return 1.0

    def _arrays_of(self, stage: StageState, device: int) -> Iterator[StageArray | StageGraph]:
        kept = self.work.kept_batches.get(device, NOTHING_KEPT)
        return arrays_of(self.work, stage.plan, kept)

    def _store(self, device: int) -> StageDevice:
        if device not in self._stores:
            self._stores[device] = StageDevice(device, self._ids, self.work)
        self._stores[device].work = self.work
        return self._stores[device]


def _first(
    found: Iterable[tuple[int, StageState, int | None]],
) -> tuple[int, StageState, int] | None:
    """Return the first (number, stage, micro-batch) entry whose micro-batch is not None."""
    return next(((n, stage, b) for n, stage, b in found if b is not None), None)


def _number(payload: Any) -> float:
    """Return a number that a device has returned."""
    return float(arrays.unpack(payload, 1, 1, DType.FP32).float32().item())
